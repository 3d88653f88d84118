"""The kinds of events: each a frozen struct whose fields are the JSON fields of its line, and whose annotations are
the check of it.

A log may be damaged, edited or a stranger's. What is decoded by an annotation holds it: a number is one that can be
computed and printed with, and a table has its keys. What each field means stands in docs/events.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import stdev
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from steadytrain.config.batches import Batches, BatchStage
from steadytrain.config.figures import SIGN
from steadytrain.format import clock, count, duration, epoch, number, percent
from steadytrain.intervals import Interval, wilson

VERSION = 1

MOST = 10**18
"""Numbers beyond it are no seconds, bytes, images or rates."""

LAST_TIME = 253_000_000_000.0
"""Seconds since 1970 that a calendar has a date for: the year 9987."""

MOST_DEPTH = 12
"""Tables and lists within each other; the deepest of ours has four."""

Whole = Annotated[int, Meta(ge=0, lt=MOST)]
Finite = Annotated[float, Meta(gt=-MOST, lt=MOST)]
"""A number of seconds, bytes or images a second. What a diverged run measured is a bare ``float``, NaN included."""
Positive = Annotated[int, Meta(gt=0, lt=MOST)]
Time = Annotated[float, Meta(ge=0, le=LAST_TIME)]
"""Seconds since 1970."""


class DataKeys(TypedDict):
    """Keys of ``Started.data`` that readers compute with."""

    train: NotRequired[str]
    val: NotRequired[str | None]
    num_train: NotRequired[Whole]
    num_val: NotRequired[Whole | None]
    classes: NotRequired[Sequence[str]]
    class_counts: NotRequired[Sequence[Whole]]
    channels: NotRequired[Whole]
    largest_side: NotRequired[Whole]
    num_test: NotRequired[Whole]
    class_ratio: NotRequired[Finite]
    shorter_side: NotRequired[Whole | None]
    restart_markers: NotRequired[bool]
    num_rejected: NotRequired[Whole]
    rejected: NotRequired[Sequence[tuple[str, str]]]


class ModelKeys(TypedDict):
    """Keys of ``Started.model`` that readers compute with."""

    name: NotRequired[str]
    parameters: NotRequired[Whole]
    trainable: NotRequired[Whole]
    size: NotRequired[Whole]
    unseen: NotRequired[Finite]


class MachineKeys(TypedDict):
    """Keys of ``Started.machine`` that readers compute with."""

    device: NotRequired[str]
    compute_threads: NotRequired[Whole | None]
    cores: NotRequired[Whole]
    host: NotRequired[str]
    precision: NotRequired[str]
    ranks: NotRequired[Whole]
    images_per_rank: NotRequired[Sequence[Whole] | None]
    hosts: NotRequired[Sequence[str] | None]
    servers: NotRequired[Sequence[str] | None]
    micro_batches: NotRequired[Whole | None]
    out_of_memory_kills: NotRequired[Whole | None]


class PriceKeys(TypedDict):
    """Keys of ``Started.price``."""

    per_hour: Finite
    currency: str
    name: NotRequired[str]
    date: NotRequired[str]
    spent: Finite


class RanKeys(TypedDict):
    """Seconds of threads on a processor, and ready to run without one."""

    ran: Finite
    queued: Finite


class BucketKeys(TypedDict):
    """A value of ``ThreadStats.loop``."""

    seconds: Finite
    ran: NotRequired[Finite]
    queued: NotRequired[Finite]
    stopped: NotRequired[Finite]


class ThreadPlaceKeys(TypedDict):
    """An entry of ``ThreadStats.places``."""

    bucket: str
    what: str
    seconds: Finite
    place: str


class OtherThreadKeys(TypedDict):
    """An entry of ``ThreadStats.others``."""

    name: str
    ran: Finite
    place: str


class OtherProcessKeys(TypedDict):
    """An entry of ``other_processes``."""

    pid: NotRequired[Whole]
    name: NotRequired[str]
    user: NotRequired[str | None]
    cores: NotRequired[Finite]
    disk_bytes: NotRequired[Finite | None]
    memory_bytes: NotRequired[Finite | None]


class ServerCallKeys(TypedDict):
    """An entry of ``ServerStats.servers``."""

    seconds: Finite
    update_seconds: Finite
    pushed_bytes: Finite
    pulled_bytes: Finite


def is_plain(value: object, depth: int = MOST_DEPTH) -> bool:
    """Return whether a value is JSON of a sane depth whose numbers are finite."""
    if isinstance(value, str | bool | None):
        return True
    if isinstance(value, int | float):
        return -MOST < value < MOST
    if not depth or not isinstance(value, dict | list | tuple):
        return False
    return all(is_plain(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The base of every event: its time, the attempt and the rank.

    ``attempt`` counts the starts of the run: 1, after one restart 2, ...; 0 marks measurements made while nobody
    trained.
    """

    time: Time = 0.0
    attempt: Whole = 0
    rank: Whole = 0

    @property
    def kind(self) -> str:
        """The event's type by name, as in the file."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this event's line."""
        return {"v": VERSION, "kind": self.kind, **msgspec.structs.asdict(self)}


