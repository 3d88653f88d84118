"""What an earlier version left is taken up by what came later, or refused by name with the way on.

``golden/corpus-2026-11`` was made on two cores by steadytrain 0.2.0 of November 2026, all of it in one working
directory: ``steady train marks.rec --run NAME --model mlp --set model.options.hidden=8 --epochs 4 --batch-size 8`` and
the like, stopped by ``--until 2``, by a signal, by SIGKILL after update 13, or by an error. Names of machines, of users
and of their folders were replaced. The tables below say what is there, and what each verb makes of it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests import forked
from tests.seams.frozen import Frozen, digests
from tests.seams.images import mark, png, write_marks
from tests.seams.product import steady, steady_process

import steadytrain as st


@dataclass(frozen=True)
class Old:
    """A run folder of the corpus, and what is to come of it.

    Attributes:
        status: as the report says it.
        steps: of 25 updates, those that the log has.
        ranks: processes that trained it.
        attempts: of the run, once it is resumed.
        code: exit code of ``steady resume`` and, where there are no weights, of ``steady evaluate``.
        refusal: words of what they then say.
    """

    status: str
    steps: int = 13
    ranks: int = 1
    attempts: int = 2
    code: tuple[int, int] = (0, 0)
    refusal: tuple[str, str] = ("", "")


RUNS: dict[str, Old] = {
    "done": Old("finished", 25, attempts=1),
    "killed": Old("interrupted", code=(0, 2), refusal=("", "killed has no weights yet")),
    "terminated": Old("interrupted", 14),
    "failed": Old("failed"),
    "nan": Old("failed", 3, code=(1, 2), refusal=("lower the learning rate (--lr)", "nan has no weights yet")),
    "bf16": Old("interrupted"),
    "pure-bf16": Old("interrupted"),
    "ema": Old("interrupted"),
    "adamw": Old("interrupted", 19),
    "plateau": Old("interrupted"),
    "recipe": Old("interrupted"),
    "finetune": Old("interrupted"),
    "ddp": Old("interrupted", ranks=2),
    "ddp-killed": Old("interrupted", ranks=2),
    "fsdp": Old("interrupted", ranks=2),
    "local": Old("interrupted", ranks=2),
    "diloco": Old("interrupted", ranks=2),
    "powersgd": Old("interrupted", ranks=2),
    "async": Old("interrupted", ranks=2),
}
"""By the folders' names."""

FINISHED = ("sweep/lr=0.5/seed-0", "sweep/lr=1/seed-0", "repeats/seed-0", "repeats/seed-1")
"""Of ``steady sweep recipe.toml --over optim.lr=0.5,1`` and of ``steady train --recipe recipe.toml --repeats 2``."""


@dataclass(frozen=True)
class Use:
    """A command, and what it comes to.

    Attributes:
        words: of the command line.
        code: its exit code.
        says: in its output or, where it fails, in its error.
    """

    words: str
    code: int = 0
    says: str = ""


IMAGE = "source/class0/0000.png"

