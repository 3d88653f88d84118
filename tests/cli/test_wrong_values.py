"""Wrong values for every flag that there is: the parser's own refusals at once, the verbs' own in a test of its own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from tests.cli.wrong_values import BASES, arguments_of, commands, load, make_files, run_all, run_one

from steadytrain.cli import VERBS, app, main
from steadytrain.cli.options import read_table

EMPTY = {"--note", "--transforms"}
"""An empty note removes the old one; and no transforms are none."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong") / "files"
    make_files(folder)
    return folder


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


@pytest.mark.parametrize("verb", VERBS)
def test_a_flag_that_takes_several_values_takes_one_at_least(verb: str) -> None:
    for argument in app()[verb].assemble_argument_collection(parse_docstring=False):
        least_and_most = argument.parameter.consume_multiple
        assert least_and_most is None or (isinstance(least_and_most, tuple) and least_and_most[0]), argument.name


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


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("evaluate run --limits --threshold 0", "--threshold"),
        ("evaluate run --limits --batch-size 4", "--batch-size"),
        ("evaluate run --calibrate --abstain-at 0.9", "--abstain-at"),
        ("feed photos --show grid.png --json", "--json"),
        ("fetch --workers 2", "no data set named"),
        ("serve run --image repo/name:1", "--image"),
        ("serve run --write place --port 80", "--port"),
        ("export run -o net.onnx --images 9", "--images"),
        ("check photos --force", "--force"),
        ("check photos --leave-out gone.csv -o rest.csv --near", "--near"),
        ("sweep photos --over lr=1,2 --mxnet-log", "--mxnet-log"),
        ("sweep photos --over lr=1,2 --run s3://bucket/a", "--run"),
        ("schedule photos --repeats 2", "--repeats"),
        ("watch run --web --json", "--json"),
        ("report run --compare run --follow", "--compare takes two runs"),
        ("report run --to mlflow --json", "--json"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(files: Path, command: str, flag: str) -> None:
    verb, *words = shlex.split(command)
    outcome = run_one(verb, "", "", words, files)
    assert outcome.code == 2 and not outcome.left and flag in outcome.message, outcome


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.json", '{"optim": {"lr": 0.1, "lr": 0.2}}'),
        ("recipe.yaml", "optim:\n  lr: 0.1\n  lr: 0.2\n"),
        ("recipe.yml", "optim: {lr: 0.1, lr: 0.2}"),
    ],
)
def test_a_key_that_comes_twice_is_refused(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["train", "a.rec", "--recipe", str(tmp_path / name)]) == 2
    assert "the key 'lr' comes twice" in capsys.readouterr().err


def test_what_an_anchor_of_yaml_brings_may_be_overruled(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {x: &x {<<: &y {lr: 0.1}, lr: 0.2}}\nb: {<<: *x, lr: 0.3}\n")
    assert read_table(tmp_path / "a.yaml") == {"a": {"x": {"lr": 0.2}}, "b": {"lr": 0.3}}


@pytest.mark.parametrize("place", ["text.txt", "text.txt/x", "loop", "locked", "x" * 300, "s3://bucket/a"])
@pytest.mark.parametrize(
    "command", ["replay run --step 1 -o", "fetch mnist -o", "serve run --write", "train photos.rec --epochs 1 --run"]
)
def test_a_place_that_cannot_be_written_to_is_a_users_mistake(files: Path, command: str, place: str) -> None:
    if place.startswith("s3") and "train" in command:
        pytest.skip("a run may be sent there")
    words = [*shlex.split(command), place]
    outcome = run_one(words[0], words[-2], place, words[1:], files)
    assert outcome.code == 2 and not outcome.left, outcome
    assert place[:40] in outcome.message, outcome.message
    assert re.search("(choose|name) another|is no path|is an address", outcome.message), outcome.message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fetch mnist --mirror nonsense", "--mirror nonsense is no web address"),
        ("fetch mnist --mirror https://me:word@localhost/x", "--mirror https://...@localhost/x holds a user"),
        ("fetch mnist --shorter-side=-1", "--shorter-side is -1; it must be from 1"),
        ("pack photos out --seed=-1", "--seed is -1; it must be from 0"),
        ("replay run --step 1 --model nonsense", "--model is nonsense, and what was trained is mlp: name that"),
        ("launch --on ssh --hosts hosts --dry-run --env=1.5 train photos.rec", "--env is '1.5'; it must be a variable"),
        ("launch --on ssh --hosts hosts --dry-run --sync=s3://a train photos.rec", "ssh.sync is 's3://a'; it must be"),
        ("diagnose run --probe --model nonsense", "--model is nonsense, and what was trained is mlp: name that"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(files: Path, command: str, message: str) -> None:
    verb, *words = shlex.split(command)
    outcome = run_one(verb, "", "", words, files)
    assert outcome.code == 2 and not outcome.left and message in outcome.message, outcome


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("bench infer nonsense --engines eager", "model 'nonsense'"),
        *(
            pytest.param(command, what, marks=pytest.mark.slow)
            for command, what in (
                ("bench train --model nonsense --seconds 0.1", "model 'nonsense'"),
                (
                    "scale nonsense --model mlp --size 8 --classes 3 --batch-size 4 --link 10GbE",
                    "file or folder nonsense",
                ),
            )
        ),
    ],
)
def test_what_a_process_cannot_measure_for_a_wrong_name_is_a_users_mistake(
    command: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(command), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"steady: there is no {what}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench infer photos --engines eager --device cpu", "photos is not a run"),
        ("bench infer text.txt --engines eager --device cpu", "text.txt is no weights file that is known"),
        ("scale --measured pipe --link 1GbE", "cannot read pipe"),
        ("scale --measured run --link 1GbE", "cannot read run"),
        ("sweep photos.rec --over lrr=1..2 --search 2 --run out --epochs 1", "unknown key 'lrr'"),
        ("bandwidth --procs 1", "--procs is 1; it must be from 2 to 256"),
        ("bench infer mlp --batch-size 0 1", "--batch-size is 0; it must be from 1"),
        ("evaluate run photos.rec --batch-size 0", "--batch-size is 0; it must be from 1"),
        ("tune photos.rec --minutes 1441", "--minutes is 1441; it must be above 0, up to 1440"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_ends(files: Path, command: str, message: str) -> None:
    words = shlex.split(command)
    verb, words = (" ".join(words[:2]), words[2:]) if words[0] == "bench" else (words[0], words[1:])
    outcome = run_one(verb, "", "", words, files)
    assert outcome.code == 2 and not outcome.left and message in outcome.message, outcome


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
