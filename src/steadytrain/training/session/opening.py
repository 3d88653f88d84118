"""The start of an attempt, stage by stage: device, images, network, state, work; together they are a session."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from steadytrain.config import Recipe, schedules
from steadytrain.config.figures import USUAL
from steadytrain.config.plain import build as build_part
from steadytrain.config.timeline import Timeline
from steadytrain.cost.bill import BillPart, make_bill, merge_parts, part_of, parts_from
from steadytrain.cost.prices import Price, known_price, to_dict
from steadytrain.data.loader import ImageLoader, Placement
from steadytrain.distributed.asynchronous.cluster import Cluster
from steadytrain.distributed.peers import Peers
from steadytrain.distributed.process_group import Group, ranks_of
from steadytrain.distributed.world import World
from steadytrain.errors import CheckpointError, RecipeError, RunError, SteadyError
from steadytrain.events import Compiled, Event, EventLog, FeedPlaced, Halved, Noticed, Saved
from steadytrain.format import Say
from steadytrain.models import Built, Input, first_epochs
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.clock import Clock
from steadytrain.training.compute.compile import RecordedWork, compile_update, record_update
from steadytrain.training.compute.recompute import recompute_parts
from steadytrain.training.compute.timing import pass_of, use_fastest_threads
from steadytrain.training.consensus import Alone, Together
from steadytrain.training.data import DataSets, OpenedData, data_sets, open_named, side_to_pack, validate_as_begun
from steadytrain.training.device import gpus_of_ranks, notice_change, prepare_device, set_up_machine, stay_near_gpu
from steadytrain.training.memory import PassLimit
from steadytrain.training.remarks import remarks
from steadytrain.training.session.saver import Saver
from steadytrain.training.session.session import Ending, Laps, Session, StartLedger, Validation, set_phase
from steadytrain.training.state import Cursor, State, misfit, preserve_buffers, preserve_process
from steadytrain.training.step import Share, Update, images_per_rank, share_of
from steadytrain.training.writer import Writer


@dataclass(frozen=True)
class _Attempt:
    """The input of every stage: the run, who trains it, and where seconds, notices and things to close go.

    ``recipe``: as the attempt computes it. ``allow_import``, ``opened`` and ``peers``, as ``group``, as of
    :func:`.loop.steps.run_steps`.
    """

    run: Run
    recipe: Recipe
    log: EventLog
    allow_import: bool | None
    peers: Peers | None
    opened: OpenedData | None
    start: StartLedger
    stack: ExitStack
    outbox: deque[Event] = field(default_factory=deque)

    @property
    def world(self) -> World:
        return World() if self.peers is None else self.peers.world

    @property
    def group(self) -> Group | None:
        """The ranks that wait for each other, if there are such."""
        return ranks_of(self.peers)

    def notice(self, line: str) -> None:
        """Keep a line for the user; a warning comes first."""
        event = Noticed(message=line)
        (self.outbox.appendleft if event.is_warning else self.outbox.append)(event)

    def place(self, placement: Placement) -> None:
        """Keep where the loader's threads are."""
        self.outbox.append(FeedPlaced(step=0, **vars(placement)))


@dataclass(frozen=True)
class _Place:
    """Stage 1: the device and the process, set up; ``machine``: facts, to which later stages add theirs.

    ``saved``: the newest checkpoint, None at the beginning of a run; ``before``: facts of the machine in it;
    ``sharing``: ranks on the same cores.
    """

    device: torch.device
    saved: dict[str, Any] | None
    before: dict[str, Any] | None
    machine: dict[str, Any]
    gpus: list[dict[str, Any]]
    sharing: int


@dataclass(frozen=True)
class _Images:
    """Stage 2: the data, open, and this rank's share of each batch."""

    data: DataSets
    share: Share


@dataclass(frozen=True)
class _Network:
    """Stage 3: the network and its input."""

    built: Built
    input: Input


@dataclass(frozen=True)
class _Progress:
    """Stage 4: the state, begun or resumed; ``waiting``: first epochs of parameters that are trained later, by name."""

    state: State
    waiting: Mapping[str, float]


@dataclass(frozen=True)
class _Work:
    """Stage 5: what gives batches, makes updates of them, times them and writes what they come to."""

    feed: ImageLoader
    validation: Validation | None
    test: Validation | None
    update: Update
    compiled: Compiled | None
    clock: Clock
    writer: Writer[Saved | None]