USES = [
    Use("evaluate alone", 2, "alone is not a run: it has no recipe.json"),
    Use("evaluate alone/checkpoints/step-00000025 marks.rec", 2, "is not a run: it has no recipe.json"),
    Use("evaluate alone/best.safetensors marks.rec --json", says='"n": 60'),
    Use(f"predict alone/model.safetensors {IMAGE} --json", says='"class": "class'),
    Use(
        "train marks.rec --weights alone/best.safetensors --model mlp --set model.options.hidden=8 --steps 2 --run new"
    ),
    *(Use(f"evaluate done.{suffix} marks.rec --json", says='"n": 60') for suffix in ("onnx", "pt2", "xml")),
    *(Use(f"predict done.{suffix} {IMAGE} --json", says='"class": "class') for suffix in ("onnx", "pt2", "xml")),
    Use("export done.onnx -o new.onnx", 2, "export the run or the weights that it is of"),
    Use("export done -o new.safetensors --json", says='"is_kept": true'),
    Use("export ddp -o new.onnx --json", says='"is_kept": true'),
    Use("resume two-bit", 2, "parallel.compress=2bit was removed: take bf16"),
    Use("report two-bit", says="interrupted"),
    Use("evaluate two-bit/best.safetensors marks.rec --json", says='"n": 60'),
    Use("replay nan", says="first not finite"),
    Use("cost killed", says="in 1 attempt"),
    Use("watch local --seconds 0", says="step 13 of 25"),
    Use("train --recipe recipe.toml --run recipe --precision fp32 --json", says='"finished"'),
    Use("train --recipe recipe.toml --run repeats --repeats 2 --precision fp32", says="repeats: 2 seeds"),
    Use("sweep recipe.toml --over optim.lr=0.5,1 --run sweep --precision fp32", says="lr=0.5"),
    Use("report sweep --json", says='"finished"'),
    Use("report done ddp --compare", says="ddp"),
    Use("check packs/raw.rec", says="60 image records"),
    Use("feed packs/raw.rec --seconds 0.1"),
    Use("train packs/sharded-*.rec --model mlp --steps 2 --run new"),
    Use("train packs/raw.rec --model mlp --steps 2 --run new"),
    Use("pack source packs/raw --encoding raw", 2, "choose another name, or give --force"),
    Use("pack source packs/procs --encoding pass --shards 3 --procs 1", says="60 images"),
    Use("pack source packs/half --encoding raw --shards 6 --procs 1", 2, "half-00000-of-00006 was packed before"),
]


@dataclass(frozen=True)
class Doubtful:
    """Data of which a later version asks what they mean, or takes them otherwise, and a run of the corpus on them.

    Attributes:
        write: writes them into the working directory.
        source: their name.
        n: images that validate.
        asked: what a new run is told; empty: it reads them otherwise.
    """

    write: Callable[[Path], object]
    source: str
    n: int
    asked: str = ""


def _write_folders(pattern: Callable[[int], str]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        for number in range(40):
            path = folder / pattern(number) / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(mark(number)))

    return write


