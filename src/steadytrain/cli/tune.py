"""``steady tune``: how this recipe is trained fastest here, by measuring."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, status
from steadytrain.cli.options import Json, RepeatedFlag, SizeFlag, TrainingOptions, require_alone
from steadytrain.errors import InputError
from steadytrain.files import replace_file
from steadytrain.machine.process import own_start, spin_where_alone

MOST_MINUTES = 24 * 60


def tune(
    data: Annotated[
        str | None, Parameter(help="A .rec file, a folder of classes, or any other source that steady pack reads.")
    ] = None,
    /,
    *,
    model: Annotated[str | None, Parameter(name=("--model", "--network"))] = None,
    minutes: Annotated[float, Parameter(validator=Number(gt=0, lte=MOST_MINUTES))] = 2.0,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("tuned.toml"),
    again: bool = False,
    finetune: bool = False,
    val: Annotated[str | None, Parameter(name=("--val", "--data-val"))] = None,
    batch_size: Annotated[int | None, Parameter(name=("--batch-size", "-b"))] = None,
    epochs: Annotated[float | None, Parameter(name=("--epochs", "--num-epochs"))] = None,
    size: SizeFlag = None,
    device: str | None = None,
    recipe: Path | None = None,
    set: RepeatedFlag = (),
    force: bool = False,
    json: Json = False,
) -> int:
    """Measure how this model trains fastest on these images and this machine, and write a recipe with the reasons.

    It chooses the batch at the knee of the throughput curve, the number format, the loader's threads and whether to
    compile. It scales the learning rate. Each measurement runs in its own process; one that runs out of memory, crashes
    or takes too long is recorded. Measurements are kept, so the same command resumes after Ctrl-C.

    It keeps what you choose yourself, such as --batch-size. It tunes one process: steady scale predicts several.

    Args:
        model: timm/NAME, a built-in such as resnet20, or pkg.mod:factory (default: that of steady train).
        minutes: How long it may take.
        output: The recipe file to write.
        again: Repeat measurements that were made before.
        finetune: Begin with the defaults of steady finetune instead of those of steady train.
        val: Validation data, as of steady train.
        batch_size: Images for each update, kept as given (default: the knee).
        epochs: Passes over the training data, within which compiling must pay off.
        size: Side of the square input, in pixels.
        device: auto, cpu, cuda or cuda:1.
        recipe: A recipe file to begin with: .toml, .json or .yaml. What it says is kept.
        set: Any other value of the recipe, which is kept: --set precision.name=fp32.
        force: Replace the output even if it is no tuned recipe.

    Examples:
        steady tune photos/ --model timm/resnet18
        steady tune cifar10-train.rec --model resnet20 --minutes 1 -o tuned.toml
        steady tune photos/ --model timm/resnet18 --json > tuning.json
    """
    if output.suffix.lower() != ".toml":
        raise InputError(f"--output is {output}: a recipe with comments ends in .toml")
    require_alone("steady tune")
    _require_replaceable(output, force=force)
    began = own_start() or time.perf_counter()
    flags = {"model": model, "val": val, "batch_size": batch_size, "epochs": epochs, "size": size, "device": device}
    options = TrainingOptions(flags=flags, recipe=recipe, set=set)
    spin_where_alone()
    from steadytrain.cli.train import num_procs, recipe_for, require_device
    from steadytrain.tuning import report
    from steadytrain.tuning.probes import Prober
    from steadytrain.tuning.tune import tune as search

    if num_procs(data, options) > 1:
        raise InputError(
            "the recipe is for several ranks, and one process is tuned: name one device and leave out parallel.procs"
            " (--set parallel.procs=none); steady scale predicts several"
        )
    require_device(options)
    with Prober() as prober:  # imports torch while this process does
        draft = recipe_for(data, options, finetune=finetune)
        packed = time.perf_counter()
        began = max(began, packed - 30.0)  # packing the images once is no part of the search
        with status("measuring"):
            tuned = search(
                draft,
                prober=prober,
                seconds=60 * minutes,
                chosen=options.chosen,
                again=again,
                began=began,
                say=lambda trial: note(report.trial_text(trial)),
            )
    replace_file(output, report.recipe_file(tuned, finetune=finetune, name=str(output)))
    if json:
        print_json(report.document(tuned))
    else:
        print_text(report.table(tuned, min(100, shutil.get_terminal_size().columns)))
        note(f"wrote {output}: steady {'finetune' if finetune else 'train'} --recipe {output}")
    return 0


def _require_replaceable(output: Path, *, force: bool) -> None:
    """Refuse to replace a file that is no tuned recipe, or to write into no folder. Raises InputError."""
    if not output.absolute().parent.is_dir():
        raise InputError(f"the folder {output.parent} does not exist: make it, or choose another -o")
    if force or not output.exists():
        return
    if output.is_dir():
        raise InputError(f"{output} is a folder: name a file for the recipe (-o tuned.toml)")
    first = output.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    if " tuned for " not in first:
        raise InputError(f"{output} exists and is no tuned recipe: choose another -o, or --force replaces it")
