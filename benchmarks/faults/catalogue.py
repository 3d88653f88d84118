"""The bases and the faults: what is injected, and the names that a verdict has to give it."""

from __future__ import annotations

from typing import Any

from faults.fault import Base, Fault, both

_COMMON: dict[str, Any] = {
    "optim.lr": 0.01,
    "optim.warmup_epochs": 0.0,
    "precision.name": "fp32",
    "data.holdout": 0.0,
    "every.save_minutes": 60.0,
}
_SMALL = _COMMON | {"batch_size": 128, "model.options.width": 64}
_PHOTOS = _COMMON | {"batch_size": 32, "data.size": 64, "model.options.width": 64}
PLAIN, TABLE = "faults.nets:plain", "faults.nets:table"

BASES = {
    base.name: base
    for base in (
        Base(
            name="small",
            about="CIFAR-10 as bare pixels, two epochs, a small convolutional network",
            data="cifar",
            val="cifar_val",
            model=PLAIN,
            images=128 * 80,
            settings=_SMALL,
        ),
        Base(
            name="photos",
            about="JPEGs of 160 pixels, decoded in every epoch, two epochs and a half",
            data="photos",
            val=None,
            model=PLAIN,
            images=32 * 60,
            settings=_PHOTOS,
        ),
        Base(
            name="quick",
            about="CIFAR-10 as bare pixels, a thin network with updates of a few milliseconds",
            data="cifar",
            val=None,
            model=PLAIN,
            images=128 * 500,
            settings=_SMALL | {"model.options.width": 8},
        ),
        Base(
            name="table",
            about="CIFAR-10, a network with a large table of frozen parameters",
            data="cifar",
            val=None,
            model=TABLE,
            images=32 * 200,
            settings=_SMALL | {"batch_size": 32, "model.options.rows": 8192, "model.options.trained": False},
        ),
        Base(
            name="ranks",
            about="two ranks with one core each, CIFAR-10 as bare pixels, a small convolutional network",
            data="cifar",
            val=None,
            model=PLAIN,
            images=128 * 80,
            settings=_SMALL | {"parallel.compute_threads": 1},
            ranks=2,
        ),
        Base(
            name="photo_ranks",
            about="two ranks with one core each, JPEGs of 160 pixels, decoded in every epoch",
            data="photos",
            val=None,
            model=PLAIN,
            images=32 * 60,
            settings=_PHOTOS | {"parallel.compute_threads": 1},
            ranks=2,
        ),
    )
}

# -- the feed ----------------------------------------------------------------------------------------------------------

_FEED = (
    Fault(
        name="large_originals",
        about="photographs of 500 x 375 pixels for squares of 64",
        base="photos",
        expected=("decode",),
        settings={"data": "originals"},
    ),
    Fault(
        name="slow_decoder",
        about="3 ms more of a core for each photograph of 500 x 375",
        base="photos",
        expected=("decode",),
        settings={"data": "originals"},
        patches={"slow_decoder": 0.003},
    ),
    Fault(
        name="waiting_decoder",
        about="each image's decoding sleeps for 8 ms, on one thread",
        base="photos",
        expected=("threads", "decode"),
        patches={"waiting_decoder": 0.025},
    ),
    Fault(
        name="slow_augmentation",
        about="4 ms more of a core for each square",
        base="photos",
        expected=("augment",),
        patches={"slow_augmentation": 0.004},
    ),
    Fault(
        name="waiting_gather",
        about="the gather of a batch sleeps for 0.18 s",
        base="small",
        expected=("augment", "threads"),
        settings={"val": None},
        clean={"val": None},
        patches={"waiting_gather": 0.18},
    ),
    Fault(
        name="far_source",
        about="each image takes its source 8 ms",
        base="photos",
        expected=("storage", "threads"),
        patches={"far_source": 0.008},
    ),
    Fault(
        name="slow_storage",
        about="a disk of 1.5 MB/s, and no memory to keep its pages in",
        base="photos",
        expected=("storage",),
        patches={"cold": "photos", "forgets": "photos"},
        around={"slow_storage": 1.5e6},
    ),
    Fault(
        name="slow_first_epoch",
        about="a disk of 1 MB/s; later epochs from memory",
        base="photos",
        expected=("storage_first_epoch",),
        patches={"cold": "photos"},
        around={"slow_storage": 1e6},
    ),
    Fault(
        name="one_thread",
        about="one thread decodes originals for a tiny network that leaves a core idle",
        base="photos",
        expected=("threads", "decode"),
        settings={"data": "originals", "model.options.width": 8, "parallel.threads": 1},
        clean={"data": "originals", "model.options.width": 8, "parallel.threads": 2},
    ),
    Fault(
        name="epoch_gap",
        about="each epoch begins 2 s late",
        base="photos",
        expected=("epoch_gap",),
        patches={"epoch_gap": 2.0},
    ),
)

# -- the machine -------------------------------------------------------------------------------------------------------

_MACHINE = (
    Fault(name="one_core", about="affinity to one core", base="small", expected=("affinity",), patches={"affinity": 1}),
    Fault(name="quota", about="a quota of one core's time", base="small", expected=("quota",), around={"quota": 1.0}),
    Fault(
        name="hogs",
        about="two programs beside it that never rest",
        base="small",
        expected=("noisy_neighbour",),
        around={"hogs": 2},
    ),
    Fault(
        name="oversubscription",
        about="8 compute threads",
        base="quick",
        expected=("oversubscription",),
        settings={"parallel.compute_threads": 8},
    ),
    Fault(
        name="one_compute_thread",
        about="one compute thread on two cores",
        base="small",
        expected=("compute_threads",),
        settings={"parallel.compute_threads": 1},
    ),
    Fault(
        name="bare_malloc",
        about="the allocator gives every tensor of 64 kB and more back to the system",
        base="quick",
        expected=("allocator",),
        patches={"bare_malloc": True},
    ),
)

