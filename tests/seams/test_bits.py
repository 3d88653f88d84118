"""Losses and final weights, to the last bit: of one process, of ranks, resumed, and with every kind of update."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests import forked
from tests.seams.frozen import Frozen, digest
from tests.seams.images import write_marks
from tests.seams.product import steady

import steadytrain as st
from steadytrain.cli import main
from steadytrain.launch.supervise import free_port, rank_variables

CASES: dict[str, dict[str, object]] = {
    "sgd": {},
    "mlp": {"model.name": "mlp", "model.options": {"hidden": 8}},
    "adamw": {"optim.name": "adamw", "optim.lr": 0.002, "optim.label_smoothing": 0.1, "optim.clip_norm": 1.0},
    "ema": {"optim.ema": 0.9},
    "accumulate": {"optim.accumulate": 2},
    "step schedule": {"optim.schedule": "step", "optim.milestones": (1.0,), "optim.warmup_epochs": 0.5},
    "frozen norms": {"model.batch_norm": "frozen"},
    "discriminative": {"model.train": "discriminative"},
    "bf16": {"precision.name": "bf16"},
    "pure bf16": {"precision.name": "pure-bf16", "optim.clip_norm": 1.0},
    "channels first": {"precision.channels_last": False},
    "blocks": {"data.order": "blocks"},
}

Make = Callable[..., st.Recipe]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 small images of five classes."""
    root = tmp_path_factory.mktemp("bits")
    st.pack(write_marks(root / "marks", 120), root / "marks")
    return root / "marks.rec"


@pytest.fixture(scope="module")
def recipe(pack: Path) -> st.Recipe:
    """Twelve updates of 16 images, evaluated twice."""
    return st.Recipe(
        data=st.Data(train=str(pack), holdout=0.2, pad=1),
        model=st.Model("digits"),
        optim=st.Optim("sgd", nesterov=True, lr=0.05),
        budget=st.Budget(epochs=2),
        parallel=st.Parallel(device="cpu", threads=1, compute_threads=1),
        every=st.Every(log_steps=3, save_steps=5, keep=9, best="top1"),  # by which the best were frozen
        batch_size=16,
    )


