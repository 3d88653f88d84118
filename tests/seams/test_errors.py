"""Exit codes and first lines of what users get wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.seams.frozen import Frozen
from tests.seams.images import mark, png, write_marks
from tests.seams.product import steady

import steadytrain as st

QUICK = ["--model", "mlp", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]

ERRORS: dict[str, Sequence[str]] = {
    "unknown verb": ["trian", "marks"],
    "unknown flag": ["train", "marks", "--epoch", "3"],
    "a flag's value is missing": ["train", "marks", "--epochs"],
    "one argument too many": ["train", "my", "photos"],
    "no data": ["train", *QUICK],
    "missing folder": ["train", "no/such/photos", *QUICK],
    "near name": ["train", "marks", "--val", "mark", *QUICK],
    "one class only": ["train", "one", *QUICK],
    "an empty class": ["train", "lonely", *QUICK],
    "an empty folder": ["pack", "empty", "out"],
    "unreadable images": ["pack", "broken", "out"],
    "existing output": ["pack", "marks", "marks.rec"],
    "output is a folder": ["pack", "marks", "one"],
    "quality": ["pack", "marks", "out", "--quality", "101"],
    "unknown class": ["pack", "marks", "out", "--only", "clas1"],
    "workers": ["pack", "marks", "out", "--workers", "0"],
    "no record file": ["check", "garbage.rec"],
    "nothing to check": ["check", "gone.rec"],
    "epochs": ["train", "marks.rec", *QUICK, "--epochs", "0"],
    "rate": ["train", "marks.rec", *QUICK, "--lr", "-1"],
    "no whole number": ["train", "marks.rec", *QUICK, "--batch-size", "32.5"],
    "unknown key": ["train", "marks.rec", *QUICK, "--set", "optim.nestrov=true"],
    "key without its part": ["train", "marks.rec", *QUICK, "--set", "lr=0.1"],
    "no value": ["train", "marks.rec", *QUICK, "--set", "optim.lr"],
    "unequal parts": ["train", "marks.rec", *QUICK, "--set", "optim.accumulate=3"],
    "conflict": ["train", "marks.rec", *QUICK, "--precision", "fp16", "--set", "parallel.compress=powersgd"],
    "unknown model": ["train", "marks.rec", *QUICK, "--model", "resnet2O"],
    "no device": ["train", "marks.rec", *QUICK, "--device", "tpu"],
    "missing weights": ["finetune", "marks.rec", *QUICK, "--weights", "none.pth"],
    "missing recipe": ["train", "marks.rec", "--recipe", "none.toml"],
    "recipe is no TOML": ["train", "marks.rec", "--recipe", "wrong.toml"],
    "a factory in a recipe": ["train", "marks.rec", "--recipe", "factory.toml", "--epochs", "1"],
    "changed recipe": ["train", "marks.rec", *QUICK, "--lr", "0.3", "--run", "run"],
    "changed data": ["train", "copy.rec", *QUICK, "--run", "begun"],
    "no run": ["evaluate", "one"],
    "evaluate nothing": ["evaluate", "gone"],
    "other classes": ["evaluate", "run", "one"],
    "diagnose nothing": ["diagnose", "gone"],
    "report over a file": ["report", "run", "-o", "mine.html"],
    "report of another kind": ["report", "run", "-o", "run.docx"],
    "watch two": ["watch", "run", "marks"],
    "watch price": ["watch", "--price", "-1", "run"],
    "doctor's other document": ["doctor", "--against", "wrong.json"],
    "bench": ["bench", "train", "--model", "mlp", "--seconds", "0"],
    "bandwidth": ["bandwidth", "--procs", "1"],
    "launch nothing": ["launch"],
    "launch hosts": ["launch", "--hosts", "gone", "--", "train", "a.rec"],
    "launch secret": ["launch", "--env", "MY_TOKEN=1", "--", "train", "a.rec"],
    "launch slot": ["launch", "--set", "slurm.partitoin=gpu", "--", "train", "a.rec"],
    "feed": ["feed", "gone", "--seconds", "1"],
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a finished run, one that has begun, and files that are neither; each test has a copy."""
    root = tmp_path_factory.mktemp("mistakes")
    write_marks(root / "marks", 40)
    st.pack(root / "marks", root / "marks")
    for folder in ("one/only", "lonely/full", "lonely/other", "lonely/void", "broken/a", "broken/b", "empty"):
        (root / folder).mkdir(parents=True)
    for number in range(6):
        for folder in ("one/only", "lonely/full", "lonely/other"):
            (root / folder / f"{len(folder)}{number}.png").write_bytes(png(mark(100 * len(folder) + number)))
        for folder in ("broken/a", "broken/b"):
            (root / folder / f"{number}.png").write_bytes(b"<html>not found</html>")
    (root / "garbage.rec").write_bytes(bytes(range(256)) * 4)
    (root / "wrong.toml").write_text("[model\n")
    (root / "wrong.json").write_text('{"format": "steadytrain-report"}\n')
    (root / "factory.toml").write_text('[model]\nname = "mine:make"\n')
    (root / "mine.html").write_text("a page of my own\n")
    for suffix in (".rec", ".idx", ".json"):
        shutil.copy(root / f"marks{suffix}", root / f"copy{suffix}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        steady("train", "marks.rec", *QUICK, "--run", "run")
        steady("train", "copy.rec", *QUICK, "--set", "every.save_steps=1", "--run", "begun")
    _forget_the_end(root / "begun")
    card = json.loads((root / "copy.json").read_text())
    card.pop("checksum", None)
    (root / "copy.json").write_text(json.dumps(card | {"digest": "0" * 64}))
    return root


def _forget_the_end(run: Path) -> None:
    """Leave of a run what a kill before its last checkpoint would have left."""
    for path in run.glob("*.safetensors"):
        path.unlink()
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    log = run / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"status"' not in line))


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_one_line_and_an_exit_code(name: str, mistakes: Path, work: Path, frozen: Frozen) -> None:
    shutil.copytree(mistakes, work, dirs_exist_ok=True)
    before = _files(work)
    answer = steady(*ERRORS[name], code=None)
    lines = [line for line in answer.err.splitlines() if line.startswith("steady: ")]
    assert answer.code in (1, 2) and "Traceback" not in answer.err
    assert len(lines) == 1 or answer.out, answer
    frozen(f"errors/{name}", {"code": answer.code, "line": (lines or answer.out.splitlines())[0]})
    assert _files(work) == before, "nothing was written"


def _files(folder: Path) -> set[Path]:
    """All files but those of runs, whose logs tell of a failure."""
    names = {path.relative_to(folder) for path in folder.rglob("*")}
    return {name for name in names if name.parts[0] not in ("begun", "runs")}