class Unknown(Event, frozen=True, kw_only=True):
    """An event of a kind that this version does not know; ``document`` is its whole JSON object."""

    name: str
    document: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.name

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)


class Unreadable(Event, frozen=True, kw_only=True):
    """A line in the middle of a log that is no JSON object; never written."""


class Started(Event, frozen=True, kw_only=True):
    """The beginning of an attempt: ``steps`` of the whole run; ``step`` where it goes on from (0 at first)."""

    digest: str
    step: Whole
    steps: Whole
    steps_per_epoch: Annotated[float, Meta(ge=0, lt=MOST)]
    batch_size: Positive
    growth: Sequence[tuple[Whole, Whole, Positive]] = []
    data: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    machine: Mapping[str, Any] = {}
    startup: Mapping[str, Finite] = {}
    startup_waits: Mapping[str, Finite] = {}
    startup_disk_bytes: Whole | None = None
    began: Time = 0.0
    price: Mapping[str, Any] | None = None

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several labels: evaluations are then ranked by mAP."""
        return self.data.get("multi_label") is True

    @property
    def batches(self) -> Batches:
        """The images of each update."""
        grown = [BatchStage(*row) for row in self.growth]
        return Batches((BatchStage(0, 0, self.batch_size), *grown), self.steps)

    @property
    def is_sound(self) -> bool:
        """Return whether its tables hold what readers compute with, and the stages of its batch follow each other."""
        tables = [(self.data, DataKeys), (self.model, ModelKeys), (self.machine, MachineKeys)]
        tables += [] if self.price is None else [(self.price, PriceKeys)]
        try:
            for table, keys in tables:
                msgspec.convert(table, keys)
        except msgspec.ValidationError:
            return False
        rows = [(0, 0, self.batch_size), *self.growth]
        rising = all(row[0] <= other[0] and row[1] <= other[1] for row, other in pairwise(rows))
        return rising and all(is_plain(table) for table, _ in tables)


class Resumed(Event, frozen=True, kw_only=True):
    """The cost of going on where an earlier attempt ended, from the checkpoint of ``step``."""

    step: Whole
    images_repeated: Whole
    seconds_away: Finite
    ranks_before: Whole
    ranks: Whole


class ProbeProgress(Event, frozen=True, kw_only=True):
    """The progress of a probe, which fits the classifier to features of the frozen network before the first update."""

    step: Whole
    images: Whole
    total: Whole
    seconds: Finite = 0.0
    wait_seconds: Finite = 0.0
    reused: Whole = 0
    feed: Mapping[str, Finite | None] = {}
    fit_seconds: Finite | None = None
    features: Whole | None = None
    penalty: Finite | None = None
    top1: float | None = None
    by_fold: Sequence[float] = []
    fold_top1: float | None = None
    fold_loss: Finite | None = None
    fold_loss_error: Finite | None = None
    series: str = ""

    @property
    def images_per_second(self) -> float | None:
        """The rate through the network; None before the first batch."""
        sent = self.images - self.reused
        return sent / self.seconds if sent > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until all images have gone through the network; None where that is not known, or is done."""
        left, speed = self.total - self.images, self.images_per_second
        return left / speed if left > 0 and speed else None

    @property
    def words(self) -> str:
        """Describe how far it is.

        >>> ProbeProgress(step=0, images=412, total=794, seconds=41.2).words
        'features: 412 of 794 images, 10 images/s'
        >>> ProbeProgress(step=0, images=794, total=794, seconds=81.2, fit_seconds=24.1).words
        'features of 794 images in 1 min 21 s, classifier fitted in 24.1 s'
        """
        if self.fit_seconds is not None:
            fitted = f"classifier fitted in {duration(self.fit_seconds)}"
            cached = f" ({self.reused:,} from the cache)" if self.reused else ""
            folds = f"; {self.fold_words}" if self.by_fold else ""
            return f"features of {count(self.total, 'image')}{cached} in {duration(self.seconds)}, {fitted}{folds}"
        if self.images >= self.total:
            return "fitting the classifier"
        speed = f", {number(self.images_per_second)} images/s" if self.images else ""
        return f"features: {self.images:,} of {count(self.total, 'image')}{speed}"

    @property
    def fold_words(self) -> str:
        """Describe the answers of all folds: their mean, and how much the folds differ.

        >>> words = ProbeProgress(step=0, images=9, total=9, by_fold=[0.8, 0.9], fold_top1=0.85, fold_loss=0.5)
        >>> words.fold_words
        '2 folds: top-1 85.0 %, by fold 80.0 to 90.0 % (deviation 7.07)'
        """
        low, high = (percent(share, 1) for share in (min(self.by_fold), max(self.by_fold)))
        spread = f"by fold {low.removesuffix(' %')} to {high} (deviation {100 * stdev(self.by_fold):.2f})"
        return f"{len(self.by_fold)} folds: top-1 {percent(self.fold_top1, 1)}, {spread}"

    @property
    def bar(self) -> tuple[float, str]:
        """The share of the images that is done, and while it goes on the words with the time left."""
        left = "" if self.seconds_left is None else f", {clock(self.seconds_left)} left"
        return self.images / max(1, self.total), self.words + left


