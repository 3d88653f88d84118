"""``steady demo`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytrain.cli import demo, main
from steadytrain.config import Budget
from steadytrain.reports import summarise
from steadytrain.run import Run


def test_a_run_a_page_and_commands_to_copy_are_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 5 epochs: after the 20 that it has, 0.98 are right, which the README shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "Budget", lambda epochs: Budget(epochs=5))
    assert main(["demo", "a demo"]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines()[0].split() == ["run", "digits"]
    best = summarise(Run.open("a demo/runs/digits")).quality.best
    assert best is not None and best.n == 359 and best.top1 > 0.9
    assert error.splitlines()[-5:] == [
        "wrote a demo/report.html",
        "next:",
        "  steady evaluate 'a demo/runs/digits'",
        "  steady predict 'a demo/runs/digits' 'a demo/images/3/0003.png'",
        "  steady report 'a demo/runs/digits' -o report.html",
    ]
    assert main(["predict", "a demo/runs/digits", "a demo/images/3/0003.png"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "a demo/images/3/0003.png" and second.endswith(" %  3")
    assert main(["demo", "a demo", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["runs"]
    assert "digits" in document.values() and document["status"] == "finished"


def test_it_does_not_write_among_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cat").mkdir()
    assert main(["demo", str(tmp_path)]) == 2
    text = "holds other files (cat): name a new folder for the demo"
    assert capsys.readouterr().err == f"steady: {tmp_path} {text}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["cat"]