@contextmanager
def open_session(
    run: Run,
    log: EventLog,
    *,
    allow_import: bool | None,
    began: float | None = None,
    group: Peers | None = None,
    opened: OpenedData | None = None,
) -> Iterator[Session]:
    """Build the session of one attempt, resumed from the newest intact checkpoint; closes what it opened.

    The caller has locked the run. ``allow_import``, ``began``, ``group`` and ``opened`` as of
    :func:`.loop.steps.run_steps`.
    """
    began = time.perf_counter() if began is None else began
    process_began = time.time() - (time.perf_counter() - began)
    price = known_price(run.recipe.parallel.price)
    with ExitStack() as stack:
        attempt = _Attempt(run, run.recipe, log, allow_import, group, opened, StartLedger(began), stack)
        attempt.start.passed("process")
        # Workers beside the first take their weights from the server.
        is_joining = group is not None and group.joined_attempt is not None
        saved = None if is_joining else _newest_checkpoint(run, attempt.group, attempt.notice)
        attempt = replace(attempt, recipe=_recipe_after(run, saved, attempt.notice))
        recipe = attempt.recipe
        place = _set_up_device(attempt, saved)
        images = _open_images(attempt, place)
        network = _build_network(attempt, place, images)
        progress = _begin_or_resume(attempt, place, images, network)
        work = _prepare_update(attempt, place, images, network, progress)
        data, built, input, state = images.data, network.built, network.input, progress.state
        earlier = _earlier_parts(run, log, place.saved)
        started = msgspec.structs.replace(
            build.started(recipe, data, built, input, place.machine),
            digest=run.recipe.digest,  # whatever numbers this attempt computes in
            step=state.cursor.step,
            startup=attempt.start.seconds,
            startup_waits=attempt.start.waits,
            startup_disk_bytes=attempt.start.disk_bytes,
            began=process_began,
            price=None if price is None else _price_and_spent(price, earlier),
        )
        session = Session(
            run=run,
            recipe=recipe,
            data=data,
            built=built,
            input=input,
            timeline=Timeline(recipe, data.num_train),
            state=state,
            update=work.update,
            compiled=work.compiled,
            consensus=Alone() if attempt.group is None else Together(attempt.group),
            feed=work.feed,
            validation=work.validation,
            test=work.test,
            saver=Saver(
                run, work.writer, msgspec.structs.replace(started, attempt=log.attempt), earlier, began, state.engine
            ),
            clock=work.clock,
            laps=Laps(),
            started=started,
            outbox=attempt.outbox,
            first_epochs=progress.waiting,
            ending=Ending(
                began + 60 * (recipe.budget.minutes or math.inf) - _seconds_before(run, recipe),
                rates=recipe.every.rates,
            ),
        )
        yield session


def _recipe_after(run: Run, saved: dict[str, Any] | None, notice: Callable[[str], None]) -> Recipe:
    """Return the recipe by which an attempt goes on from a checkpoint, or begins.

    Raises:
        CheckpointError: the checkpoint is none of a run.
    """
    if saved is not None and (part := misfit(saved)):
        raise CheckpointError(
            f"the newest checkpoint in {run.checkpoints} is none of a run, though its checksums hold: {part!r} is"
            " missing or of another type; remove it"
        )
    step = 0 if saved is None else saved["cursor"]["step"]
    recipe = run.recipe.after(step)
    if recipe.precision.name != run.recipe.precision.name:
        notice(f"computed in fp32 from update {step + 1} on, not in {run.recipe.precision.name} (every.fp32)")
    return recipe


def _set_up_device(attempt: _Attempt, saved: dict[str, Any] | None) -> _Place:
    """Set up device and process, as the newest checkpoint was made with."""
    recipe, group, world = attempt.recipe, attempt.group, attempt.world
    before = None if saved is None else saved["about"]["machine"]
    device = prepare_device(recipe, world)
    if device.type == "cuda":
        attempt.start.passed("device")
    attempt.stack.enter_context(preserve_process(device))
    gpus = gpus_of_ranks(group, device)
    sharing = world.local_size if group is None else stay_near_gpu(group, device, attempt.stack, attempt.notice)
    machine = set_up_machine(recipe, device, before, attempt.notice, ranks=world.size, sharing=sharing)
    return _Place(device, saved, before, machine, gpus, sharing)


