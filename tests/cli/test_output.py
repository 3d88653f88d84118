"""Where the output goes: a full disk, nowhere, a terminal of few characters; and what Ctrl-C says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
from tests.data.packing.odd_files import png
from tests.reports.runs import finished

from steadytrain.cli import RECIPE_VERBS, VERBS, main
from steadytrain.cli.options import TrainingOptions
from steadytrain.config.keywords import FLAGS
from steadytrain.config.settings import GROUPS
from steadytrain.format import text_table

STEADY = [sys.executable, "-m", "steadytrain"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run, whose name no ASCII terminal can show."""
    finished(tmp_path / "runs", "größer")
    return tmp_path / "runs"


def test_warnings_of_pillow_about_strangers_files_are_not_printed(tmp_path: Path) -> None:
    """Beside our own sentence: from 89 megapixels on it warns of what a header says."""
    (tmp_path / "large.png").write_bytes(png(12_000, 12_000))
    program = f"""
import sys
from pathlib import Path
from steadytrain.cli import main
from steadytrain.data.images.decode import BadImageError, read_header
sys.argv = ["steady", "--version"]
main()
try:
    read_header(Path({str(tmp_path / "large.png")!r}).read_bytes())
except BadImageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n144,000,000 pixels, more than 100,000,000\n") and done.stderr == ""


def test_output_beyond_the_limit_of_a_file_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"
    command = [sys.executable, "-c", f"{code}; from steadytrain.__main__ import run; sys.exit(run())", "--help"]
    with (tmp_path / "help.txt").open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "steady: cannot write standard output (File too large): fix that and run the same command again\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_standard_output_is_one_line(runs: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*STEADY, "report", runs, "-o", "-"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("steady: the disk is full at standard output")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_standard_output_is_no_error(runs: Path) -> None:
    command = [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])", *STEADY]
    done = subprocess.run([*command, "report", runs, "-o", "-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_seen_enough_ends_it_quietly(runs: Path) -> None:
    command = f"{sys.executable} -m steadytrain report {runs} -o - | head -3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 3
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_a_terminal_without_the_letters_shows_them_escaped(runs: Path) -> None:
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*STEADY, "report", runs, "-o", "-"], capture_output=True, env=variables, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfer" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_its_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    _, _, shown = capsys.readouterr().out.partition("\nExamples:\n")
    assert all(line.startswith(f"  steady {verb}") for line in shown.splitlines() if line)
    assert f"  steady {verb}" in shown


def test_the_help_of_each_verb_has_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """``resume`` has none: flags that are left out keep the run's values, as it says."""
    shown = {}
    for verb in ("train", "finetune", "resume"):
        assert main([verb, "--help"]) == 0
        shown[verb] = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "[default: 90, or 30 for images up to 64 pixels]" in shown["train"] and "adamw]" not in shown["train"]
    assert (
        "may be a fraction; 0 for model.train=probe. [default: 8]" in shown["finetune"]
        and "[default: adamw]" in shown["finetune"]
    )
    assert "[default:" not in shown["resume"] and "flags that are left out keep the run's values" in shown["resume"]


@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_the_help_of_verbs_that_train_groups_every_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    titles = re.findall(r"╭─ (.+?) ─+╮", shown)
    assert titles == ["Arguments", *(["Parameters"] if verb in ("sweep", "schedule") else []), *GROUPS]
    panels = dict(zip(titles, re.split(r"╭─.*╮\n", shown)[1:], strict=True))
    for title, flag in (("Data", "--val"), ("Optimizer and schedule", "--lr"), ("Run and output", "--run")):
        assert f"│ {flag} " in panels[title] and shown.count(f"│ {flag} ") == 1
    for name in {*FLAGS, *(field.name for field in fields(TrainingOptions))} - {"flags"}:
        flag = re.escape(f"--{name.replace('_', '-')}")
        assert any(re.search(rf"^│ {flag}\s", panels[group], re.MULTILINE) for group in GROUPS), name