class Step(Event, frozen=True, kw_only=True):
    """One update, host facts only (no device value, which would have to be waited for). ``step`` counts from 1."""

    step: Whole
    position: Whole
    n: Whole
    seconds: Finite
    wait_seconds: Finite
    lr: Finite


class Logged(Event, frozen=True, kw_only=True):
    """Device values averaged since the line before, and rates."""

    step: Whole
    epoch: Finite
    loss: float
    top1: float
    lr: float
    images_per_second: float
    wait_share: float
    grad_norm: float | None = None


class EpochTrained(Event, frozen=True, kw_only=True):
    """Device values averaged over the ``n`` images of the updates of one epoch, counted from 1, up to ``step``.

    A run that stops within an epoch tells of it so far, and again when it has ended.
    """

    step: Whole
    epoch: Whole
    n: Whole
    loss: float
    top1: float
    images_per_second: float


class Score(Event, frozen=True, kw_only=True):
    """Base of evaluations: a pass over a whole data set, of ``n`` images.

    ``mean_ap`` is the main number where an image may have several labels, else None.
    """

    step: Whole
    epoch: Finite
    n: Whole
    loss: float
    top1: float
    top5: float | None
    seconds: Finite
    weights: str = "model"
    mean_ap: float | None = None
    macro_recall: float | None = None
    macro_f1: float | None = None
    effective_n: Finite | None = None


