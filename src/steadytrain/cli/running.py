"""What ``train``, ``finetune`` and ``demo`` do once the recipe is known."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.cli.choices import Choices, build_recipe, changes, names_model, read_recipe, value_of
from steadytrain.cli.console import Advance, Console, note, progress
from steadytrain.config import Parallel, Recipe
from steadytrain.config.plain import leaves
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import InputError, RankLostError, SteadyError, did_you_mean
from steadytrain.machine.process import grow_segments, spin_where_alone
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.training import Group

_FILES = {"--val": "data.val", "--weights": "model.weights"}
"""Flags that name what has to be there, beside the data."""


def begin(data: str | None, choices: Choices, *, finetune: bool) -> int:
    """Train as a command line says: as the rank that a launcher made this process, by ranks of its own, or alone."""
    if choices.explain:
        from steadytrain.cli.explain import explain_recipe

        recipe = recipe_for(data, choices, finetune=finetune)
        return explain_recipe(recipe, allow_import=names_model(choices), json=choices.json)
    from steadytrain.machine.facts import accelerators

    if accelerators():  # before torch is loaded, and asks the GPU what it can do
        grow_segments(recorded=_records_graphs(choices))
    world = world_from_environment(os.environ)
    if world.size > 1:
        # Where a network has no names for its addresses, torch says so for each connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return _train_as_rank(world, data, choices, finetune=finetune)
    if (procs := _procs(choices)) > 1:
        from steadytrain.launch.supervise import keep_ranks

        restarts = _of_parallel(choices, "restarts")
        restarts = restarts if isinstance(restarts, int) else Parallel().restarts
        return keep_ranks(sys.orig_argv, procs, restarts=restarts, say=note)
    spin_where_alone()
    return train_run(recipe_for(data, choices, finetune=finetune), choices)


def _procs(choices: Choices) -> int:
    """How many ranks the command line asks for. Raises InputError where that is no number."""
    from steadytrain.machine.facts import accelerators

    procs = _of_parallel(choices, "procs")
    if procs == "auto":
        return max(1, len(accelerators()))
    return procs if isinstance(procs, int) else 1


def _records_graphs(choices: Choices) -> bool:
    told: dict[str, Any] = {} if choices.recipe is None else read_recipe(choices.recipe)
    mode = value_of("precision.compile", changes(choices), told)
    return bool(_of_parallel(choices, "graph")) or mode in ("reduce-overhead", "max-autotune")


def _of_parallel(choices: Choices, name: str) -> Any:
    """What the command line or its recipe file says of ``parallel``."""
    told: dict[str, Any] = {} if choices.recipe is None else read_recipe(choices.recipe)
    return value_of(f"parallel.{name}", changes(choices), told)


def _train_as_rank(world: World, data: str | None, choices: Choices, *, finetune: bool) -> int:
    """This rank's part of a run that several train; the first one speaks."""
    with _silent(world):
        if choices.probe:
            raise InputError("--probe measures one process: use it with one (--procs 1, and no launcher)")
        return _train_together(world, data, choices, finetune=finetune)


def _train_together(world: World, data: str | None, choices: Choices, *, finetune: bool) -> int:
    from steadytrain.training import init_group

    with init_group(world) as group:
        recipe = group.run_first_then_rest(
            lambda: recipe_for(data, choices, finetune=finetune), is_first=world.is_local_first
        )
        group.require_same("another recipe", _in_common(recipe))
        run = group.run_first_then_rest(
            lambda: Run.create(run_folder(recipe, choices.run), recipe), is_first=world.is_first
        )
        code = train_visibly(run, json=choices.json, allow_import=names_model(choices), group=group)
        name_next(run, code)
    return code


def _in_common(recipe: Recipe) -> dict[str, Any]:
    """What ranks need alike: all but what says on which machine each of them computes, and with how many threads."""
    own = ("device", "threads", "compute_threads", "procs", "restarts")
    return {key: value for key, value in leaves(recipe.to_dict()) if key not in {f"parallel.{name}" for name in own}}


@contextmanager
def _silent(world: World) -> Iterator[None]:
    """Only the first rank prints. Another one tells what it failed at, unless that is what they all fail at."""
    if world.is_first:
        yield
        return
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # noqa: PTH123
            yield
    except (InputError, RankLostError) as error:
        raise SystemExit(error.exit_code) from error
    except SteadyError as error:
        raise type(error)(f"rank {world.rank}: {error}") from error


def recipe_for(data: str | None, choices: Choices, *, finetune: bool) -> Recipe:
    """The recipe of a command line, with defaults that suit the data: a folder is packed for that.

    What can be wrong without the data is found before they are packed, which may take an hour.

    Raises:
        InputError: nothing to train on, or a value that cannot be.
    """
    from steadytrain.data.sources.find import require_there

    told: dict[str, Any] = {} if choices.recipe is None else read_recipe(choices.recipe)
    given = changes(choices)
    train = data or value_of("data.train", given, told)
    if not isinstance(train, str):
        raise InputError("name the data to train on: a folder of classes, a .rec, or whatever else steady pack takes")
    train = _plain(train)
    require_there(train)  # what takes seconds to import comes after
    _require_files({flag: value_of(name, given, told) for flag, name in _FILES.items()})

    from steadytrain.models.registry import find
    from steadytrain.training.data import Facts, default_recipe, look

    def recipe(facts: Facts) -> Recipe:
        defaults = default_recipe(train, facts, model=value_of("model.name", given, told), finetune=finetune)
        return build_recipe(defaults, told, given | {"data.train": train})

    draft = recipe(Facts(num_images=2, num_classes=2, channels=3, largest_side=1))
    find(draft.model.name, allow_import=names_model(choices))
    _require_licence(draft, accepted=choices.accept_licence)
    with packing("images") as advance:
        return recipe(look(draft.data, say=note, progress=advance))


