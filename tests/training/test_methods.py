"""Every method of training: a run that was stopped comes to the same bits, and so do two ranks and one process.

One short run of each (``METHODS``) is made whole, in two attempts, and by two ranks. To add a method, add a line. Those
whose state, draws or code path no other one has (``DISTINCT``) are always tried, all of them with the slow tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.ranks import as_group
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2

from steadytrain.config import Budget, Data, Every, Model, Optim, Parallel, Recipe
from steadytrain.config.laws import find_law, law_names
from steadytrain.config.losses import PARAMETERS
from steadytrain.config.transforms import KINDS
from steadytrain.data.packing.pack import pack
from steadytrain.distributed.process_group import Group
from steadytrain.events import Ended, Evaluated, Event, Step
from steadytrain.optim import kinds
from steadytrain.run import Run
from steadytrain.training import steps

DOCUMENT = Path(__file__).parents[2] / "docs" / "reproducible.md"


def own_optimizer(groups: Any, *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=0.8)


def own_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return partial(functional.cross_entropy, label_smoothing=0.2)


def own_transform() -> v2.Transform:
    return v2.RandomChoice([v2.GaussianBlur(3, sigma=(0.1, 3.0)), v2.RandomErasing(0.5), v2.RandomRotation(20)])


def _transform(name: str) -> str:
    return ":".join([name, ",".join(map(str, KINDS[name].usual))]) if KINDS[name].parameters else name


def _law(name: str) -> dict[str, Any]:
    numbers = dict.fromkeys(("factor", "restarts", "triangular"), "every=0.2")
    numbers |= {"mxnet/factor": "step=2", "exponential": "to=0.01"}
    changes: dict[str, Any] = {"optim.schedule": ",".join([name, *([numbers[name]] if name in numbers else [])])}
    changes["optim.warmup_epochs"] = 0.0 if (law := find_law(name)) and law.rises else 0.1
    if name in ("step", "mxnet/multi-factor"):
        changes["optim.milestones"] = (0.2, 0.4)
    if name == "plateau":
        changes |= {"optim.schedule": "plateau,patience=1,factor=0.5", "every.evaluate_epochs": 0.1}
        changes["model.batch_norm"] = "frozen"  # the statistics, and so the evaluations, are those of rank 0
    return changes


TIMM = ("adabelief", "adan", "adopt", "lamb", "lars", "lion", "madgrad", "nadamw", "rmsproptf", "sgdw")
OPTIONS: dict[str, dict[str, Any]] = {"lbsgd": {"batch_scale": 4, "updates_per_epoch": 4, "momentum": 0.9}}

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {
        name: {"optim.name": name, "optim.lr": 0.01, "optim.options": OPTIONS.get(name, {})}
        for name in (*kinds(), *(f"timm/{name}" for name in TIMM), f"{__name__}:own_optimizer")
    },
    "augmentation": {
        **{name: {"data.transforms": (_transform(name),)} for name in KINDS},
        "all at once": {"data.transforms": ("vflip", "rotate:10", "augmix", "color:0.4", "erase", "mixup", "cutmix")},
        "own_transform": {"data.transforms": (f"{__name__}:own_transform", "erase", "mixup")},
        "growing size": {"data.grow_size": ("6@0", "9@0.3")},
        "resized-crop": {"data.augment": "resized-crop"},
        "alternating flip": {"data.flip": "alternating"},
        "blocks": {"data.order": "blocks"},
        "balance": {"data.balance": "classes"},
        "repeats": {"data.repeats": 2, "data.transforms": ("trivialaugment",)},
    },
    "loss": {
        **{name: {"optim.loss": name} for name in PARAMETERS},
        "own": {"optim.loss": f"{__name__}:own_loss"},
        "class weights": {"optim.class_weights": "balanced"},
        "label smoothing": {"optim.label_smoothing": 0.1},
        "clipped": {"optim.clip_norm": 0.5},
    },
    "several labels": {
        "labels": {"data.train": "labels.csv"},
        "labels, mixed and weighted": {
            "data.train": "labels.csv",
            "data.transforms": ("mixup",),
            "optim.loss": "binary-focal",
            "optim.class_weights": "balanced",
        },
    },
    "schedule": {
        **{name: _law(name) for name in law_names()},
        "a chain": {"optim.schedule": "linear:0.2,to=0.5 cosine"},
        "growing batch": {"optim.grow_batch": ("2@0.3",)},
    },
    "fine-tuning": {
        "head": {"model.train": "head"},
        "head, then full": {"model.train": "head:0.2+full"},
        "discriminative": {"model.train": "discriminative"},
        "gradual": {"model.train": "gradual:0.05"},
        "probe, then full": {"model.train": "probe+full"},
        "freeze": {"model.freeze": ("features.0", "features.3")},
        "frozen batch norms": {"model.batch_norm": "frozen"},
    },
    "average": {
        "ema": {"optim.ema": 0.9},
        "swa": {"optim.swa": 0.2, "optim.schedule": "constant"},
    },
    "numbers": {
        "bf16": {"precision.name": "bf16"},
        "pure-bf16": {"precision.name": "pure-bf16"},
        "recompute": {"parallel.recompute": True},
    },
}
"""What a run differs in from the usual one, by kind and name."""

ALL = [(kind, name) for kind, methods in METHODS.items() for name in methods]

DISTINCT: dict[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "muon", "lbsgd", "sgld", f"{__name__}:own_optimizer"),
    "augmentation": (
        "all at once",
        "own_transform",
        "growing size",
        "resized-crop",
        "alternating flip",
        "blocks",
        "balance",
        "repeats",
    ),
    "loss": ("class weights", "clipped"),
    "several labels": ("labels, mixed and weighted",),
    "schedule": ("one-cycle", "plateau", "a chain", "growing batch"),
    "fine-tuning": ("gradual", "probe, then full", "frozen batch norms"),
    "average": ("ema", "swa"),
    "numbers": ("pure-bf16", "recompute"),
}
"""The others are of the same code with other formulas, whose states :mod:`tests.optim.test_conformance` saves too."""


ROUNDED = {("schedule", "growing batch")}
"""More than two micro-batches an update: two ranks add their gradients in another order than one process."""


def _recipe(data: Path, kind: str, name: str) -> Recipe:
    """Six updates, of an epoch of ten: two micro-batches each, of 16 colour images."""
    usual = Recipe(
        data=Data(train=str(data / "coloured.rec"), holdout=0.2, pad=1),
        model=Model("digits", options={"width": 8}),
        optim=Optim("sgd", lr=0.05, accumulate=2),
        budget=Budget(steps=6),
        parallel=Parallel(device="cpu", threads=1, compute_threads=1),
        every=Every(log_steps=3),
        batch_size=32,
    )
    changes = METHODS[kind][name]
    return usual.with_(changes | ({"data.train": str(data / changes["data.train"])} if "data.train" in changes else {}))


@pytest.fixture(scope="module")
def coloured(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 400 digits in colour: of classes that differ in size, and in a table with labels."""
    import numpy as np
    from PIL import Image

    folder, lines = tmp_path_factory.mktemp("coloured"), ["path,labels"]
    for path in sorted(digits_folder.rglob("*.png")):
        grey, digit = np.asarray(Image.open(path)).astype(int), int(path.parent.name)
        place = folder / "images" / str(digit // 4)
        place.mkdir(parents=True, exist_ok=True)
        image = np.stack([grey, 255 - grey, (grey + 20 * digit) % 256], axis=2).astype(np.uint8)
        Image.fromarray(image).save(place / path.name)
        labels = ";".join(name for name, has in (("even", digit % 2 == 0), ("large", digit > 4)) if has)
        lines.append(f"images/{digit // 4}/{path.name},{labels}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    pack(folder / "images", folder / "coloured")
    return folder


@pytest.fixture(scope="module")
def wholes(coloured: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``wholes(kind, name)``: the run of a method, trained by one process from beginning to end."""
    folder, folders = tmp_path_factory.mktemp("wholes"), dict[tuple[str, str], Path]()

    def train(kind: str, name: str) -> Path:
        if (kind, name) not in folders:
            run = Run.create(folder / str(len(folders)), _recipe(coloured, kind, name))
            folders[kind, name] = run.directory
            _drain(steps(run, allow_import=True))
        return folders[kind, name]

    return train


@pytest.fixture(autouse=True, scope="module")
def _as_many_threads() -> Iterator[None]:
    """As the ranks have: how a product is split among threads is in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _drain(events: Iterator[Event]) -> list[Event]:
    seen = list(events)
    assert isinstance(seen[-1], Ended) and seen[-1].status == "finished"
    return seen


def _weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model.safetensors")


def _differences(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], same: Callable[[Tensor, Tensor], bool] = torch.equal
) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not same(first[name], second[name])]


def _evaluations(run: Path) -> list[tuple[object, ...]]:
    return [(e.step, e.n, e.loss, e.top1) for e in Run.open(run).events() if isinstance(e, Evaluated)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*pair, marks=() if pair[1] in DISTINCT[pair[0]] else pytest.mark.slow) for pair in ALL],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    wholes: Callable[[str, str], Path], coloured: Path, tmp_path: Path, kind: str, name: str
) -> None:
    run = Run.create(tmp_path / "run", _recipe(coloured, kind, name))
    events: list[Event] = []
    for event in steps(
        run,
        stop=lambda: "SIGTERM" if any(isinstance(e, Step) and e.step == 3 for e in events[-4:]) else None,
        allow_import=True,
    ):
        events.append(event)
    assert isinstance(events[-1], Ended) and (events[-1].status, events[-1].step) == ("preempted", 3)
    _drain(steps(run, allow_import=True))
    whole = wholes(kind, name)
    assert _differences(_weights(run.directory), _weights(whole)) == []
    assert _evaluations(run.directory) == _evaluations(whole)