def _open_images(attempt: _Attempt, place: _Place) -> _Images:
    """Open the data, and find this rank's share of each batch."""
    recipe, peers, world = attempt.recipe, attempt.peers, attempt.world
    data = _open_data(attempt)
    if isinstance(peers, Cluster):
        peers.describe({"recipe": attempt.run.recipe.digest, "set of images": data.train.digest}, attempt.log.attempt)
    is_together = recipe.parallel.engine != "async"
    sharers = world if is_together else World()
    begun_with = place.before or _begun_with(attempt.run, recipe, sharers, attempt.group)
    share = own_share(recipe, sharers, begun_with, attempt.notice)
    place.machine["micro_batches"] = share.micro_batches
    if place.gpus:
        place.machine["gpus"] = place.gpus
    if peers is not None:
        place.machine.update(peers.facts)
    if world.size > 1 and is_together:
        place.machine["images_per_rank"] = images_per_rank(share, world.size)
    build.require_schedule(recipe, data.num_train)
    attempt.start.passed_data(None if attempt.opened is None else attempt.opened.cost)
    return _Images(data, share)


def _build_network(attempt: _Attempt, place: _Place, images: _Images) -> _Network:
    """Build the network, with the preprocessing that its run was begun with."""
    recipe, data, rank = attempt.recipe, images.data, attempt.world.rank
    torch.manual_seed(recipe.seed)
    allow_import = attempt.allow_import
    allow_import = "name" not in recipe.model.from_file if allow_import is None else allow_import
    on_meta = build.model_on_meta(recipe, data, allow_import=allow_import) if rank and recipe.parallel.shard else None
    built, input = on_meta or build.model(recipe, data, allow_import=allow_import)  # values: the first rank's
    begun = None if place.saved is None else _begun_input(attempt.run, attempt.log, attempt.group)
    if begun is not None and begun != input:  # as under a name of timm's that meant another preprocessing
        attempt.notice(_kept_input_notice(begun, input, built.name))
        if begun.size != input.size:
            sized = recipe.with_({"data.size": begun.size})
            built, _ = build.model(sized, data, allow_import=allow_import)
        input = begun
    if rank:
        torch.manual_seed(recipe.seed + rank)  # the same weights as the others, but dropout of its own
    attempt.start.passed("model")
    return _Network(built, input)


def _begin_or_resume(attempt: _Attempt, place: _Place, images: _Images, network: _Network) -> _Progress:
    """Make the state of a run that begins, or that of the checkpoint."""
    recipe, allow_import = attempt.recipe, attempt.allow_import
    data, built, input, num_train = images.data, network.built, network.input, images.data.num_train
    engine = build.engine(recipe, place.device, attempt.peers, num_train=num_train)
    saved, tries = place.saved, recipe.every.tries
    begins_again = saved is not None and bool(tries) and tries[-1][0] == saved["cursor"]["step"]
    if begins_again:
        built.module.load_state_dict(checkpoints.read_weights(attempt.run.probe_weights)[0])
    state = build.state(recipe, built, engine, num_train=num_train, allow_import=allow_import, input=input)
    if saved is not None and begins_again:
        fresh, parts = state.state_dict(), ("model", "optimizer", "ema", "policy", "engine", "meters")
        saved |= {name: fresh[name] for name in parts} | {"misses": 0}
    if saved is None:
        on_start = remarks(recipe, built, input, data, parts=images.share.micro_batches)
        for note in (*built.notes, *state.policy.notes, *on_start):
            attempt.notice(note)
    else:
        _resume(state, saved, attempt.run, data, attempt.notice)
    _set_figure(state, recipe, saved or {}, data, attempt.notice)
    if (step := engine.joined_step) is not None:  # the others have trained on
        state.cursor = Cursor(step, step * recipe.batch_size)
        if step < recipe.batches(num_train).steps:  # its own running statistics are to settle first
            state.evaluated = max(state.evaluated, state.cursor.position / num_train)
    waiting = first_epochs(built, recipe.model.train, epochs=Timeline(recipe, num_train).epochs)
    if waiting:
        set_phase(recipe, built, waiting, state.cursor.position / num_train)
    return _Progress(state, waiting)