class Evaluated(Score, frozen=True, kw_only=True):
    """An evaluation on the validation images."""

    figure: str | None = None
    figure_value: float | None = None
    is_best: bool | None = None
    even_top1: float | None = None
    even_macro_recall: float | None = None
    loss_error: float | None = None

    @property
    def score(self) -> float:
        """The main number: top-1; of several labels, mAP."""
        return self.top1 if self.mean_ap is None else self.mean_ap

    @property
    def goodness(self) -> float:
        """The number by which evaluations compare, by the figure that chooses: the highest is the best."""
        if self.figure not in SIGN:
            return self.score
        return math.nan if self.figure_value is None else SIGN[self.figure] * self.figure_value

    def replaces(self, best: Evaluated | None) -> bool:
        """Return whether this evaluation is the best so far, where ``best`` was before it; never true of a NaN."""
        return self.score > (best.score if best else -1.0) if self.is_best is None else self.is_best


class Tested(Score, frozen=True, kw_only=True):
    """The evaluation of a run's best weights on the test images, which no choice has seen: once, at its end.

    ``step`` and ``epoch`` are those of the weights.
    """

    even_top1: float | None = None
    even_macro_recall: float | None = None
    data: str = ""
    before: Whole = 0
    num_seen: Whole = 0

    @property
    def seen(self) -> str:
        """Say what the run has seen of the images."""
        if self.num_seen:
            return f"{self.num_seen:,} of whose {self.n:,} images were trained on or validated"
        return f"evaluated {self.before + 1} times in this run" if self.before else "which no choice has seen"


def top1_95(event: Score) -> Interval:
    """Return the 95 % interval of top-1: of so many images, or of as many as those in groups are worth."""
    return wilson(event.top1, event.effective_n or event.n)


class Tried(Event, frozen=True, kw_only=True):
    """One way to a better model that a run has tried, and what came of it."""

    step: Whole
    what: Literal["features", "updates"]
    model: str
    size: Whole
    loss: float
    top1: float
    seconds: Finite
    verdict: str
    loss_error: float | None = None
    lr: Finite | None = None
    epochs: Finite | None = None
    fit: str | None = None

    @property
    def words(self) -> str:
        """Describe it in a line.

        >>> Tried(step=0, what="features", model="a", size=96, loss=0.5, top1=0.8, seconds=9, verdict="chosen").words
        'a at 96 pixels, a probe by folds: loss 0.5000, top-1 80.0 %, 9 s: chosen'
        """
        how = "a probe by folds" if self.what == "features" else f"{epoch(self.epochs or 0.0)} epochs at {self.lr:g}"
        error = "" if self.loss_error is None else f" ± {self.loss_error:.4f}"
        figures = f"loss {self.loss:.4f}{error}, top-1 {percent(self.top1, 1)}, {duration(self.seconds)}"
        fit = f" ({self.fit})" if self.fit else ""
        return f"{self.model} at {self.size} pixels{fit}, {how}: {figures}{f': {self.verdict}' if self.verdict else ''}"


class Saved(Event, frozen=True, kw_only=True):
    """A checkpoint on disk, whole and checksummed."""

    step: Whole
    path: str
    bytes: Whole
    seconds: Finite
    paused_seconds: Finite | None = None
    cpu_seconds: Finite | None = None
    began: Finite = 0.0

    @property
    def pause(self) -> float:
        """Seconds that training paused for it: all, in logs of versions that wrote none in a thread."""
        return self.seconds if self.paused_seconds is None else self.paused_seconds

    @property
    def cost(self) -> float:
        """Seconds that it took from training: the pause, and the time of a processor that may have been needed."""
        return self.pause + (self.cpu_seconds or 0.0)


class Steered(Event, frozen=True, kw_only=True):
    """A decision of the program that trains, by an event before: from update ``step`` on."""

    step: Whole
    what: Literal["rate", "stop"]
    times: Finite
    why: str = ""