KILLED = [
    ("optimizer", "lbsgd"),
    ("optimizer", "sgld"),
    ("schedule", "growing batch"),
    ("schedule", "plateau"),
    ("average", "ema"),
    ("numbers", "pure-bf16"),
]
"""Those whose state is more than the optimizer's tensors; ``test_kill`` and ``test_rank_processes`` kill processes."""


@pytest.mark.parametrize(("kind", "name"), KILLED)
def test_updates_that_were_not_saved_are_repeated_to_the_same_bits(
    wholes: Callable[[str, str], Path], coloured: Path, tmp_path: Path, kind: str, name: str
) -> None:
    run = Run.create(tmp_path / "run", _recipe(coloured, kind, name).with_({"every.save_steps": 2}))
    for event in steps(run, allow_import=True):
        if isinstance(event, Step) and event.step == 5:
            break  # as a SIGKILL leaves it: the newest checkpoint is of update 4
    events = _drain(steps(run, allow_import=True))
    assert [event.step for event in events if isinstance(event, Step)] == [5, 6]
    assert _differences(_weights(run.directory), _weights(wholes(kind, name))) == []


def _train_all(group: Group, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    for run in sorted(Path(folder).iterdir()):
        for _ in steps(run, group=group, allow_import=True):
            pass
    return {}


SHARED: dict[str, tuple[str, ...]] = {
    "optimizer": ("sgld",),
    "loss": ("clipped",),
    "schedule": ("plateau", "growing batch"),
    "average": ("swa",),
    "numbers": ("pure-bf16",),
    "augmentation": ("all at once", "growing size", "alternating flip", "blocks", "balance", "repeats"),
    "several labels": ("labels, mixed and weighted",),
    "fine-tuning": ("probe, then full",),
}
"""Those in which ranks have draws, sums or decisions of several kinds in common; the others with the slow tests."""


def _pairs(*kinds: str) -> list[tuple[str, str]]:
    return [(kind, name) for kind in kinds for name in SHARED[kind]]


@pytest.mark.parametrize(
    "pairs",
    [  # few groups: loading what a rank needs takes longer than most methods
        pytest.param(_pairs("augmentation", "several labels", "fine-tuning"), id="data and phases"),
        pytest.param(_pairs("optimizer", "loss", "schedule", "average", "numbers"), id="updates"),
        *(
            pytest.param(others, id=f"{kind}, all others", marks=pytest.mark.slow)
            for kind, methods in METHODS.items()
            if (others := [(kind, name) for name in methods if name not in SHARED[kind]])
        ),
    ],
)
def test_two_ranks_come_to_the_bits_of_one_process(
    wholes: Callable[[str, str], Path], coloured: Path, tmp_path: Path, pairs: Sequence[tuple[str, str]]
) -> None:
    runs = {}
    for number, (kind, name) in enumerate(pairs):
        recipe = _recipe(coloured, kind, name).with_({"optim.accumulate": 1})
        runs[kind, name] = Run.create(tmp_path / f"{number:03}", recipe).directory
    as_group(partial(_train_all, folder=str(tmp_path)), 2)
    differing = {}
    for (kind, name), run in runs.items():
        ours, theirs = (
            {key: value for key, value in _weights(path).items() if "running_" not in key and "num_batches" not in key}
            for path in (run, wholes(kind, name))
        )
        same = partial(torch.allclose, rtol=1e-4, atol=1e-5) if (kind, name) in ROUNDED else torch.equal
        if different := _differences(ours, theirs, same):
            differing[kind, name] = different
    assert differing == {}


def test_the_page_names_every_method_that_is_proved_here() -> None:
    page = DOCUMENT.read_text()
    named = {part.strip("`").removeprefix("timm/") for part in re.findall(r"`[^`]+`", page)}
    names = {name.removeprefix("timm/").rpartition(":")[2] for _, name in ALL}
    assert names - named == set()