def test_the_usage_of_a_verb_names_its_data_first(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "train": "steady train DATA [OPTIONS]",
        "finetune": "steady finetune DATA [OPTIONS]",
        "resume": "steady resume RUN [OPTIONS]",
        "sweep": "steady sweep RECIPE DATA [OPTIONS]",
        "schedule": "steady schedule [SOURCE] [OPTIONS]",
        "export": "steady export RUN --output VALUE [OPTIONS]",
        "launch": "steady launch [OPTIONS] [-- COMMAND...]",
    }
    for verb, line in expected.items():
        assert main([verb, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"Usage: {line}\n"), verb
        assert ("[required, unless --recipe or --run has it]" in re.sub(r"[│\s]+", " ", shown)) == ("DATA" in line)


def test_ctrl_c_is_one_line(digits: Path) -> None:
    child = subprocess.Popen(
        [*STEADY, "feed", str(digits), "--seconds", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert child.stderr.readline() == "measuring for 600 seconds\n"
    child.send_signal(signal.SIGINT)
    out, error = child.communicate()
    assert (child.returncode, out) == (130, "")
    assert error == "steady: interrupted: the same command resumes, or starts over\n"


def test_ctrl_c_that_a_lock_turns_into_its_own_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python raises it where a condition has given its lock away and Ctrl-C comes before it waits."""

    def wait(words: object) -> None:
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt

    monkeypatch.setattr("steadytrain.cli._run", wait)
    assert main(["feed"]) == 130
    assert capsys.readouterr().err == "steady: interrupted: the same command resumes, or starts over\n"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        # Python makes dataclasses by exec(), and remembers an interrupt in there although it was caught.
        ("import steadytrain.cli\ndef main():\n try: exec('ask()')\n except KeyboardInterrupt: return 130\n"
         "steadytrain.cli.main = main", 130),
        ("import atexit; atexit.register(ask)", 0),  # after all that runs at the end
        ("import threading, time\ndef wait():\n while threading.main_thread().is_alive(): time.sleep(0.01)\n ask()\n"
         "threading.Thread(target=wait).start()", 130),  # while threads are waited for
    ],
    ids=["exec", "end", "threads"],
)  # fmt: skip
def test_ctrl_c_at_an_odd_moment_ends_by_a_code_and_not_by_the_signal(tmp_path: Path, program: str, code: int) -> None:
    ask = "import os, signal\ndef ask():\n os.kill(os.getpid(), signal.SIGINT)\n for _ in range(1000): pass\n"
    (tmp_path / "sitecustomize.py").write_text(ask + program)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*STEADY, "--version"], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is told by /proc")
@pytest.mark.parametrize("library", ["libtorch_python", pytest.param("libtriton", marks=pytest.mark.slow)])
def test_ctrl_c_while_torch_is_loaded_is_one_line(library: str) -> None:
    child = subprocess.Popen([*STEADY, "models", "resnet18"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{child.pid}/maps")
    while child.poll() is None and library not in maps.read_text():
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    out, error = child.communicate()
    assert (child.returncode, out) == (130, "")
    assert error in ("steady: interrupted\n", "steady: interrupted: the same command resumes, or starts over\n")


def test_the_recipe_is_explained_in_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["finetune", "--help-recipe", "optim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70 and "optim.lr: a number" in lines
    assert not any(line.startswith("data.") for line in lines)
    assert main(["train", "--help-recipe"]) == 0
    assert "data.train: " in capsys.readouterr().out
    assert main(["train", "--help-recipe", "optm"]) == 2
    assert "the recipe has no part 'optm'" in capsys.readouterr().err


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bash"]) == 0
    asks = [
        f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _steady; echo ${{COMPREPLY[*]}}"
        for words in ("steady fin", "steady train photos --lab")
    ]
    script = "\n".join([capsys.readouterr().out, *asks])
    answers = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [set(answer.split()) for answer in answers] == [
        {"finetune"},
        {"--label-smoothing", "--labels", "--label-column"},
    ]
    assert main(["--completion", "csh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


def test_bash_completes_files_where_no_word_of_ours_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "bash"]) == 0
    script = f"{capsys.readouterr().out}\ncomplete -p steady"
    assert " -o default " in subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


def test_zsh_reads_the_script_and_completes_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "zsh"]) == 0
    script = capsys.readouterr().out
    cases = re.findall(r"^        (\S.*)\)$", script, re.MULTILINE)
    assert "finetune" in cases and not [case for case in cases if " " in case]  # zsh would not read the file
    assert re.search(r"'\*--val\[.*\]:val:_files' \\$", script, re.MULTILINE)
    assert re.search(r"\*--precision\[.*\]:precision:\(", script) and not re.search(r":\(.*\):_files", script)
    assert re.search(r"^_steady\(\) \{$.*^_steady \"\$@\"$", script, re.MULTILINE | re.DOTALL)
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True)


def test_a_wide_character_takes_two_columns_of_a_table() -> None:
    assert text_table([["猫", "1"], ["dog", "22"]]).splitlines() == ["猫   1", "dog  22"]