def _prepare_update(attempt: _Attempt, place: _Place, images: _Images, network: _Network, progress: _Progress) -> _Work:
    """Open the loaders, make the update, and choose how it is computed: recomputing, threads, compiling, a graph."""
    recipe, group, notice, start = attempt.recipe, attempt.group, attempt.notice, attempt.start
    data, state, share, input = images.data, progress.state, images.share, network.input
    feed, *others = build.feeds(recipe, data, input, state, share, notice, attempt.place, sharing=place.sharing)
    for loader in filter(None, (feed, *others)):
        attempt.stack.callback(loader.close)
    place.machine["feed_threads"] = feed.task.num_threads
    writer: Writer[Saved | None] = Writer(place.device)
    attempt.stack.callback(writer.close)
    clock = build.clock(place.device, start.began)
    loss = build.loss(recipe, data, place.device, allow_import=attempt.allow_import)
    update = build.update(
        recipe,
        network.built,
        build.training_input(recipe, input, data.num_train, state.cursor.position),
        state,
        clock,
        share,
        data=data,
        loss=loss,
        allow_import=attempt.allow_import,
        limit=PassLimit(
            "update",
            attempt.outbox.append,
            _images_at_once(attempt.run, group),
            mode="halve" if group is None else "restart",
        ),
    )
    start.passed("state")
    if recompute_parts(recipe, update, state, notice) is not None:
        start.passed("recompute")
    with clock.within("warmup"):
        if group is not None:
            _agree_on_passes(update, state, group)
        if place.saved is None and attempt.peers is None:
            place.machine.update(use_fastest_threads(recipe, update, state, notice))
            start.passed("threads")
        update, compiled = compile_update(recipe, update, state, group, notice)
        if recipe.precision.compile != "none":
            place.machine.update({} if compiled is None else {"compile": compiled.mode})
            start.passed("compile")
    update = record_update(recipe, update, state, group, notice)
    if isinstance(update.work, RecordedWork):
        attempt.stack.callback(update.work.close)
    notice_change(place.before, place.machine, "compile", notice)
    limit = PassLimit("evaluation", attempt.outbox.append, mode="fixed" if state.engine.is_sharded else "halve")
    validation, test = (None if loader is None else Validation(loader, limit) for loader in others)
    return _Work(feed, validation, test, update, compiled, clock, writer)


def _price_and_spent(price: Price, earlier: Sequence[BillPart]) -> dict[str, Any]:
    """Return a price, with what the attempts before cost in its currency."""
    same = [part for part in earlier if part.price is not None and part.price.currency == price.currency]
    bill = make_bill(same)
    return {**to_dict(price), "spent": bill.so_far if bill else 0.0}


def _earlier_parts(run: Run, log: EventLog, saved: dict[str, Any] | None) -> list[BillPart]:
    """Return what the attempts before this one used, as the checkpoint and the events tell."""
    saved_parts: list[dict[str, Any]] = []
    with suppress(ValueError, RecursionError):  # it says only what the run has cost
        saved_parts = json.loads(saved["about"].get("spent", "[]")) if saved else []
    spans = [span for attempt, span in run.progress().spans.items() if attempt < log.attempt]
    logged = [part_of(started, seconds=seconds) for started, seconds in spans]
    return merge_parts(parts_from(saved_parts), logged)


def _begun_input(run: Run, log: EventLog, group: Group | None) -> Input | None:
    """Return the preprocessing of the attempt before, which the weights have learned; None where it is not known."""
    earlier = [started for attempt, (started, _) in sorted(run.progress().spans.items()) if attempt < log.attempt]
    values = earlier[-1].model.get("input") if earlier else None
    if group is not None:
        values = group.all_gather_json(values)[0]
    return build_part(Input, values) if values else None


def _kept_input_notice(begun: Input, now: Input, name: str) -> str:
    """Say in what the preprocessing that a run began with differs from the one that a new run would have."""
    words = []
    for key, value in vars(begun).items():
        if value != (other := getattr(now, key)):
            old, new = (" ".join(f"{v:g}" for v in x) if isinstance(x, tuple) else f"{x}" for x in (value, other))
            words.append(f"{key} {old}, not {new}")
    return (
        f"images are prepared as when this run began ({'; '.join(words)}), though {name} has others by now: a new run"
        " takes these"
    )


def _images_at_once(run: Run, group: Group | None) -> int | None:
    """Return how many images the memory had room for in updates before, on the rank with the least; None: for all."""
    if group is None:
        return run.progress().images_at_once
    halved = [event.images for event in run.events(group.world.rank) if isinstance(event, Halved)]
    return min(filter(None, group.all_gather_json(min(halved, default=None))), default=None)


