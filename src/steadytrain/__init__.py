"""Train and fine-tune image classifiers at the steady state.

Importing this package imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from steadytrain.errors import SteadyError as SteadyError
    from steadytrain.feed import Blocks as Blocks
    from steadytrain.feed import Cut as Cut
    from steadytrain.feed import Feed as Feed
    from steadytrain.feed.dataset import FeedDataset as FeedDataset
    from steadytrain.recipe import Budget as Budget
    from steadytrain.recipe import Data as Data
    from steadytrain.recipe import Every as Every
    from steadytrain.recipe import Model as Model
    from steadytrain.recipe import Optim as Optim
    from steadytrain.recipe import Parallel as Parallel
    from steadytrain.recipe import Precision as Precision
    from steadytrain.recipe import Recipe as Recipe
    from steadytrain.records import Records as Records
    from steadytrain.records import Unpacked as Unpacked
    from steadytrain.records import pack as pack
    from steadytrain.reports import report as report
    from steadytrain.run import Run as Run
    from steadytrain.training import evaluate as evaluate
    from steadytrain.training import predict as predict
    from steadytrain.training import restore as restore
    from steadytrain.training import steps as steps
    from steadytrain.training import train as train
    from steadytrain.watch import diagnose as diagnose
    from steadytrain.watch import ledger as ledger

_PLACES = {
    "Blocks": "feed",
    "Budget": "recipe",
    "Cut": "feed",
    "Data": "recipe",
    "Every": "recipe",
    "Feed": "feed",
    "FeedDataset": "feed.dataset",
    "Model": "recipe",
    "Optim": "recipe",
    "Parallel": "recipe",
    "Precision": "recipe",
    "Recipe": "recipe",
    "Records": "records",
    "Run": "run",
    "SteadyError": "errors",
    "Unpacked": "records",
    "diagnose": "watch",
    "evaluate": "training",
    "ledger": "watch",
    "pack": "records",
    "predict": "training",
    "report": "reports",
    "restore": "training",
    "steps": "training",
    "train": "training",
}

__all__ = sorted([*_PLACES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'steadytrain' has no attribute {name!r}")
    return getattr(import_module(f"steadytrain.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
