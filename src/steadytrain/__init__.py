"""Train and fine-tune image classifiers, and find out what slows a run down.

::

    import steadytrain as st

    result = st.finetune("photos", epochs=5)  # a folder for each class
    print(result.metrics["top1"])
    for prediction in st.predict(result.run, "new/"):
        print(prediction.path, prediction.label, prediction.probability)
    st.report(result.run, "report.html")

Importing this package imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from steadytrain import data as data
    from steadytrain.config import Budget as Budget
    from steadytrain.config import Data as Data
    from steadytrain.config import Every as Every
    from steadytrain.config import Model as Model
    from steadytrain.config import Optim as Optim
    from steadytrain.config import Parallel as Parallel
    from steadytrain.config import Precision as Precision
    from steadytrain.config import Recipe as Recipe
    from steadytrain.data.loader import BlockShuffle as BlockShuffle
    from steadytrain.data.loader import Crop as Crop
    from steadytrain.data.loader import ImageLoader as ImageLoader
    from steadytrain.data.loader.dataset import ImageLoaderDataset as ImageLoaderDataset
    from steadytrain.data.packing.pack import pack as pack
    from steadytrain.data.recordio.reader import Records as Records
    from steadytrain.data.sources.unpacked import Unpacked as Unpacked
    from steadytrain.errors import SteadyError as SteadyError
    from steadytrain.export.export import export_model as export_model
    from steadytrain.interop.sklearn import ImageClassifier as ImageClassifier
    from steadytrain.monitor import diagnose as diagnose
    from steadytrain.monitor import ledger as ledger
    from steadytrain.reports import report as report
    from steadytrain.reports.costs import bill as bill
    from steadytrain.reports.run_list import runs as runs
    from steadytrain.run import Run as Run
    from steadytrain.training import calibrate as calibrate
    from steadytrain.training import default_recipe as default_recipe
    from steadytrain.training import evaluate as evaluate
    from steadytrain.training import finetune as finetune
    from steadytrain.training import predict as predict
    from steadytrain.training import repeat as repeat
    from steadytrain.training import restore as restore
    from steadytrain.training import steps as steps
    from steadytrain.training import train as train
    from steadytrain.training.inference.feature_vectors import features as features
    from steadytrain.training.loop.steering import SetRate as SetRate
    from steadytrain.training.loop.steering import Stop as Stop

_MODULES = {
    "config": "Budget Data Every Model Optim Parallel Precision Recipe",
    "data.loader": "BlockShuffle Crop ImageLoader",
    "data.loader.dataset": "ImageLoaderDataset",
    "data.packing.pack": "pack",
    "data.recordio.reader": "Records",
    "data.sources.unpacked": "Unpacked",
    "errors": "SteadyError",
    "export.export": "export_model",
    "interop.sklearn": "ImageClassifier",
    "monitor": "diagnose ledger",
    "reports": "report",
    "reports.costs": "bill",
    "reports.run_list": "runs",
    "run": "Run",
    "training": "calibrate default_recipe evaluate finetune predict repeat restore steps train",
    "training.inference.feature_vectors": "features",
    "training.loop.steering": "SetRate Stop",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

_ALIASES = ("BlockShuffle", "Crop", "ImageLoader", "ImageLoaderDataset", "Records", "Unpacked")
"""Earlier names of what ``st.data`` has."""

_LACKING = () if find_spec("sklearn") else ("ImageClassifier",)  # which import * leaves out

__all__ = sorted([*(_PLACES.keys() - {*_ALIASES, *_LACKING}), "__version__", "data"])


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("steadytrain.data")
    if name not in _PLACES:
        hint = (
            "" if name.startswith("_") else import_module("steadytrain.config.foreign").instead_in_python(name, __all__)
        )
        what = f"module 'steadytrain' has no attribute {name!r}{hint}"
        raise AttributeError(what, name=name, obj=sys.modules[__name__])
    if name in _LACKING:  # no ImportError, which ends hasattr() and help()
        raise AttributeError(f"st.{name} needs scikit-learn: pip install scikit-learn")
    if "IPython" in sys.modules:  # a notebook: it shows results as the report does
        import_module("steadytrain.reports.notebook").register()
    loads_torch = _PLACES[name].startswith(("training", "export")) and "torch" not in sys.modules
    if loads_torch:
        import_module("steadytrain.machine.process").limit_spins()
    calls = import_module("steadytrain.config.calls")
    with calls.shown_meanwhile("loading torch", loads_torch):
        value = getattr(import_module(f"steadytrain.{_PLACES[name]}"), name)
    if not isinstance(value, FunctionType):
        return value
    # One object by one name, which pickle finds.
    return globals().setdefault(name, calls.public(value, __name__))


def __dir__() -> list[str]:
    return list(__all__)
