"""The pages about commands and events say what the code says."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

import steadytrain
from steadytrain import errors
from steadytrain.cli import main
from steadytrain.cli.help import topics
from steadytrain.cli.options import parse_setting
from steadytrain.config import Data, Model, Recipe
from steadytrain.config.defaults import usual_recipe
from steadytrain.config.keywords import FLAGS
from steadytrain.config.plain import leaves
from steadytrain.config.reference import flag_help, recipe_keys
from steadytrain.errors import SteadyError
from steadytrain.events import KINDS, Event
from steadytrain.monitor.rules import rules
from steadytrain.monitor.rules.pace import STAGES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_of_the_commands_are_up_to_date() -> None:
    values: dict[str, str] = runpy.run_path(str(DOCS / "generate_cli.py"))["pages"]()
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "cli").glob("*.md")}
    stale = [name for name in values.keys() | written.keys() if values.get(name) != written.get(name)]
    assert not stale, "run: python docs/generate_cli.py"


def test_the_page_of_the_recipe_is_up_to_date() -> None:
    page: str = runpy.run_path(str(DOCS / "generate_cli.py"))["recipe_page"]()
    assert (DOCS / "recipe.md").read_text(encoding="utf-8") == page, "run: python docs/generate_cli.py"
    values = Recipe(data=Data(train="x"), model=Model("x")).to_dict()
    keys = [row.key for row in recipe_keys()]
    assert sorted(keys) == sorted(key for key, _ in leaves(values)) and all(row.meaning for row in recipe_keys())


def test_the_pages_of_other_tools_flags_are_up_to_date() -> None:
    values: dict[str, str] = runpy.run_path(str(DOCS / "generate_cli.py"))["flags_pages"]()
    folder = DOCS / "reference"
    stale = [name for name, text in values.items() if (folder / name).read_text(encoding="utf-8") != text]
    assert not stale, "run: python docs/generate_cli.py"
    assert {path.name for path in (folder / "flags").glob("*.md")} == {Path(name).name for name in values} - {
        "flags-of-other-tools.md"
    }


def test_every_example_of_the_recipe_can_be_set() -> None:
    for row in recipe_keys():
        setting = row.example.removeprefix("--set ")
        others: dict[str, object] = {"budget.epochs": None} if row.key == "budget.steps" else {}
        if row.key.startswith("parallel.shard_"):
            others = {"parallel.shard": True, "precision.name": "bf16"}
        start = usual_recipe("photos", finetune=False, small=False)
        start.with_({**dict([parse_setting(setting)]), **others})


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_the_defaults_in_the_help_are_the_defaults(verb: str) -> None:
    """What the help of a flag begins its default with is what the verb begins with."""
    usual = dict(leaves(usual_recipe("photos", finetune=verb == "finetune", small=False).to_dict()))
    flags = ("epochs", "batch_size", "lr", "optimizer", "weight_decay", "warmup_epochs", "ema", "schedule")
    for flag in (*flags, "seed", "label_smoothing", "train"):
        value = usual[FLAGS[flag][0]]
        expected = "none" if value is None else value if isinstance(value, str) else f"{value:g}"
        assert f"[default: {expected}" in flag_help(FLAGS[flag][0], verb)


def plain_hint(hint: str) -> str:
    """The annotation of a field without its limits, and tables whose keys the row names as mappings."""
    words = {"Whole": "int", "Positive": "int", "Finite": "float", "Time": "float"}
    hint = re.sub(r"Annotated\[(\w+), [^]]*\]", r"\1", hint.replace('"', "'"))
    hint = re.sub("|".join(words), lambda found: words[found[0]], hint)
    return re.sub(r"\w+Keys", "Mapping[str, Any]", hint)


@pytest.mark.parametrize("kind", [Event, *KINDS.values()])
def test_every_field_of_every_event_is_on_the_page(kind: type[Event]) -> None:
    section = re.search(rf"^## {kind.__name__}\n(.*?)(?=^## |\Z)", (DOCS / "events.md").read_text(), re.M | re.S)
    assert section, f"docs/events.md has no section {kind.__name__}"
    rows = re.findall(r"^\| `(\w+)` \| ((?:[^|\\]|\\\|)+) \|", section[1], re.M)
    common = {} if kind is Event else Event.__annotations__
    hints = {
        name: hint
        for parent in reversed(kind.__mro__)
        for name, hint in vars(parent).get("__annotations__", {}).items()
    }
    lines = [(name, plain_hint(hint)) for name, hint in hints.items() if name not in common]
    assert [(name, hint.replace("\\|", "|").strip()) for name, hint in rows] == lines


def test_the_tree_on_the_page_is_the_tree() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\S+?)/?  ", text[text.index("src/steadytrain/") :], re.M))
    package = DOCS.parent / "src" / "steadytrain"
    there = {path.name for path in package.glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert drawn == there - {"__init__.py"}


def test_every_benchmark_is_on_its_page() -> None:
    folder = DOCS.parent / "benchmarks"
    words = set(re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(encoding="utf-8"), re.M))
    assert words == {path.name for path in folder.glob("*.py")} - {"machine.py"}


def _contents(page: Path) -> list[Path]:
    """Return the pages in the tables of contents of a page, with those below them."""
    tables = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    names = [name for table in tables for name in re.findall(r"^(?:[^:\n<]*<)?([\w/.-]+)>?$", table, re.M)]
    pages = [(page.parent / f"{name}.md").resolve() for name in names]
    return [each for child in pages if child.exists() for each in (child, *_contents(child))]


def test_every_page_is_in_the_contents_once() -> None:
    contents = _contents(DOCS / "index.md")
    assert sorted(contents) == sorted({*contents})
    assert {page for page in DOCS.rglob("*.md") if "_build" not in page.parts} - {*contents} == {DOCS / "index.md"}


LABORATORY = {"benchmarks", "laboratory", "bench", "gpu", "story", "architecture"}
"""Pages for notes on how something was measured; all others are for users."""

USER_PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts and page.stem not in LABORATORY]
LABORATORY_WORDS = (
    r"\b20\d\d-\d\d-\d\d\b|\b(?:November|December) 20\d\d\b|\bEPYC\b|\bXeon\b|\bbusy (?:machine|cores)\b|\bother work\b"
    r"|\bnothing (?:else )?(?:running|beside)\b|\bquiet machine\b|\bone seed\b|\bmeasured by hand\b|\bto be measured\b"
)
SCREEN = 25
"""Lines of a page that stand on the first screen."""

OF_TABLES = {"events", "exit-codes", "environment", "glossary", "other-tools", "bitwise", "trust", "reproducible"}
OF_TABLES |= {"flags-of-other-tools", "ledger-and-verdict", "positions-and-seeds", "run-folder", "index", "files"}
OF_TABLES |= {"what-went", "promises"}
"""Pages to look something up, or to understand it: there is no one command that a reader looks for."""


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())
def test_a_page_for_users_is_read_at_once(page: Path) -> None:
    """No sentence over 30 words, no laboratory note, and the command on the first screen."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|<!--.*?-->|^(\s*\||#|!\[).*?$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    sentences = re.split(r"(?<=[.:!?])\s+|\n\s*\n|^\s*[-:\d]\.? ", prose, flags=re.MULTILINE)
    assert [sentence for sentence in sentences if len(sentence.split()) > 30] == []
    code = r"```.*?```|`[^`]*`"
    assert re.findall(LABORATORY_WORDS, re.sub(code, "", text, flags=re.DOTALL)) == [], "move it to laboratory.md"
    if page.parent.name in ("start", "guides", "concepts", "help"):
        assert not re.search(r"\b20\d\d\b", prose)
    if page.stem not in OF_TABLES and page.parent.name != "flags":
        assert "```" in "".join(text.splitlines(keepends=True)[:SCREEN])


