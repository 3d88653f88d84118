"""Wrong values for every flag that there is: the parser's own refusals at once, the verbs' own in a test of its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

import pytest
from tests.cli.wrong_values import BASES, arguments_of, commands, load, make_files, run_all

from steadytrain.cli import VERBS, main

EMPTY = {"--note", "--transforms"}
"""An empty note removes the old one; and no transforms are none."""


def test_every_verb_has_a_command_to_try_values_in() -> None:
    assert set(BASES) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_no_flag_takes_nothing_for_a_value(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(BASES[verb][0])
    end = words.index("train") if verb == "launch" else len(words)
    for argument in arguments_of(verb):
        kinds = {argument.hint, *get_args(argument.hint)}
        values = [
            "",
            *(["nan", "inf", "1e400"] if float in kinds else []),
            *(["1.5"] if kinds & {int} - {float} else []),
        ]
        values += ["nonsense"] if argument.hint is bool else []
        for value in values:
            if argument.position is None and argument.name not in EMPTY:
                assert main([*verb.split(), *words[:end], f"{argument.name}={value}", *words[end:]]) == 2
                lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("steady: ")]
                assert len(lines) == 1 and (
                    not value or argument.hint is bool or f"{argument.name} is {value!r}" in lines[0]
                ), lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["watch", "cost", "diagnose", "report", "check"])
def test_an_empty_name_is_not_the_folder_that_one_is_in(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, ""]) == 2
    assert "is empty (an unset variable?)" in capsys.readouterr().err


def test_a_link_that_leads_to_itself_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert main(["bench", "infer", "mlp", "--data", str(tmp_path / "loop")]) == 2
    assert str(tmp_path / "loop") in capsys.readouterr().err


def test_flags_about_data_need_data(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["evaluate", "run", "--labels", "a.csv"], ["evaluate", "run", "--restrict"]):
        assert main(words) == 2
        assert f"{words[2]} is about data, and none are named: name them after the run" in capsys.readouterr().err
    assert main(["bench", "infer", "mlp", "--root", "photos"]) == 2
    assert "--root is about data, and none are named: --data photos" in capsys.readouterr().err


def test_a_key_that_comes_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text('{"optim": {"lr": 0.1, "lr": 0.2}}')
    assert main(["train", "a.rec", "--recipe", str(tmp_path / "recipe.json")]) == 2
    assert "the key 'lr' comes twice" in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_values_end_with_a_line(tmp_path: Path) -> None:
    load()
    make_files(tmp_path / "files")
    work = [(verb, *command) for verb in VERBS for command in commands(verb)]
    faults = [
        f"steady {outcome.verb} {' '.join(outcome.words)}: {outcome.faults}"
        for outcome in run_all(work, tmp_path / "files", jobs=2)
        if "traceback" in outcome.faults or outcome.code not in (0, 1, 2, 75, 130, None)
    ]
    assert not faults