def _agree_on_passes(update: Update, state: State, group: Group) -> None:
    """Find by a pass over drawn images, before the first update, how many of them each rank has memory for.

    Nothing is exchanged in such a pass, so no rank waits for one whose memory runs out. It leaves no trace, and has
    room beside it for what most optimizers keep: two numbers for each parameter. Batch norms that wait for those of
    other ranks cannot be tried.

    Raises:
        RankLostError: another rank has no memory for one image; FailedError: this one has not.
    """
    limit, size = update.limit, update.share.size
    assert limit is not None
    device, limit_here = state.engine.device, replace(limit, mode="halve")
    is_synchronous = any(type(part).__name__.startswith("Synchronous") for part in state.module.modules())
    has_own_pass = not (is_synchronous or state.engine.is_sharded)
    with group.all_or_none(), preserve_process(device), preserve_buffers(state.module):
        if has_own_pass:
            num_moments = 0 if state.optimizer.state else 2
            spare = [torch.empty_like(parameter) for parameter in update.parameters for _ in range(num_moments)]
            alone = replace(update, call=state.module)
            limit_here.fit(lambda at_once: pass_of(alone, state, at_once).seconds(), size)
            del spare
    limit.images = limit_here.images
    least = min(group.all_gather_json(limit_here.at_once(size)))
    if least < limit.at_once(size):
        limit.agree(least)


def _seconds_before(run: Run, recipe: Recipe) -> float:
    """Seconds of all attempts before this one, as their events tell; 0 where the recipe sets no time."""
    return sum(seconds for _, seconds in run.progress().spans.values()) if recipe.budget.minutes else 0.0


def own_share(recipe: Recipe, world: World, before: dict[str, Any] | None, notice: Callable[[str], None]) -> Share:
    """The part of each batch that is this rank's; ``before``: facts of the machine in the checkpoint, if any."""
    count = (before or {}).get("micro_batches")
    waiting = {"model.batch_norm=synchronous": recipe.model.batch_norm == "synchronous"}
    waiting["parallel.shard"] = recipe.parallel.shard
    even_for = next((key for key, waits in waiting.items() if waits), "")
    share = share_of(world, recipe.batch_size, recipe.optim.accumulate, count, even_for=even_for)
    if count not in (None, share.micro_batches):
        notice(
            f"an update had {count} micro-batches, fewer than there are ranks, and has {share.micro_batches}:"
            " batch norms see smaller ones from here on"
        )
    return share


def _begun_with(run: Run, recipe: Recipe, world: World, group: Group | None) -> dict[str, Any] | None:
    """Return the micro-batches that a run without a checkpoint was begun with, if its batch does not suit these ranks.

    The batch is that of the ranks that began it, and those of now share its micro-batches as after a checkpoint.
    """
    if recipe.batch_size % (recipe.optim.accumulate * world.size) == 0:
        return None
    started = run.progress().started if world.is_first else None
    count = None if started is None else started.machine.get("micro_batches")
    return {"micro_batches": count if group is None else group.all_gather_json(count)[0]}


def _newest_checkpoint(run: Run, group: Group | None, notice: Callable[[str], None]) -> dict[str, Any] | None:
    """Load the newest intact checkpoint; of several ranks the first reads it, and sends it to the others.

    Where each rank has a part of the parameters, those of others are meta tensors: the engine sends what they need.
    """
    saved = None
    with nullcontext() if group is None else group.all_or_none():
        is_saving = group is None or group.world.is_first
        if is_saving:
            checkpoints.remove_unfinished(run.checkpoints)
        if is_saving and (place := checkpoints.newest(run.checkpoints, notice)):
            saved = checkpoints.load(place)
            _require_best(run, saved, notice)
            checkpoints.remove_old(place, run.recipe.every.keep)  # where a kill came before that was done
    if group is None:
        return saved
    plain, tensors = (None, {}) if saved is None else checkpoints.split(saved)
    waits = ("/model/", "/optimizer/", "/ema/") if run.recipe.parallel.shard else ()
    later = {name: tensor for name, tensor in tensors.items() if name.startswith(waits)}
    shapes = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in later.items()}
    others = {name: tensor for name, tensor in tensors.items() if name not in later}
    (plain, shapes), others = group.broadcast([plain, shapes], others)
    metas = {n: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for n, (shape, dtype) in shapes.items()}
    return None if plain is None else checkpoints.join(plain, metas | later | others)