@pytest.mark.parametrize("name", sorted(LABORATORY))
def test_a_page_of_the_laboratory_stands_in_its_section(name: str) -> None:
    assert DOCS / f"{name}.md" in _contents(DOCS / "reference" / "measured.md")


def _sources(folder: str = "") -> str:
    return "".join(
        file.read_text(encoding="utf-8") for file in (DOCS.parent / "src/steadytrain" / folder).rglob("*.py")
    )


def test_every_public_name_is_on_the_page_of_python() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("python*.md"))
    described = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", text, re.M)
    names = {*steadytrain.__all__, *steadytrain.data.__all__} - {"__version__", "data"}
    assert sorted(described) == sorted(names)


@pytest.mark.parametrize("page", ["ssh", "slurm", "kubernetes", "skypilot"])
def test_a_guide_shows_the_file_that_its_command_makes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides" / f"{page}.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^steady ([^\n]* --dry-run [^\n]*)\n```.*?```text\n(.*?)```", text, re.M | re.S)[0]
    if hosts := re.search(r"```text\n((?:\w+\n)+)```", text):
        (tmp_path / "hosts").write_text(hosts[1])
    assert main(shlex.split(command)) == 0
    assert shown in capsys.readouterr().out


def test_messages_to_look_up_are_those_of_the_commands() -> None:
    source = _sources()
    messages = [piece for topic in topics().values() for piece in topic.shown]
    assert messages and [message for message in messages if message not in source] == []


def test_every_cause_and_every_kind_of_error_can_be_looked_up() -> None:
    """What a verdict or an error names has a section of the page, which ``steady help NAME`` prints."""
    causes = {
        *re.findall(r"name=\"([a-z_]+)\"", _sources("monitor")),
        *STAGES,
        *(name for rule in rules() for name in rule.explains),
    }
    causes -= {"read", "batch", "unknown"}  # told as storage and as gather; watched too briefly
    assert causes - set(topics()) == set()
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SteadyError)}
    shown = {piece for topic in topics().values() for piece in topic.shown}
    assert kinds - {"SteadyError", "InputError", "FailedError"} - shown == set()


def test_the_page_of_causes_names_those_that_can_be_looked_up() -> None:
    text = (DOCS / "diagnose.md").read_text(encoding="utf-8").partition("\n| where | causes |")[2]
    causes = re.findall(r"`(\w+)`", text.partition("\n\n")[0])
    assert len(causes) > 30 and set(causes) - set(topics()) == set()


def test_recorded_outputs_are_as_they_were_recorded() -> None:
    """Each block is one that ``docs/record.py`` wrote, by the command above it; ``--check`` names old ones."""
    script = runpy.run_path(str(DOCS / "record.py"))
    records = json.loads((DOCS / "recorded.json").read_text(encoding="utf-8"))
    blocks = {block.key: block.digest for block in script["blocks"]()}
    assert blocks and {key: row["digest"] for key, row in records.items()} == blocks
