"""Options that several verbs share, and how those of ``train`` and ``finetune`` become a recipe.

The order of precedence, weakest first: defaults for the data, ``--recipe FILE``, flags, ``--set KEY=VALUE``.
"""

from __future__ import annotations

import json as json_module
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from steadytrain.config import Recipe
from steadytrain.config.defaults import apply_changes
from steadytrain.config.keywords import FLAG_NAMES, FLAGS, flag_values
from steadytrain.config.plain import hints_of, leaves, parse_json, table_of
from steadytrain.config.recipe import ASIDE, recipe_settings
from steadytrain.config.reference import flag_help
from steadytrain.config.settings import GROUPS, MODEL, OPTIMIZER, OUTPUT, RANKS, SPEED, Flag
from steadytrain.config.strangers import PATH_KEYS
from steadytrain.config.transforms import split_transforms
from steadytrain.distributed.world import world_from_environment
from steadytrain.errors import InputError, RecipeError, did_you_mean
from steadytrain.files import read_text
from steadytrain.format import few
from steadytrain.run import MAX_REPEATS, Run

Json = Annotated[bool, Parameter(help="Print one JSON document.")]
GroupBy = Annotated[str | None, Parameter(name=("--group-by", "--group"))]
DeviceFlag = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, or mps (a Mac's GPU).")]
WhichFlag = Annotated[
    Literal["best", "last"], Parameter(help="Which of a run's weights: the best on the validation images, or the last.")
]
RepeatedFlag = Annotated[tuple[str, ...], Parameter(consume_multiple=False)]
"""A flag that may be given several times, such as ``--set KEY=VALUE``."""
MAX_SECONDS = 3600
SecondsFlag = Annotated[float, Parameter(validator=Number(gt=0, lte=MAX_SECONDS))]
"""The time of a measurement."""
WorkersFlag = Annotated[int | None, Parameter(validator=Number(gte=1, lte=1024))]
SizeFlag = Annotated[int | None, Parameter(name=("--size", "--img-size"), validator=Number(gte=1, lte=4096))]
ClassesFlag = Annotated[int, Parameter(name=("--classes", "--num-classes"), validator=Number(gte=1, lte=10**6))]
BatchSizesFlag = Annotated[
    tuple[int, ...],
    Parameter(name=("--batch-size", "--batch", "-b"), consume_multiple=1, validator=Number(gte=1, lte=2**20)),
]
ProcsFlag = Annotated[int | None, Parameter(name=("--procs", "-n"), validator=Number(gte=2, lte=256))]

RECIPES = (".toml", ".json", ".yaml", ".yml")
"""The extensions of recipe files."""

MAX_VALUES, MAX_DEPTH = 100_000, 20
"""The most values that a recipe file may hold, and tables or lists within each other."""

HEADINGS = {name: Parameter(group=Group(name, sort_key=order)) for order, name in enumerate(GROUPS)}
"""Parameters that put a flag under its heading in ``--help``."""


def _flag_type(key: str, flag: Flag) -> Any:
    """Return what the parser needs of a flag: the type of what is typed, its names and its heading."""
    part, _, name = key.rpartition(".")
    hint = hints_of(hints_of(Recipe)[part] if part else Recipe)[name]
    kinds = {hint, *get_args(hint)}
    kind: Any = flag.kind or next((kind for kind in (bool, int, float) if kind in kinds), str)
    if kind is int and (flag.is_measured or Literal["auto"] in kinds):
        kind = int | Literal["auto"]
    if flag.kind is None and get_origin(hint) is tuple:
        kind = hint
    return Annotated[kind, Parameter(name=flag.names.split(), consume_multiple=False), HEADINGS[flag.group]]


if TYPE_CHECKING:
    RecipeFlags = Mapping[str, Any]
else:
    RecipeFlags = TypedDict("RecipeFlags", {name: _flag_type(*known) for name, known in FLAGS.items()}, total=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """The flags that say where images and their labels are, where the data do not."""

    root: Annotated[str | None, Parameter(help=flag_help("data.root"))] = None
    labels: Annotated[str | None, Parameter(help=flag_help("data.labels"))] = None
    path_column: Annotated[str | None, Parameter(help=flag_help("data.path_column"))] = None
    label_column: Annotated[RepeatedFlag, Parameter(help=flag_help("data.label_column"))] = ()
    split_column: Annotated[str | None, Parameter(help=flag_help("data.split_column"))] = None
    zip_names: Annotated[str | None, Parameter(help=flag_help("data.zip_names"))] = None


NETWORK = Parameter(group=Group("The network that computes the features", sort_key=1))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The flags of a frozen network and its images.

    Args:
        model: Name of the model [default: that of steady finetune].
        weights: A file of its weights, or the folder of a run, whose own network is then used [default: the model's
            pretrained weights, fetched once].
        accept_licence: Use weights whose licence forbids commercial use, without confirmation.
        set: Set another value of finetune's recipe: --set data.crop=1.
    """

    model: Annotated[str | None, NETWORK] = None
    weights: Annotated[str | None, NETWORK] = None
    size: Annotated[SizeFlag, NETWORK, Parameter(help="Side of the images, in pixels [default: the network's].")] = None
    fit: Annotated[str | None, NETWORK, Parameter(help=flag_help("data.fit"))] = None
    device: Annotated[DeviceFlag, NETWORK] = "auto"
    accept_licence: Annotated[bool, NETWORK] = False
    set: Annotated[RepeatedFlag, NETWORK] = ()

    def changes(self, **places: Any) -> dict[str, Any]:
        """Return the values of a recipe that are given, with those of ``places`` under ``data``. Raises RecipeError."""
        values: dict[str, Any] = {"model.name": self.model, "model.weights": self.weights, "data.size": self.size}
        values |= {"data.fit": self.fit, "parallel.device": self.device}
        values |= {f"data.{name}": value for name, value in places.items()}
        given = {key: value for key, value in values.items() if value not in (None, ())}
        return given | dict(parse_setting(text) for text in self.set)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The flags of ``train``, ``finetune`` and ``resume``; all else is in ``--recipe`` and ``--set``.

    Args:
        flags: those that set a value of the recipe, by their names; each is described at the setting's own field.
        budget_minutes: finetune: compare sizes and networks, train the best as long as it helps, and end within this
            many minutes.
        fetch_models: With --budget-minutes, also compare networks that are fetched for it, if they are fast enough
            here: MobileNetV3, EfficientNetV2, ConvNeXt, DINOv2 (Apache-2.0, up to 115 MB each).
        repeats: Train with this many seeds, one run after another, and print the mean of their accuracies and its 95 %
            interval; the same command resumes and skips finished runs.
        workers: With --engine async, its workers, as --procs; else threads that load images, as --threads.
        run: Folder of the run; the same command resumes it. Of repeats: the folder that holds them. A URI, such as
            s3://bucket/runs/a: train in runs/a, and upload it. [default of a new run: runs/MODEL-DATA-DIGEST, of
            repeats with -repeats]
        recipe: A recipe file: .toml, .json or .yaml. Flags overrule it.
        accept_licence: Use weights whose licence forbids commercial use, without confirmation.
        probe: First measure how fast loading alone and updates alone are; the weights do not depend on it.
        explain: Print what would be trained, and how it is stored; train nothing.
        mxnet_log: Write progress in the format of MXNet's training scripts, for tools that read their logs.
        set: Set any other value of the recipe: --set optim.clip_norm=1 (--help-recipe lists them).
        json: Print the outcome as one JSON document.
    """

    flags: Annotated[RecipeFlags, Parameter(name="*")] = field(default_factory=dict)
    budget_minutes: Annotated[float | None, HEADINGS[OPTIMIZER]] = None
    fetch_models: Annotated[bool, HEADINGS[OPTIMIZER]] = False
    repeats: Annotated[int | None, HEADINGS[OUTPUT], Parameter(validator=Number(gte=2, lte=MAX_REPEATS))] = None
    workers: Annotated[int | Literal["auto"] | None, HEADINGS[RANKS]] = None
    run: Annotated[str | None, HEADINGS[OUTPUT]] = None
    recipe: Annotated[Path | None, HEADINGS[OUTPUT]] = None
    accept_licence: Annotated[bool, HEADINGS[MODEL]] = False
    probe: Annotated[bool, HEADINGS[SPEED]] = False
    explain: Annotated[bool, HEADINGS[OUTPUT]] = False
    mxnet_log: Annotated[bool, HEADINGS[OUTPUT]] = False
    set: Annotated[RepeatedFlag, HEADINGS[OUTPUT]] = ()
    json: Annotated[bool, HEADINGS[OUTPUT]] = False

    @cached_property
    def changes(self) -> Mapping[str, Any]:
        """Changes by the flags and the ``--set`` values, by the recipe's keys. Raises RecipeError.

        >>> TrainingOptions(flags={"lr": 0.2, "epochs": 3}, set=("optim.momentum=0.8",)).changes
        {'budget.epochs': 3, 'budget.steps': None, 'optim.lr': 0.2, 'optim.momentum': 0.8}
        """
        values = flag_values(self.flags)
        if self.workers is not None and "parallel.threads" not in self.measured:
            values[self._key_of_workers] = self.workers
        values |= self._settings
        if values.get("budget.steps") and self.flags.get("epochs") is None:
            values["budget.epochs"] = None
        return values

    @cached_property
    def measured(self) -> frozenset[str]:
        """The keys of the recipe that are left to measuring: ``--batch-size auto`` and its like."""
        measured = {key for name, (key, flag) in FLAGS.items() if flag.is_measured and self.flags.get(name) == "auto"}
        if self.workers == "auto" and self._key_of_workers == "parallel.threads":
            measured.add("parallel.threads")
        return frozenset(measured)

    @property
    def _key_of_workers(self) -> str:
        """The key that ``--workers`` sets: processes that train with ``--engine async``, else threads."""
        engine = self.flags.get("engine") or {**dict(leaves(self.file_values)), **self._settings}.get("parallel.engine")
        return "parallel.procs" if engine == "async" else "parallel.threads"

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """Keys and values of ``--set``."""
        return dict(parse_setting(text) for text in self.set)

    @cached_property
    def file_values(self) -> dict[str, Any]:
        """Values of the file of ``--recipe``; none where it is not given. Raises RecipeError."""
        return {} if self.recipe is None else read_recipe(self.recipe)

    @cached_property
    def chosen(self) -> Mapping[str, Any]:
        """The keys and values of the recipe that the user has chosen, by flags or by a file."""
        return {**dict(leaves(self.file_values)), **self.changes}

    def value(self, key: str) -> Any:
        """Look up what a key of the recipe will be by the flags, else by the recipe file; None where neither says it.

        >>> TrainingOptions(flags={"size": 96}).value("data.size")
        96
        """
        return self.chosen.get(key)

    def recipe_over(self, defaults: Recipe) -> Recipe:
        """Lay the recipe file's values, and over those the flags' and ``--set`` values, over the defaults.

        Raises:
            RecipeError: an unknown key or a value that cannot be, by its name.
        """
        return apply_changes(defaults, self.file_values, self.changes)

    def begun_run(self) -> Run | None:
        """Open the run in the folder of ``--run``; None where there is none."""
        return Run.open(self.run) if self.run is not None and Run.is_run(self.run) else None

    @property
    def names_model(self) -> bool:
        """Return whether the command line itself names the model, and so allows importing it."""
        return "model.name" in self.changes


@contextmanager
def help_of(verb: str) -> Iterator[None]:
    """Have ``--help`` show the recipe's flags with the defaults of this verb.

    The parser reads their texts from the docstring of their type, which is therefore written for the time of the call.
    """
    texts = [f"    {name}: {flag_help(key, verb)}" for name, (key, _) in FLAGS.items()]
    RecipeFlags.__doc__ = "\n".join(["The flags that set a value of the recipe.", "", "Args:", *texts])
    try:
        yield
    finally:
        RecipeFlags.__doc__ = None


@cache
def _primary_names() -> Mapping[str, str]:
    """Map each name of a flag of the training verbs, with dashes inside, to its first name, with underscores."""
    return FLAG_NAMES | {entry.name.replace("_", "-"): entry.name for entry in fields(TrainingOptions)}


def our_flag(name: str) -> str:
    """Return the first name of a flag of the training verbs by any of its names; empty for any other word.

    >>> our_flag("dtype"), our_flag("--run"), our_flag("wd")
    ('--precision', '--run', '')
    """
    known = _primary_names().get(name.lstrip("-").replace("_", "-"), "")
    return f"--{known.replace('_', '-')}" if known else ""


def key_of(flag: str) -> str | None:
    """Return the recipe's key that a flag sets, with or without its dashes; None for any other word.

    >>> key_of("--weight-decay"), key_of("epochs"), key_of("--run")
    ('optim.weight_decay', 'budget.epochs', None)
    """
    known = FLAGS.get(_primary_names().get(flag.lstrip("-").replace("_", "-"), ""))
    return known[0] if known is not None else None


def is_switch(flag: str) -> bool:
    """Return whether a flag, by its first name, sets a yes or no of the recipe, so that no value follows it."""
    name = flag.removeprefix("--").replace("-", "_")
    return name in FLAGS and get_args(_flag_type(*FLAGS[name]))[0] is bool


def flag_of(key: str) -> str:
    """Return the flag that sets a recipe's key; empty where only ``--set`` does."""
    setting = recipe_settings().get(key)
    return setting.flag.name if setting is not None and setting.flag is not None else ""


def read_table(path: Path, what: str = "a recipe") -> dict[str, Any]:
    """Read the values of a recipe file, or of another such table, by its extension.

    Raises:
        RecipeError: it cannot be read, or is no table.
    """
    import tomllib

    import yaml

    if path.suffix not in RECIPES:
        near = did_you_mean(path.suffix, RECIPES)
        raise RecipeError(f"{path} has the extension {path.suffix!r}; {what} is .toml, .json or .yaml.{near}")
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
    try:
        values = parsers.get(path.suffix, _parse_yaml)(read_text(path))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}; {what} is a table of keys and values")
    _require_few(values, path)
    return values


def _require_few(values: dict[str, Any], path: Path) -> None:
    """Refuse values without end: an anchor of YAML may hold itself, or others many times over. Raises RecipeError."""
    waiting: list[tuple[Any, int]] = [(values, 0)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return
        value, depth = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if inner and depth == MAX_DEPTH:
            raise RecipeError(f"{path} has tables or lists more than {MAX_DEPTH} deep within each other")
        waiting += [(item, depth + 1) for item in inner]
    raise RecipeError(f"{path} holds more than {MAX_VALUES:,} values, those that an anchor repeats included")


_YAML_WORDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    "merge": "<<",
}
"""Types of plain words in YAML 1.2, and ``<<`` of 1.1; the first that matches counts. PyYAML by itself reads YAML 1.1:
``on`` as true, ``010`` as 8, ``1e-3`` as a text."""


def _word(node: Any) -> str:
    """Return the word of a node. Raises ValueError where it is a list or a table."""
    if isinstance(node.value, str):
        return node.value
    raise ValueError(f"{node.tag.rpartition(':')[2]} stands before a {node.id}")


def _parse_yaml(text: str) -> Any:
    """Read YAML 1.2 as :func:`parse_json` reads JSON."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - its base has it so

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            table_of([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    for name, pattern in _YAML_WORDS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"({pattern})$"), None)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(_word(node)))
    Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(_word(node)))
    return yaml.load(text, Loader)  # a safe loader


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the values of a recipe file, without its tables that are no part of the recipe. Raises RecipeError."""
    return {name: value for name, value in read_table(path).items() if name not in ASIDE}


def parse_setting(text: str, *, example: str = "optim.lr=0.1") -> tuple[str, Any]:
    """Parse ``optim.lr=0.1`` as a key and a JSON value; what is no JSON is a text.

    >>> parse_setting("optim.lr=0.1"), parse_setting("optim.name=adamw"), parse_setting("data.flip=false")
    (('optim.lr', 0.1), ('optim.name', 'adamw'), ('data.flip', False))
    >>> parse_setting("optim.ema=none"), parse_setting("data.augment=none")  # nothing; the word, where it is a choice
    (('optim.ema', None), ('data.augment', 'none'))
    >>> parse_setting("model.freeze=conv_stem,blocks.0")  # a list needs neither brackets nor quotes
    ('model.freeze', ['conv_stem', 'blocks.0'])
    >>> parse_setting("data.mean=0.5,0.5,0.5")
    ('data.mean', [0.5, 0.5, 0.5])
    >>> parse_setting("optim.factor=.97"), parse_setting("optim.betas=[.9,1.]")  # as C and Python write numbers
    (('optim.factor', 0.97), ('optim.betas', [0.9, 1.0]))
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {text!r} must be KEY=VALUE, such as --set {example}")
    if key in PATH_KEYS and os.path.exists(value):  # noqa: PTH110 - a folder called 2024; no error for a long text
        return key, value
    number = value  # as JSON writes it: 0.5 for .5
    if ".." not in value and re.fullmatch(r"[\d.eE+,\s()\[\]-]+", value):
        number = re.sub(r"(?<!\d)\.(?=\d)", "0.", re.sub(r"(?<=\d)\.(?!\d)", ".0", value))
    try:
        return key, json_module.loads(number)
    except ValueError:
        pass
    part, _, name = key.partition(".")
    owner = hints_of(Recipe).get(part)
    hint = hints_of(owner).get(name) if owner is not None and is_dataclass(owner) else None
    if hint == tuple[str, ...]:
        return key, list(split_transforms(value)) if name == "transforms" else value.split(",")
    kinds = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple]
    if kinds and re.fullmatch(r"[\d.eE+,\s()-]+", value):  # 0.5,0.5,0.5
        with suppress(ValueError):
            return key, [json_module.loads(item) for item in number.strip(" ()").split(",") if item.strip()]
    words = get_args(hint)
    return key, None if value in ("none", "None") and value not in words else value


def require_trackers(options: TrainingOptions) -> None:
    """Refuse an unknown name of a tracker on the command line. Raises InputError."""
    if track := options.changes.get("every.track"):
        from steadytrain.reports.trackers import find_trackers

        find_trackers(str(track))


def refuse_flags(message: str, **flags: object) -> None:
    """Refuse the first of these flags that is given, as it would do nothing; in the message ``{}`` stands for it.

    Raises:
        InputError: one is given.

    >>> refuse_flags("{} is about data, and none are named", root=None, label_column=())
    """
    if name := next((name for name, given in flags.items() if not (given in (None, ()) or given is False)), None):
        raise InputError(message.replace("{}", f"--{name.replace('_', '-')}"))


def require_run_model(model: str | None, trained: Sequence[str]) -> None:
    """Refuse a ``--model`` that no run has. Of a run it only permits importing the model's code. Raises InputError."""
    if model is not None and model not in trained:
        raise InputError(f"--model is {model}, and what was trained is {few(trained)}: name that, or leave it out")


def require_alone(verb: str) -> None:
    """Refuse to run as one of a launcher's ranks, for a command that starts its own. Raises InputError."""
    if (world := world_from_environment(os.environ)).size > 1:
        raise InputError(f"{world.launcher} has started {world.size} ranks: {verb} starts its own, so run it once")