@pytest.fixture(scope="module")
def plain(recipe: st.Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was left alone."""
    run = st.Run.create(tmp_path_factory.mktemp("plain") / "run", recipe)
    assert st.train(run).status == "finished"
    return run.directory


def weights(run: Path, name: str = "model.safetensors") -> str:
    """The digest of all weights; the file's header, which names the recipe, is left out."""
    content = (run / name).read_bytes()
    return digest(content[8 + int.from_bytes(content[:8], "little") :])


def losses(run: Path) -> list[list[object]]:
    """Step and loss of each line that tells one; of steps that were repeated, the last."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] in ("Logged", "Evaluated")]
    last = {(line["step"], line["kind"] == "Evaluated"): line["loss"] for line in rows}
    return [[step, is_evaluation, loss.hex()] for (step, is_evaluation), loss in sorted(last.items())]


def bits(run: Path) -> dict[str, object]:
    return {"losses": losses(run), "weights": weights(run), "best": weights(run, "best.safetensors")}


def trained(recipe: st.Recipe, folder: Path, **changes: object) -> Path:
    run = st.Run.create(folder, recipe.with_(changes))
    assert st.train(run).status == "finished"
    return run.directory


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_of_one_process(case: str, recipe: st.Recipe, tmp_path: Path, frozen: Frozen) -> None:
    frozen.bits(f"bits/{case}", bits(trained(recipe, tmp_path / "run", **CASES[case])))


def test_a_frozen_backbone_stays_and_its_head_learns(
    recipe: st.Recipe, plain: Path, tmp_path: Path, frozen: Frozen
) -> None:
    start = plain / "model.safetensors"
    run = trained(recipe, tmp_path / "run", **{"model.weights": str(start), "model.train": "head", "seed": 4})
    frozen.bits("bits/head", {"losses": losses(run), "weights": weights(run)})
    before, after = load_file(start), load_file(run / "model.safetensors")
    changed = {name.split(".")[0] for name in before if not before[name].equal(after[name])}
    assert len(changed) == 1, "the head alone"


@pytest.mark.parametrize(
    "changes", [{"parallel.recompute": True}, {"parallel.threads": 3}, {"every.evaluate_epochs": 0.7}], ids=str
)
def test_what_is_no_part_of_the_digest_changes_no_bit(
    changes: dict[str, object], recipe: st.Recipe, plain: Path, tmp_path: Path
) -> None:
    assert weights(trained(recipe, tmp_path / "run", **changes)) == weights(plain)


@pytest.mark.parametrize(
    "case", ["ema", *(pytest.param(case, marks=pytest.mark.slow) for case in ("sgd", "accumulate", "adamw"))]
)
def test_a_resumed_run_is_the_one_that_was_left_alone(case: str, recipe: st.Recipe, tmp_path: Path) -> None:
    whole = trained(recipe, tmp_path / "whole", **CASES[case])
    run = st.Run.create(tmp_path / "parts", recipe.with_(CASES[case]))
    steps_done = 0

    def stop() -> str | None:
        """Preempt in the middle of an epoch, between two log lines and two checkpoints."""
        return "preempted" if steps_done >= 7 else None

    for event in st.steps(run, stop=stop):
        steps_done = max(steps_done, getattr(event, "step", 0))
    assert run.finished() is None
    assert st.train(run).status == "finished"
    assert weights(run.directory) == weights(whole)
    assert losses(run.directory)[-1] == losses(whole)[-1]


def _killed(run: Path, copy: Path, checkpoint: str) -> Path:
    """A copy of a run as a kill would have left it after this checkpoint."""
    shutil.copytree(run, copy)
    for name in ("model.safetensors", "best.safetensors"):
        (copy / name).unlink()
    for path in (copy / "checkpoints").iterdir():
        if path.name > checkpoint:
            shutil.rmtree(path)
    step = int(checkpoint.rpartition("-")[2])
    for log in copy.glob("events*.jsonl"):
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line).get("step", 0) <= step + 1))
    return copy


def test_a_killed_run_goes_on_from_its_checkpoint(plain: Path, tmp_path: Path) -> None:
    run = st.Run.open(_killed(plain, tmp_path / "run", "step-00000005"))
    assert st.train(run).status == "finished"
    assert bits(run.directory) == bits(plain)


def test_two_ranks_make_what_one_process_makes_that_accumulates(
    recipe: st.Recipe, tmp_path: Path, frozen: Frozen
) -> None:
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    words, port = ["train", "--recipe", str(tmp_path / "recipe.json"), "--run", str(tmp_path / "ranks")], free_port()
    ranks = [
        forked.start(main, words, errors=tmp_path / f"{rank}.err", variables=rank_variables(rank, 2, port))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "0.err").read_text()
    run = st.Run.open(tmp_path / "ranks").finished()
    assert run is not None and (run.status, run.step) == ("finished", 12)
    alone = trained(recipe, tmp_path / "alone", **{"optim.accumulate": 2})
    assert _learned(tmp_path / "ranks") == _learned(alone)
    frozen.bits("bits/two ranks", bits(tmp_path / "ranks"))
    later = st.Run.open(_killed(tmp_path / "ranks", tmp_path / "later", "step-00000005"))
    later = st.Run.create(later.directory, later.recipe.with_({"parallel.procs": None}))
    assert st.train(later).status == "finished"
    assert _learned(later.directory) == _learned(alone)


def _learned(run: Path) -> dict[str, str]:
    """Digests of parameters; the statistics of batch norms are the first rank's own."""
    tensors = load_file(run / "model.safetensors")
    of_norms = ("running_mean", "running_var", "num_batches_tracked")
    return {name: digest(value.numpy().tobytes()) for name, value in tensors.items() if not name.endswith(of_norms)}


def test_an_evaluation_counts_every_image(plain: Path, pack: Path, frozen: Frozen) -> None:
    first, other = (st.evaluate(plain, pack, batch_size=size, threads=1) for size in (50, 7))
    assert (first.n, first.right, first.total) == (other.n, other.right, other.total)
    frozen.bits("bits/evaluate", [first.n, first.loss.hex(), first.top1, first.top5, list(first.right)])


def test_predictions_are_those_of_the_evaluation(plain: Path, pack: Path, frozen: Frozen) -> None:
    files = sorted((pack.parent / "marks").rglob("*.png"))
    model = st.restore(plain, which="best", device="cpu")
    values: list[Any] = list(st.predict(model, files, top=2))
    right = sum(value.classes[0] == value.path.parent.name for value in values)
    evaluation = st.evaluate(plain, pack, which="best")
    assert sum(evaluation.right) == right and evaluation.n == len(files)
    frozen.bits("bits/predict", [[list(value.classes), [p.hex() for p in value.probabilities]] for value in values[:9]])


def test_the_command_line_trains_the_same_bits(recipe: st.Recipe, pack: Path, plain: Path, tmp_path: Path) -> None:
    words = ["--model", "digits", "--epochs", 2, "--batch-size", 16, "--lr", 0.05, "--device", "cpu", "--threads", 1]
    words += ["--precision", "fp32", "--set", "parallel.compute_threads=1", "--set", "data.pad=1"]
    words += ["--set", "data.holdout=0.2", "--set", "optim.warmup_epochs=0", "--set", "optim.base_batch_size=null"]
    steady("train", pack, *words, "--run", tmp_path / "run")
    assert weights(tmp_path / "run") == weights(plain)