def _require_best(run: Run, saved: dict[str, Any], notice: Callable[[str], None]) -> None:
    """Have the best weights chosen again where their file is damaged, or of updates after the checkpoint.

    These updates are made again, on some devices to other bits: the evaluation of then is the first that may count.
    """
    path = run.directory / "best.safetensors"
    try:
        if path.exists() and not misfit(saved):
            step = checkpoints.read_weights(path)[1].get("step")
            saved["lost_best"] = step if isinstance(step, int) and step > saved["cursor"]["step"] else 0
    except SteadyError:
        notice(f"{path} is damaged: the best weights are chosen again, from here on")
        saved["best"] = -math.inf


def _open_data(attempt: _Attempt) -> DataSets:
    """Take the data that the command has opened, if they are this run's, or open them.

    Of several ranks the first of each machine comes first, since it may have to pack them.
    """
    named, model, notice, group = attempt.run.data, attempt.recipe.model, attempt.notice, attempt.group
    begun = attempt.run.progress().started

    def open_here() -> DataSets:
        opened = attempt.opened
        if opened is None or not opened.suits(named, side_to_pack(named, model, begun)):
            opened = open_named(named, model, begun=begun, say=notice)
            attempt.stack.callback(opened.close)
        opened = validate_as_begun(opened, begun)
        data = data_sets(opened, named, seed=attempt.recipe.seed, run=attempt.run, say=notice)
        for records in filter(None, (data.train, data.val, data.test)):
            records.digest  # noqa: B018 - it is kept; a file without a card is read whole for it
        return data

    if group is None:
        return open_here()
    data = group.run_first_then_rest(open_here, is_first=group.world.is_local_first)
    about = data.about()
    parts = ("train_digest", "val_digest", "test_digest", "split")
    group.require_same("other images", [about.get(part) for part in parts])
    return data


def _resume(state: State, saved: dict[str, Any], run: Run, data: DataSets, notice: Callable[[str], None]) -> None:
    """Load what was saved by the same recipe on the same data. Raises RunError where it was by others."""
    about, recipe = saved["about"], run.recipe
    if about["digest"] != recipe.digest:
        raise RunError(
            f"the checkpoint belongs to a run of another recipe (model {about['model']}, digest {about['digest']};"
            f" this run: {recipe.model.name}, {recipe.digest}): remove it, or use the run folder that it came from"
        )
    if about["train_digest"] != data.train.digest:
        started = run.progress().started
        before = started.data.get("num_train") if started is not None else None
        counts = f"{data.num_train:,} training images" + (f", were {before:,}" if before is not None else "")
        raise RunError(
            f"{recipe.data.train} has changed since this run was started ({counts}; digest {data.train.digest[:12]},"
            f" was {str(about['train_digest'])[:12]}): choose another --run folder, put the old data back, or, after an"
            " update of steadytrain, resume with the old version"
        )
    state.load_state_dict(saved)
    if about.get("val_digest") != data.about()["val_digest"]:
        notice("the validation data have changed since this run began: the best weights are chosen again")
        _choose_again(state)


def _choose_again(state: State) -> None:
    """Forget what earlier evaluations came to: those to come are not compared with them."""
    state.best, state.best_loss, state.misses, state.probe = -math.inf, math.inf, 0, None
    state.plateau = schedules.Plateau(drops=state.plateau.drops)


def _set_figure(state: State, recipe: Recipe, saved: Mapping[str, Any], data: DataSets, notice: Say) -> None:
    """Set the figure that chooses the best weights: that which a run began with, unless another is asked for."""
    asked, is_multi_label = recipe.every.best or USUAL, data.num_labels is not None
    if asked == "top5" and (is_multi_label or len(data.classes) <= 5):
        raise RecipeError(
            "every.best is 'top5', which is 100 % for five classes or fewer and not known of several labels: take top1"
        )
    if asked == "auc" and data.val is not None:
        labels = data.val.labels if data.val_ids is None else data.val.labels[data.val_ids]
        if len(np.unique(labels, axis=0)) < 2:
            raise RecipeError("every.best is 'auc', and all validation images are of the same class: take loss")
    state.figure = chosen = "map" if is_multi_label and asked in (USUAL, "top1") else asked
    if saved:  # by an older version, if it does not say
        state.figure = saved.get("figure") or ("map" if is_multi_label else "top1")
    if recipe.every.best and state.figure != chosen:
        notice(f"the best weights are chosen by {chosen} from here on, no longer by {state.figure}")
        state.figure = chosen
        _choose_again(state)
