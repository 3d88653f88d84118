"""The rules by which a tuning chooses: pure functions of the measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steadytrain.config.parts import ADAMS, Optim
from steadytrain.data.loader.task import MOST_KEPT_BYTES

KNEE = 0.97
"""Share of the best rate at which a smaller batch is as good."""

GAIN = 0.03
"""Gain above which something is chosen over what is more exact, usual or thrifty."""

FLAT = 0.05
"""Gain of a batch four times as large below which the curve has flattened."""

HEADROOM = 0.07
"""Share of the memory that stays free: fragments, a larger evaluation, other processes."""

LEAST_BATCH, MOST_BATCH = 16, 1024
"""Batch norms of fewer images are noisy; linear scaling of the rate is not known to hold far beyond the other."""

STEP = 4
"""Factor between the first batches that are measured; between those around the knee it is 2."""


def knee(curve: Mapping[int, float], share: float = KNEE) -> int:
    """Return the smallest batch whose rate is at least this share of the best.

    >>> knee({16: 400.0, 64: 900.0, 128: 980.0, 256: 1000.0})
    128
    """
    best = max(curve.values())
    return min(batch for batch, rate in curve.items() if rate >= share * best)


def next_batch(curve: Mapping[int, float], sizes: Sequence[int], step: int = STEP) -> int | None:
    """Return the batch size to measure next; None: the knee is known.

    Batches grow by ``step`` until that gains less than :data:`FLAT`, or fails; then the gap around the knee is filled.

    Args:
        curve: batch -> images per second, 0 where it failed; at least one.
        sizes: that may be measured, rising.

    >>> next_batch({16: 400.0}, [16, 32, 64, 128, 256]), next_batch({16: 400.0, 64: 410.0}, [16, 32, 64, 128, 256])
    (64, None)
    >>> next_batch({16: 400.0, 64: 900.0, 256: 910.0}, [16, 32, 64, 128, 256])
    32
    """
    good = {batch: rate for batch, rate in curve.items() if rate > 0}
    failed = min((batch for batch, rate in curve.items() if not rate), default=None)
    if not good:
        smaller = [batch for batch in sizes if batch < min(curve)]
        return smaller[-1] if smaller else None
    largest = max(good)
    before = max((rate for batch, rate in good.items() if batch < largest), default=0.0)
    if failed is None and good[largest] >= (1 + FLAT) * before:
        further = [batch for batch in sizes if largest < batch <= step * largest]
        if further:
            return further[-1]
    best = knee(good)
    gap = [batch for batch in sizes if best < batch < (failed or 0) and batch not in curve] if best == largest else []
    lower = max((batch for batch in good if batch < best), default=0)
    if not gap and lower:
        gap = [batch for batch in sizes if lower < batch < best and batch not in curve]
    return gap[len(gap) // 2] if gap else None


def predict_bytes(memory: Mapping[int, float], batch_size: int) -> float:
    """Predict the memory of a batch by the line through the two largest measured ones, or in proportion to one.

    >>> predict_bytes({16: 3e9, 32: 4e9}, 64), predict_bytes({16: 3e9}, 64)
    (6000000000.0, 12000000000.0)
    """
    (*_, last) = points = sorted(memory)
    if len(points) == 1:
        return memory[last] * max(1.0, batch_size / last)
    before = points[-2]
    slope = (memory[last] - memory[before]) / (last - before)
    return memory[last] + max(0.0, slope) * (batch_size - last)


def room_bytes(memory_bytes: int, *, is_cpu: bool) -> float:
    """Return the memory for training: all but the headroom and, on a CPU, the loader's cache of decoded images.

    >>> round(room_bytes(80 * 2**30, is_cpu=False) / 2**30, 1)
    74.4
    """
    kept = min(MOST_KEPT_BYTES, memory_bytes // 8) if is_cpu else 0
    return (1 - HEADROOM) * memory_bytes - kept


def best_of(rates: Mapping[str, float], preferred: str) -> str:
    """Return the fastest, or the preferred one unless another is faster by more than :data:`GAIN`.

    >>> best_of({"fp32": 100, "bf16": 102}, "fp32"), best_of({"fp32": 100, "bf16": 140}, "fp32")
    ('fp32', 'bf16')
    """
    fastest = max(rates, key=rates.__getitem__)
    return fastest if rates[fastest] > (1 + GAIN) * rates.get(preferred, 0.0) else preferred


def saved_seconds(images: int, *, eager: float, compiled: float, compile_seconds: float) -> float:
    """Return what compiling saves of a run of so many images; negative where it does not pay back.

    >>> saved_seconds(1_000_000, eager=1000, compiled=1250, compile_seconds=30)
    170.0
    """
    return images / eager - images / compiled - compile_seconds


def scale_rate(optim: Optim, before: int, after: int) -> tuple[float, str]:
    """Scale the recipe's learning rate to another batch size; return it with the rule.

    >>> scale_rate(Optim("sgd", lr=0.1), 64, 128)[0], scale_rate(Optim("adamw", lr=1e-3), 16, 64)[0]
    (0.2, 0.002)
    """
    base, times = optim.base_batch_size, after / before
    if base is not None:
        scaled = f"{optim.lr * after / base:.4g} in use = {optim.lr:g} x {after} / {base}"
        return optim.lr, f"{scaled} (linear scaling, Goyal et al. 2017)"
    if times == 1:
        return optim.lr, "as it was: so is the batch"
    if optim.name in ADAMS or optim.name == "muon":
        lr = float(f"{optim.lr * math.sqrt(times):.4g}")
        return lr, f"{optim.lr:g} x sqrt({after} / {before}) (square-root scaling for {optim.name}, Krizhevsky 2014)"
    lr = float(f"{optim.lr * times:.4g}")
    return lr, f"{optim.lr:g} x {after} / {before} (linear scaling, Goyal et al. 2017)"


def agree(choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the choices of several ranks: of each number the least, of precisions the most exact.

    >>> agree([{"batch_size": 64, "precision.name": "bf16"}, {"batch_size": 48, "precision.name": "fp32"}])
    {'batch_size': 48, 'precision.name': 'fp32'}
    """
    order = ("fp32", "tf32", "bf16", "fp16")
    agreed: dict[str, Any] = {}
    for key in choices[0]:
        values = [choice[key] for choice in choices]
        if key == "precision.name":
            agreed[key] = min(values, key=lambda name: order.index(name) if name in order else 0)
        else:
            agreed[key] = None if None in values else min(values)
    return agreed