class Noticed(Event, frozen=True, kw_only=True):
    """A notice that belongs to the run, such as a damaged checkpoint; a warning's message begins with that word."""

    message: str
    step: Whole = 0

    @property
    def is_warning(self) -> bool:
        """Return whether a user should act on it: it comes first, and stays where notices are left out."""
        return self.message.startswith("warning:")


class Halved(Noticed, frozen=True, kw_only=True):
    """Memory ran out: from here on ``images`` go through the network at a time, ``during`` updates or evaluations."""

    during: str = "update"
    images: Whole = 1


class Failed(Event, frozen=True, kw_only=True):
    """The end of an attempt by an error."""

    error: str
    message: str
    step: Whole = 0


class Ended(Event, frozen=True, kw_only=True):
    """The good end of an attempt: ``finished``, or ``interrupted`` or ``preempted`` after saving."""

    status: Literal["finished", "interrupted", "preempted"]
    step: Whole
    seconds: Finite
    images: Whole

    @property
    def words(self) -> str:
        """The status for people: whoever sends a signal, or gives --until, need not have preempted the run."""
        return "saved and stopped" if self.status == "preempted" else self.status


BUCKETS = (
    "startup",
    "warmup",
    "probe",
    "input",
    "epoch_gap",
    "transfer",
    "host",
    "forward",
    "backward",
    "optimizer",
    "update",
    "communication",
    "evaluation",
    "checkpoint",
    "logging",
    "measuring",
    "other",
)
"""Uses of an attempt's seconds, as they are recorded: each second belongs to exactly one of these (docs/ledger.md)."""

UPDATING = ("warmup", "input", "transfer", "host", "forward", "backward", "update", "optimizer", "communication")
"""Buckets that updates are made of, the waits for their batches included."""


class Accounted(Event, frozen=True, kw_only=True):
    """The ledger of the attempt so far: ``seconds`` by bucket of :data:`BUCKETS` add up to ``wall_seconds``."""

    step: Whole
    images: Whole
    wall_seconds: Finite
    seconds: Mapping[str, Finite]
    update_cpu_seconds: Finite | None = None
    exchange_seconds: Finite | None = None
    warmup_images: Whole | None = None
    launching_measured: Sequence[str] = []
    compute_threads: Whole | None = None


class FeedStats(Event, frozen=True, kw_only=True):
    """Busy seconds of each stage and waiting seconds, summed over the feed's threads since it started."""

    step: Whole
    images: Whole
    bytes: Whole
    kept_bytes: Whole = 0
    shared_bytes: Whole = 0
    device_bytes: Whole = 0
    read_seconds: Finite
    decode_seconds: Finite
    augment_seconds: Finite = 0.0
    batch_seconds: Finite
    blocked_seconds: Finite
    cpu_seconds: Finite | None = None
    threads: Whole
    asked: Whole = 0
    starved: Whole = 0
    ready: Finite = 0.0
    depth: Whole = 0
    by_loop: bool = False


class ServerStats(Event, frozen=True, kw_only=True):
    """Exchange of a worker of the asynchronous engine with its server since the event before."""

    step: Whole
    seconds: Finite
    pushes: Whole
    staleness: Finite
    staleness_max: Whole
    servers: Sequence[ServerCallKeys] = []


class FeedPlaced(Event, frozen=True, kw_only=True):
    """The place of the loader's threads: ``threads`` of the training process or a ``process`` of their own; and why."""

    step: Whole
    place: str
    reason: str