def _plain(place: str) -> str:
    """One spelling for each place: ``photos/`` and ``./photos`` are ``photos``, and give the same run.

    >>> _plain("photos/"), _plain("./a//b.rec"), _plain("https://a/b"), _plain("..")
    ('photos', 'a/b.rec', 'https://a/b', '..')
    """
    return place if "://" in place else str(Path(place))


def _require_files(named: Mapping[str, Any]) -> None:
    """Refuse a flag's file that is not there. Raises InputError."""
    from steadytrain.data.sources.filenames import is_pattern

    for flag, told in named.items():
        if isinstance(told, str) and not Path(told).exists() and not is_pattern(told):
            folder = Path(told).parent
            beside = [one.name for one in folder.iterdir()] if folder.is_dir() else []
            raise InputError(f"{flag} is {told}: there is nothing of that name.{did_you_mean(Path(told).name, beside)}")


def _require_licence(recipe: Recipe, *, accepted: bool) -> None:
    """Ask before weights of a non-commercial licence are fetched. Raises InputError where the answer is not yes."""
    from steadytrain.models.registry import licence_kind, pretrained_licence

    licence = pretrained_licence(recipe.model.name) if recipe.model.pretrained else ""
    if accepted or not licence or licence_kind(licence) != "non-commercial":
        return
    about = f"the weights of {recipe.model.name} are for non-commercial use only (licence {licence})"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{about}. Use them? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise InputError(f"{about}: add --accept-licence to use them, or choose another model (steady models)")


@contextmanager
def packing(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for each thing that is packed, and none where nothing is."""
    with ExitStack() as stack:
        shown: list[Advance] = []
        before = (0, 0)
        began = 0

        def advance(done: int, total: int, /) -> None:
            nonlocal before, began
            if done < before[0] or total != before[1]:  # the next one begins, perhaps after what was packed before
                shown[:] = [stack.enter_context(progress(f"packing {what}", total - done))]
                began = done
            before = (done, total)
            shown[0](done - began)
            if done >= total:
                stack.close()

        yield advance


def run_folder(recipe: Recipe, named: str | None) -> Path:
    """``--run``, or a name made of the model, the data and the recipe's digest under ``runs/``."""
    if named is not None:
        return Path(named)
    model = recipe.model.name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    data = Path(recipe.data.train)
    data = data.resolve() if data.name in ("", "..") else data
    stem = re.sub(r"[][*?{},]+", "_", data.stem)  # several files by one name
    return Path("runs") / f"{model}-{stem}-{recipe.digest[:8]}"


def train_run(recipe: Recipe, choices: Choices) -> int:
    """Create or take up the run, train it before the user's eyes, and say how it came out; the exit code."""
    run = Run.create(run_folder(recipe, choices.run), recipe)
    code = train_visibly(run, json=choices.json, allow_import=names_model(choices), probe=choices.probe)
    name_next(run, code)
    return code


def train_visibly(
    run: Run,
    *,
    json: bool = False,
    allow_import: bool = False,
    probe: bool = False,
    group: Group | None = None,
) -> int:
    """Train a run, or find it finished, and print its table; the exit code. Of several ranks the first one prints."""
    from steadytrain.cli.diagnosis import print_verdict
    from steadytrain.machine.process import own_start
    from steadytrain.reports import summarise, tables
    from steadytrain.training.loop import train_until_signal

    before = run.progress()
    is_finished = before.finished is not None
    if group is not None:
        is_finished = group.all_gather_json(is_finished)[0]
        if not group.world.is_first:
            if is_finished:
                return 0
            return train_until_signal(
                run, lambda event: None, allow_import=allow_import, began=own_start(), group=group
            )
    if is_finished:
        note(f"{run.directory} is finished: to train anew, change the recipe or the run folder")
        code = 0
    else:
        with Console(best=before.best) as console:
            code = train_until_signal(
                run, console.show, allow_import=allow_import, began=own_start(), probe=probe, group=group
            )
        print_verdict(run)
    told = [summarise(run)]
    print(tables.to_json(told) if json else tables.to_text(told))
    sys.stdout.flush()
    return code


def name_next(run: Run, code: int, *, image: Path | None = None) -> None:
    """Say what to type next: commands to copy, ``image`` in the one that wants some."""
    if code:
        note(f"saved; to go on, run the same command again ({run.directory})")
        return
    note("next:")
    place = shlex.quote(str(run.directory))
    shown = "IMAGE..." if image is None else shlex.quote(str(image))
    for words in (f"evaluate {place}", f"predict {place} {shown}", f"report {place} -o report.html"):
        note(f"  steady {words}")