# -- the model and the update ------------------------------------------------------------------------------------------

_UPDATE = (
    Fault(
        name="tiny_batches",
        about="batches of 4 instead of 128",
        base="small",
        expected=("batch_size", "launch"),
        settings={"batch_size": 4},
    ),
    Fault(
        name="waiting_model",
        about="the forward sleeps for 60 ms",
        base="small",
        expected=("model_waits",),
        settings={"model": "faults.nets:waiting", "model.options.seconds": 0.06},
        truth="counted",
    ),
    Fault(
        name="giant_optimizer",
        about="AdamW over eight million parameters more, of which a step uses one",
        base="table",
        expected=("optimizer",),
        settings={"optim.name": "adamw", "model.options.trained": True},
        clean={"optim.name": "adamw"},
        patches={"clocked_optimizer": True},
        truth="counted",
    ),
    Fault(
        name="bf16",
        about="bf16 on a processor that cannot multiply it",
        base="quick",
        expected=("precision",),
        settings={"precision.name": "bf16"},
    ),
    Fault(
        name="late_model",
        about="the model takes 8 s to be made",
        base="small",
        expected=("startup",),
        settings={"model": "faults.nets:late", "model.options.seconds": 8.0},
        truth="counted",
    ),
)

# -- what a run does besides -------------------------------------------------------------------------------------------

_BESIDES = (
    Fault(
        name="frequent_evaluation",
        about="an evaluation every twentieth of an epoch",
        base="small",
        expected=("evaluation",),
        settings={"every.evaluate_epochs": 0.05},
    ),
    Fault(
        name="large_evaluation",
        about="as many images to validate on as to train on, twice an epoch",
        base="small",
        expected=("evaluation",),
        settings={"val": "cifar_test", "every.evaluate_epochs": 0.5},
    ),
    Fault(
        name="frequent_checkpoints",
        about="a checkpoint of 34 MB every ten steps",
        base="table",
        expected=("checkpoint",),
        settings={"every.save_steps": 10},
    ),
    Fault(
        name="slow_checkpoints",
        about="a checkpoint every eight steps to a disk that takes 0.1 s for each flush",
        base="small",
        expected=("checkpoint",),
        settings={"every.save_steps": 8},
        patches={"slow_disk": 0.1},
    ),
    Fault(
        name="slow_log",
        about="each event takes 50 ms to be written",
        base="small",
        expected=("logging",),
        patches={"slow_log": 0.05},
        truth="counted",
    ),
    Fault(
        name="killed",
        about="killed at step 60 of 80 without a checkpoint, and started again",
        base="small",
        expected=("restart",),
        around={"kill_at": 60},
    ),
)

# -- ranks -------------------------------------------------------------------------------------------------------------

_RANKS = (
    Fault(
        name="slow_rank",
        about="the second of two ranks waits 60 ms more in each update",
        base="ranks",
        expected=("straggler",),
        patches={"of_last_rank": {"slow_updates": 0.06}},
        truth="counted",
    ),
    Fault(
        name="slow_feed_of_a_rank",
        about="the second of two ranks decodes each image 25 ms later",
        base="photo_ranks",
        expected=("straggler",),
        patches={"of_last_rank": {"waiting_decoder": 0.025}},
    ),
    Fault(
        name="unequal_shares",
        about="of four micro-batches the first of two ranks has one, the second three",
        base="ranks",
        expected=("straggler",),
        settings={"optim.accumulate": 2},
        clean={"optim.accumulate": 2},
        patches={"uneven_shares": 1},
    ),
    Fault(
        name="slow_link",
        about="two ranks over a link of 200 Mbit/s",
        base="ranks",
        expected=("communication",),
        around={"slow_link": 200e6},
    ),
)

SINGLES = {fault.name: fault for fault in (*_FEED, *_MACHINE, *_UPDATE, *_BESIDES, *_RANKS)}

PAIRS = {
    pair.name: pair
    for pair in (
        both(SINGLES[first], SINGLES[other])
        for first, other in (
            ("waiting_model", "frequent_evaluation"),
            ("frequent_evaluation", "slow_checkpoints"),
            ("slow_log", "frequent_evaluation"),
            ("oversubscription", "bf16"),
            ("quota", "slow_log"),
            ("slow_decoder", "epoch_gap"),
            ("slow_storage", "epoch_gap"),
            ("slow_augmentation", "epoch_gap"),
            ("one_core", "late_model"),
            ("one_core", "slow_checkpoints"),
        )
    )
}

NOT_INJECTED = {
    "transfer": "needs a GPU",
    "launch": "needs a GPU; on a CPU small batches are named batch_size",
    "sync": "needs a GPU: on a CPU nothing is waited for",
    "compile": "needs a GPU",
    "recompile": "needs a GPU",
    "device_throttled": "needs a GPU",
    "device_shared": "needs a GPU",
    "memory": "needs a memory limit that this benchmark does not set: it would have to leave its session's own group",
}
"""Causes that no fault stands for here, and why: they are written from recorded and synthetic timelines."""
