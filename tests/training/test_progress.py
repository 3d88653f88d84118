"""A call from Python shows how far it is where somebody looks on, and nothing where nobody does."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import steadytrain as st
from steadytrain.errors import RunError

QUICK = {"model.name": "digits", "budget.epochs": 2, "batch_size": 32, "data.pad": 1}
QUICK |= {"parallel.device": "cpu", "parallel.compute_threads": 1}


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_row_for_each_epoch(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = st.default_recipe(digits, {**QUICK, "every.log_steps": 1})
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    outcome = st.train(st.Run.create(tmp_path / "shown", recipe))
    assert terminal.getvalue().startswith("\rstarting\r"), "nothing is waited for without a word"
    lines = [text for line in terminal.getvalue().splitlines() if (text := line.rpartition("\r")[2].strip())]
    rows = [line for line in lines if "validation loss" in line]
    assert len(rows) == 2 and rows[0].startswith("epoch 1") and rows[1].startswith("epoch 2 ")
    assert outcome.evaluated is not None and f"{100 * outcome.evaluated.top1:.1f} %" in rows[1]
    assert lines[-1].startswith("finished after") and " images/s" in terminal.getvalue()
    before = terminal.getvalue()
    st.train(st.Run.create(tmp_path / "silent", recipe), progress=False)
    assert terminal.getvalue() == before and capfd.readouterr().out == ""


def test_a_pipe_sees_nothing_unless_it_is_asked_for(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = st.default_recipe(digits, QUICK)
    capfd.readouterr()
    st.train(st.Run.create(tmp_path / "quiet", recipe))
    assert capfd.readouterr() == ("", "")
    st.train(st.Run.create(tmp_path / "asked", recipe), progress=True)
    assert "validation loss" in capfd.readouterr().err


def test_the_first_update_is_shown_long_before_the_first_line_of_the_log(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = st.default_recipe(digits, {**QUICK, "every.log_steps": 1000})
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    st.train(st.Run.create(tmp_path / "shown", recipe))
    shown = terminal.getvalue().partition("validation loss")[0]
    assert "\repoch 0.1  5 %" in shown and " images/s" in shown and " left" in shown and ": nan" not in shown


def test_what_was_waited_for_is_gone_where_an_error_ends_the_call(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = st.default_recipe(digits, QUICK)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with st.Run.create(tmp_path / "shown", recipe).lock(), pytest.raises(RunError, match="in use"):
        st.train(st.Run.open(tmp_path / "shown"))
    assert terminal.getvalue() == "\rstarting\r        \r"


def test_a_probe_is_told_by_its_images(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = st.default_recipe(digits, {**QUICK, "model.train": "probe", "budget.epochs": 0})
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    run = st.train(st.Run.create(tmp_path / "probe", recipe)).run
    assert st.restore(run).chosen.endswith(", after the probe")
    shown = terminal.getvalue()
    assert ": a probe" in shown and " updates" not in shown and "epoch 0" not in shown
    assert "features: 0 of " in shown and "fitting the classifier" in shown and "probe  validation loss" in shown