def _write_table(name: str, column: str, value: Callable[[int], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        _write_folders(lambda number: "scans")(folder)
        rows = [f"scans/{n:02}.png,{CLASSES[n % 2]},{value(n)}" for n in range(40)]
        (folder / name).write_text("\n".join([f"image,label,{column}", *rows]) + "\n")

    return write


CLASSES = ("ape", "bee")

DOUBTFUL = {
    "years-run": Doubtful(
        _write_folders(lambda n: f"years/{CLASSES[n % 2]}/{(2019, 2020)[n // 2 % 2]}"), "years", 8, "may be splits"
    ),
    "sets-run": Doubtful(
        _write_folders(lambda n: f"sets/{('train', 'val', 'train', 'more')[n % 4]}/{CLASSES[n // 4 % 2]}"),
        *("sets", 10, "may be splits"),
    ),
    "scans-run": Doubtful(
        _write_table("scans.csv", "valid", lambda n: int(n % 5 == 0)), "scans.csv", 8, "--split-column"
    ),
    "parts-run": Doubtful(_write_table("parts.csv", "part", lambda n: ("test", "train")[n % 4 > 1]), "parts.csv", 8),
}


@pytest.fixture
def corpus(work: Path, golden: Path) -> Path:
    """A copy of the corpus, which is the working directory."""
    shutil.copytree(golden / "corpus-2026-11", work, dirs_exist_ok=True)
    write_marks(work / "source", 60)
    return work


def _events(run: str, file: str = "events.jsonl") -> list[dict[str, Any]]:
    """The lines of a log, as JSON."""
    return [json.loads(line) for line in Path(run, file).read_text().splitlines()]


def _last(run: str, kind: str) -> dict[str, Any]:
    return next((line for line in reversed(_events(run)) if line["kind"] == kind), {})


@pytest.mark.parametrize("name", RUNS)
def test_every_line_of_a_log_is_read(name: str, corpus: Path) -> None:
    run = st.Run.open(name)
    for rank in range(len(list(corpus.glob(f"{name}/events*.jsonl")))):
        lines = _events(name, f"events-{rank}.jsonl" if rank else "events.jsonl")
        events = list(run.events(rank))
        assert len(events) == len(lines)
        assert not {type(event).__name__ for event in events} & {"Unknown", "Unreadable"}
    assert run.recipe.digest == _last(name, "Started")["digest"]


def test_all_runs_are_listed(corpus: Path) -> None:
    rows = {row["name"]: row for row in steady("runs", ".", "--json").document["runs"]}
    assert rows.keys() >= {*RUNS, *DOUBTFUL, *FINISHED}
    assert {name: rows[name]["status"] for name in RUNS} == {name: old.status for name, old in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_reported_and_diagnosed(name: str, corpus: Path) -> None:
    old, evaluated = RUNS[name], _last(name, "Evaluated")
    (run,) = steady("report", name, "--json").document["runs"]
    assert (run["status"], run["steps_done"], run["steps"]) == (old.status, old.steps, 25)
    assert (run["last"] or {}).get("loss") == evaluated.get("loss")
    assert "mlp" in steady("report", name, "-o", "-").out
    assert "mlp" in st.report([name], "page.html").read_text()
    ledger = steady("diagnose", name, "--json").document["ledger"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_seconds"])
    assert steady("diagnose", name).out


@pytest.mark.parametrize("name", [name for name, old in RUNS.items() if old.ranks == 1])
def test_a_run_is_resumed(name: str, corpus: Path, frozen: Frozen) -> None:
    old = RUNS[name]
    answer = steady("resume", name, "--json", code=old.code[0])
    assert old.refusal[0] in answer.err
    if old.code[0] == 0:
        _require_finished(name, answer.document, frozen)


def _require_finished(name: str, document: Any, frozen: Frozen) -> None:
    (run,) = document["runs"]
    assert (run["status"], run["steps_done"], run["attempts"]) == ("finished", 25, RUNS[name].attempts)
    assert run["last"]["step"] == 25
    frozen.bits(f"corpus/{name} last loss", run["last"]["loss"])


RANKS = [name for name, old in RUNS.items() if old.ranks > 1 and name != "async"]


@pytest.mark.parametrize("name", RANKS)
def test_a_run_of_two_ranks_is_resumed_by_two(name: str, corpus: Path, frozen: Frozen) -> None:
    process = forked.start(forked.steady, ["resume", name, "--json"], output=corpus / "out", errors=corpus / "err")
    process.join(120)
    assert process.exitcode == 0, (corpus / "err").read_text()
    _require_finished(name, json.loads((corpus / "out").read_text()), frozen)


@pytest.mark.parametrize("name", [name for name, old in RUNS.items() if old.ranks > 1])
def test_a_run_of_two_ranks_is_resumed_by_one_process(name: str, corpus: Path) -> None:
    engine = ["--engine", "ddp"] if name == "async" else []
    (run,) = steady("resume", name, "--procs", 1, *engine, "--json").document["runs"]
    assert (run["status"], run["steps_done"]) == ("finished", 25)


@pytest.mark.slow
def test_an_asynchronous_run_is_resumed_by_two_workers(corpus: Path) -> None:
    (run,) = steady_process("resume", "async", "--json").document["runs"]
    assert (run["status"], run["steps_done"], run["attempts"]) == ("finished", 25, 2)


@pytest.mark.parametrize("name", RUNS)
def test_the_best_weights_of_a_run_are_evaluated_and_predict(name: str, corpus: Path, frozen: Frozen) -> None:
    old = RUNS[name]
    words = ["--device", "cpu", "--threads", 1, "--json"]
    answer = steady("evaluate", name, *words, code=old.code[1])
    assert old.refusal[1] in answer.err
    if old.code[1] == 0:
        frozen.bits(f"corpus/{name} evaluated", [answer.document[key] for key in ("n", "loss", "top1", "top5")])
        (image,) = steady("predict", name, IMAGE, *words).document
        assert sum(row["probability"] for row in image["classes"]) == pytest.approx(1)
    assert steady("predict", name, IMAGE, code=old.code[1]).err or old.code[1] == 0


@pytest.mark.parametrize("use", USES, ids=lambda use: use.words)
def test_a_command_takes_up_what_there_is(use: Use, corpus: Path) -> None:
    if ".xml " in use.words and find_spec("openvino") is None:
        pytest.skip("no openvino here")
    answer = steady(*use.words.split(), code=use.code)
    assert use.says in (answer.err if use.code else answer.out)


class Shelf:
    """A tracking service that remembers what it was begun with."""

    seen: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, run: Any) -> None:
        self.id = run.id
        self.seen.append((run.id, run.step))

    def scalars(self, values: object, step: int, seconds: float) -> None:
        raise AssertionError("all of them were sent before")

    def text(self, name: str, text: str) -> None: ...

    def file(self, path: Path) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_tracker_is_sent_the_rest(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tracked-shelf.json`` has the service's name for the run and the last step that was sent, 25."""
    (corpus / "shelf-1.dist-info").mkdir()
    (corpus / "shelf-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (corpus / "shelf-1.dist-info/entry_points.txt").write_text(f"[steadytrain.trackers]\nshelf = {__name__}:Shelf\n")
    monkeypatch.syspath_prepend(corpus)
    steady("report", "done", "--to", "shelf")
    assert Shelf.seen == [("shelf-1", 25)]


def test_packs_of_shards_are_packed_on_from(corpus: Path) -> None:
    content = (corpus / "marks.rec").read_bytes()
    for pack in ("sharded", "procs"):
        steady("pack", f"packs/{pack}-*.rec", f"again/{pack}")
        assert Path(f"again/{pack}.rec").read_bytes() == content


def test_a_pack_that_two_killed_processes_left_is_finished(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of six shards are done; leases of another machine's processes are waited for, by a clock that runs fast."""
    clock, began = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 30 * (clock() - began))
    steady("pack", "source", "packs/half", "--encoding", "pass", "--shards", 6, "--procs", 1)
    monkeypatch.undo()
    monkeypatch.chdir(corpus)
    assert not Path("packs/.half.plan").exists()
    st.pack("source", "whole/half", encoding="pass", shards=6)
    whole, finished = digests(Path("whole")), digests(Path("packs"))
    assert {name: finished[name] for name in whole} == whole


def _same_command(name: str) -> list[object]:
    """The command that began a run of ``DOUBTFUL``."""
    words = "--model mlp --set model.options.hidden=8 --epochs 4 --batch-size 8 --lr 1.0 --device cpu --threads 1"
    words += " --precision fp32 --set every.save_steps=5 --set every.log_steps=3 --set parallel.compute_threads=1"
    return [
        "train",
        DOUBTFUL[name].source,
        *words.split(),
        "--set",
        "data.pad=1",
        "--holdout",
        0.2,
        "--set",
        "every.keep=1",
    ]


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_was_decided_about_data_when_a_run_began_stays_decided(name: str, corpus: Path, frozen: Frozen) -> None:
    doubtful = DOUBTFUL[name]
    doubtful.write(corpus)
    new = steady(*_same_command(name), "--run", "new", code=2 if doubtful.asked else 0)
    assert doubtful.asked in new.err
    assert steady("evaluate", name, "--device", "cpu", "--json").document["n"] == doubtful.n
    answer = steady("resume", name, "--json")
    assert f"{doubtful.source} is read as when this run began" in answer.err
    (run,) = answer.document["runs"]
    assert (run["status"], run["num_val"], run["attempts"]) == ("finished", doubtful.n, 2)
    frozen.bits(f"corpus/{name} last loss", run["last"]["loss"])


@pytest.mark.parametrize("name", ["years-run", "scans-run"])
def test_the_same_command_goes_on_with_such_data(name: str, corpus: Path) -> None:
    DOUBTFUL[name].write(corpus)
    answer = steady(*_same_command(name), "--run", name, "--json")
    assert answer.document["runs"][0]["status"] == "finished"


@pytest.mark.parametrize("name", DOUBTFUL)
def test_such_data_that_have_changed_are_refused(name: str, corpus: Path) -> None:
    DOUBTFUL[name].write(corpus)
    for path in corpus.rglob("0[0-3].png"):
        path.write_bytes(png(mark(99)))
    answer = steady("resume", name, code=2)
    assert f"{DOUBTFUL[name].source} has changed since this run was started" in answer.err
