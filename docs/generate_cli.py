"""Write docs/cli/VERB.md, docs/recipe.md and the page of other tools' flags: ``python docs/generate_cli.py``.

A test compares the pages with what this gives, so a changed flag without a changed page does not pass.
"""

from __future__ import annotations

import inspect
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument

from steadytrain.cli import RECIPE_VERBS, VERBS, app, default_text, examples, usage
from steadytrain.cli.options import help_of
from steadytrain.cli.other_tools import TOOLS, answer, flags_of
from steadytrain.config.defaults import FEW_IMAGES, SMALL
from steadytrain.config.reference import recipe_keys
from steadytrain.config.settings import GROUPS

FOLDER = Path(__file__).parent / "cli"
VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def pages() -> dict[str, str]:
    """File name -> text, for every verb and the list of them."""
    index = ["# Commands", "", "| command | what it does |", "|---|---|"]
    index += [f"| [`steady {verb}`]({file_of(verb)}) | {summary} |" for verb, summary in VERBS.items()]
    codes = "0 done, 1 failed, 2 wrong use, 3 stalled, 75 stopped and saved, 130 interrupted"
    index += ["", f"Exit codes: {codes}.", ""]
    index += ["```{toctree}", ":hidden:", "", *(file_of(verb).removesuffix(".md") for verb in VERBS), "```", ""]
    return {"index.md": "\n".join(index), **{file_of(verb): page(verb, app()[verb]) for verb in VERBS}}


def file_of(verb: str) -> str:
    """The file name of a verb's page."""
    return f"{verb.replace(' ', '-')}.md"


def recipe_page() -> str:
    """The page of the recipe: every key, by part."""
    lines = [
        "# The recipe",
        "",
        "Look up every setting of a run, with its default. Set them by flags, by `--set KEY=VALUE`, in a file",
        "(`--recipe FILE`, .toml, .json or .yaml) or in Python (`st.Recipe`, `st.default_recipe`). Flags override the",
        "file, and `--set` overrides both. `steady train --help-recipe` prints the tables below, and",
        "`--help-recipe optim` one of them.",
        "Every run shows its settings in its first lines.",
        "",
        "A recipe file:",
        "",
        "```toml",
        "batch_size = 64",
        "",
        "[optim]",
        'name = "adamw"',
        "lr = 0.001",
        "",
        "[budget]",
        "epochs = 20",
        "```",
        "",
        f"`steady train` recommends `steady finetune` where classes average fewer than {FEW_IMAGES} images and",
        f"the images are larger than {SMALL} pixels. It does not where the user named a model or weights.",
    ]
    part = None
    for row in recipe_keys():
        name = row.key.rpartition(".")[0] or "top level"
        if name != part:
            lines += ["", f"## {name}", "", "| key | default | meaning, type, example |", "|---|---|---|"]
            part = name
        usual = row.train if row.train == row.finetune else f"train: {row.train}<br>finetune: {row.finetune}"
        lines.append(f"| `{row.key}` | {usual} | {row.meaning}<br>*{row.type}*<br>`{row.example}` |")
    return "\n".join([*lines, ""])


def flags_page() -> str:
    """The page of other tools' flags: what the command line itself makes of each."""
    lines = [
        "# Flags of other tools",
        "",
        "Type a flag of timm, torchvision, Lightning, MXNet, Keras, fastai, Ultralytics or transformers after",
        "`steady train DATA`, `finetune`, `sweep` or `schedule`. It works, or one line says what to type instead.",
        "Dashes and underscores are alike, and so are `--trainer.max_epochs` and `--max_epochs`. See also",
        "[their commands here](../help/other-tools.md).",
        "",
        "Two things differ without a note. `--lr` is for 256 images in `steady train` (128 of small ones), and scaled",
        "to the batch, as timm's `--lr-base` is; `--set optim.base_batch_size=none` turns that off. `--opt sgd` has",
        "Nesterov momentum in timm; here that is `--optimizer nag`.",
    ]
    for tool in TOOLS:
        lines += ["", f"## {tool}", "", "| their word | here | what differs |", "|---|---|---|"]
        for one in map(answer, flags_of(tool)):
            ours = "the same" if one.ours == one.typed else f"`{one.ours}`" if one.ours else "taken"
            about = one.refusal or "; ".join(one.notes) or ("" if one.ours else "it says what is done anyway")
            about = about.removeprefix("Instead: ").removeprefix(f"{one.typed} is not needed: ")
            about = about.removeprefix(f"{one.typed} has no counterpart here: ").rstrip(".").replace("|", "\\|")
            lines.append(f"| `{one.typed}` | {'not taken' if one.refusal else ours} | {about} |")
    return "\n".join([*lines, ""])


def page(verb: str, command: App) -> str:
    """The page of one verb: what its function says, then its arguments and options."""
    function = command.default_command
    assert function is not None
    text, shown_examples = examples(inspect.getdoc(function) or VERBS[verb])
    default = app().default_parameter
    with help_of(verb) if verb in RECIPE_VERBS else nullcontext():
        arguments = command.assemble_argument_collection(default_parameter=default, parse_docstring=True)
    shown = [one for one in arguments if one.show]
    positional = [one for one in shown if not one.name.startswith("-")]
    options = [one for one in shown if one.name.startswith("-")]
    lines = [f"# steady {verb}", "", text, "", "```text", usage(verb, command), "```", ""]
    if positional:
        lines += ["| argument | meaning |", "|---|---|", *(_row(verb, one) for one in positional), ""]
    for name in ("", *GROUPS):
        rows = [_row(verb, one) for one in options if _group(one) == name]
        if rows:
            lines += [*([f"## {name}", ""] if name else []), "| option | meaning |", "|---|---|", *rows, ""]
    if shown_examples:
        mark = [] if verb == "help" else ["<!-- not run: examples, on files of yours -->"]
        lines += [*mark, "```sh", *shown_examples, "```", ""]
    return "\n".join(lines)


def _group(argument: Argument) -> str:
    """The heading that a flag stands under; empty for the verb's own flags, which come first."""
    return next((group.name for group in argument.parameter.group if group.name in GROUPS), "")


def _row(verb: str, argument: Argument) -> str:
    value = _value(argument.hint)
    names = ", ".join(f"`{name}`" for name in argument.names)
    value = f" {value}" if value and argument.name.startswith("-") else ""
    default = argument.field_info.default
    default = "" if default is inspect.Parameter.empty else default_text(default)
    ending = f" Default: `{default}`." if default else ""
    meaning = (argument.parameter.help or "").strip()
    return f"| {names}{value} | {meaning}{ending} |".replace("\n", " ")


def _value(hint: Any) -> str:
    """What stands for the value of an option: nothing for a switch, the choices where they are few."""
    origin, args = get_origin(hint), [one for one in get_args(hint) if one not in (types.NoneType, Ellipsis)]
    if hint is bool:
        return ""
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in args)
    if origin in (Union, types.UnionType, tuple, list):
        return " or ".join(dict.fromkeys(_value(one) for one in args if one is not bool))
    return VALUES.get(hint, getattr(hint, "__name__", str(hint)).upper())


def main() -> None:
    """Write every page, and remove those of verbs that are gone."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    (FOLDER.parent / "recipe.md").write_text(recipe_page(), encoding="utf-8")
    (FOLDER.parent / "reference" / "flags-of-other-tools.md").write_text(flags_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