class MachineStats(Event, frozen=True, kw_only=True):
    """Activity of the machine and of this process in the ``seconds`` before; None where the machine does not tell.

    Processor time is in cores: 1.5 is one and a half processors busy all the time.
    """

    seconds: Finite
    cores: Whole
    machine_cores: Whole
    quota: Finite = 0.0
    cpu: Finite | None = None
    children: Finite | None = None
    system_share: Finite | None = None
    ranks: Finite = 0.0
    others: Finite | None = None
    idle: Finite | None = None
    iowait: Finite | None = None
    steal: Finite | None = None
    throttled_seconds: Finite | None = None
    pressure: Mapping[str, Finite] = {}
    threads: Whole | None = None
    involuntary_switches: Finite | None = None
    minor_faults: Finite | None = None
    major_faults: Finite | None = None
    memory_bytes: Whole | None = None
    memory_limit_bytes: Whole | None = None
    available_bytes: Whole | None = None
    swap_bytes: Finite | None = None
    disk_read_bytes: Finite | None = None
    disk_write_bytes: Finite | None = None
    disk_busy: Finite | None = None
    network_bytes: Finite | None = None
    energy_joules: Finite | None = None
    other_processes: Sequence[OtherProcessKeys] = []
    missing: Sequence[str] = []


class ThreadStats(Event, frozen=True, kw_only=True):
    """Activity of this process's threads, by samples since the attempt began; every figure is cumulative."""

    step: Whole
    seconds: Finite
    looks: Whole
    cost_seconds: Finite
    lock_seconds: Finite
    loop: Mapping[str, BucketKeys] = {}
    places: Sequence[ThreadPlaceKeys] = []
    compute: RanKeys | None = None
    feed: RanKeys | None = None
    others: Sequence[OtherThreadKeys] = []


class DeviceStats(Event, frozen=True, kw_only=True):
    """Activity of one GPU in the ``seconds`` before; None where its driver does not tell (``missing`` names it)."""

    seconds: Finite
    index: Whole
    name: str
    utilisation: Finite | None = None
    sm_active: Finite | None = None
    tensor_active: Finite | None = None
    memory_bytes: Whole | None = None
    memory_total_bytes: Whole | None = None
    power_watts: Finite | None = None
    power_limit_watts: Finite | None = None
    power_most_watts: Finite | None = None
    energy_joules: Finite | None = None
    clock_hertz: Finite | None = None
    clock_limit_hertz: Finite | None = None
    temperature: Finite | None = None
    throttled: Sequence[str] = []
    processes: Whole | None = None
    other_processes: Sequence[OtherProcessKeys] = []
    missing: Sequence[str] = []


class StepMeasured(Event, frozen=True, kw_only=True):
    """The parts of a step, measured on the run's own model by passes whose gradients are thrown away."""

    step: Whole
    batch_size: Whole
    other_batch_size: Whole
    passes: Mapping[str, Finite]
    fixed_seconds: Finite
    operations: Whole | None = None
    syncs: Sequence[str] = []
    forward_flops: Finite | None = None
    peak_flops: Finite | None = None
    seconds: Finite | None = None


class Compiled(Event, frozen=True, kw_only=True):
    """Compilation of the run's network before the first update: its cost and its gain."""

    step: Whole
    mode: str
    seconds: Finite
    graphs: Whole
    breaks: Sequence[str]
    images: Whole
    eager_seconds: Finite
    compiled_seconds: Finite

    @property
    def images_until_paid(self) -> int | None:
        """Images after which compilation has paid off; None if it never does.

        >>> rest = {"step": 0, "mode": "default", "graphs": 1, "breaks": (), "images": 64, "eager_seconds": 0.5}
        >>> Compiled(seconds=10.0, compiled_seconds=0.4, **rest).images_until_paid
        6400
        >>> Compiled(seconds=10.0, compiled_seconds=0.5, **rest).images_until_paid
        """
        gain = self.eager_seconds - self.compiled_seconds
        return round(self.seconds / gain * self.images) if gain > 0 else None


class Ceilings(Event, frozen=True, kw_only=True):
    """The headroom probe: images per second of the feed alone, of updates alone on batches in memory, of both."""

    step: Whole
    feed_images_per_second: Finite
    compute_images_per_second: Finite
    both_images_per_second: Finite
    seconds: Finite


class Stalled(Event, frozen=True, kw_only=True):
    """A stall: no progress for ``seconds``, where ``expected_seconds`` are usual."""

    step: Whole
    what: str
    seconds: Finite
    expected_seconds: Finite
    culprit: str
    stacks: str
