"""What is in the tree: nothing of the place where it was made, and documents whose examples run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from cyclopts import CycloptsError

import steadytrain
from steadytrain.cli import app, join_verb, main

PROJECT = Path(__file__).parents[2]
# Paths and names of one machine. Written with brackets so that they do not match themselves.
PLACES = re.compile(r"/wor[k]/|/roo[t]/|/hom[e]/|\bfar[m]-|(?<!torch)\.librar[y]\b|\.mirro[r]\b")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
NOT_RUN = "<!-- not run"


def _tracked() -> list[Path]:
    if not (PROJECT / ".git").exists():
        return []
    output = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, check=True).stdout
    return [PROJECT / name for name in output.decode().split("\0") if name and (PROJECT / name).is_file()]


def _pages() -> list[Path]:
    return [*sorted(PROJECT.glob("*.md")), *sorted((PROJECT / "docs").rglob("*.md"))]


def _blocks(languages: str) -> list[tuple[Path, int, str, bool]]:
    """Page, line and text of every fenced block in these languages, and whether it is to be run."""
    rows = []
    for page in _pages():
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            before = text[: match.start()].rstrip().splitlines()[-1:]
            run = not any(line.strip().startswith(NOT_RUN) for line in before)
            if match[2] in languages.split():
                rows.append((page.relative_to(PROJECT), text[: match.start()].count("\n") + 2, match[3], run))
    return rows


def _name(block: tuple[Path, int, str, bool]) -> str:
    return f"{block[0]}:{block[1]}"


def test_no_file_names_the_machine_it_was_made_on() -> None:
    if not (tracked := _tracked()):
        pytest.skip("not a git checkout: the list of tracked files is unknown")
    texts = [
        f"{path.relative_to(PROJECT)}:{number}: {line.strip()[:120]}"
        for path in tracked
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if PLACES.search(line)
    ]
    assert not texts


@pytest.mark.parametrize("block", _blocks("python"), ids=_name)
def test_python_in_the_documents_runs(
    block: tuple[Path, int, str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page, line, text, run = block
    code = compile("\n" * (line - 1) + text, str(page), "exec")
    assert set(re.findall(r"\bst\.(\w+)", text)) <= {*steadytrain.__all__, *steadytrain.data.__all__}
    if run:
        exec(code, {"__name__": "__main__"})


COMMANDS = [
    pytest.param(line.strip().removeprefix("$ "), id=f"{page}:{number}: {line.strip()}")
    for page, start, text, _ in _blocks("sh bash console shell")
    for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), start)
    if re.match(r"\s*(\$ )?(\S*/)?steady ", line)
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_documents_are_understood(line: str) -> None:
    """Parsed, not run: every verb and flag is known, every value of the right type."""
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "--completion":  # it stands for itself, beside the commands
        assert words[1] in ("bash", "zsh", "fish")
        return
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "2>", "&&", "||", ";")), None)]
    words = ["./-" if word == "-" else word for word in words]  # as the command line reads it
    try:
        app().parse_args(join_verb(words), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        pytest.fail(f"{line}: {error}")


SHELLS = "sh bash console shell"
TRIED_ELSEWHERE = {"README.md", "CONTRIBUTING.md", "docs/start/install.md"}
"""Pages whose commands install: they are tried in fresh environments."""


@pytest.mark.parametrize("block", [row for row in _blocks(SHELLS) if str(row[0]) not in TRIED_ELSEWHERE], ids=_name)
def test_commands_in_the_documents_run_or_say_why_not(
    block: tuple[Path, int, str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, text, run = block
    for line in text.splitlines() if run else ():
        assert main(shlex.split(line, comments=True)[1:]) == 0


@pytest.mark.parametrize("page", _pages(), ids=lambda page: page.stem)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    marks = re.findall(r"<!-- not run(.*?)-->", page.read_text(encoding="utf-8"))
    assert all(re.match(r": \w", mark) for mark in marks)


@pytest.mark.parametrize("block", _blocks("toml json"), ids=_name)
def test_data_in_the_documents_can_be_read(block: tuple[Path, int, str, bool]) -> None:
    text = block[2]
    if text.lstrip().startswith("{"):
        assert [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        assert tomllib.loads(text)


def test_links_between_the_documents_lead_somewhere() -> None:
    broken = []
    for page in _pages():
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(PROJECT)}: {target}")
    assert not broken
