"""What holds a GPU back: copies to it, its clock, and whom it is shared with."""

from __future__ import annotations

from steadytrain.events import DeviceStats
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, duration, percent, some, within
from steadytrain.monitor.rules.stretches import on_cpu

COMPUTING = ("forward", "backward", "optimizer", "update")


def transfer(evidence: Evidence) -> Cause | None:
    """The device waits for batches to be copied to it."""
    share = evidence.ledger.share("transfer")
    if share < LEAST:
        return None
    seconds = evidence.ledger.seconds["transfer"] / max(evidence.ledger.steps, 1)
    side = int(evidence.started.model.get("size") or 0)
    told = [f"{duration(seconds)} an update"]
    if side and seconds > 0:
        rate = evidence.recipe.batch_size * side * side * 3 / seconds
        told.append(f"that is {rate / 1e9:.1f} GB a second")
    sentence = f"The GPU waits {percent(share)} of the time for batches to be copied to it."
    return Cause(
        name="transfer", share=share, sentence=sentence, evidence=tuple(told), change="steady doctor", saves=0.0
    )


def throttled(evidence: Evidence) -> Cause | None:
    """The clock of a GPU is held down."""
    held = [
        device for device in evidence.devices if device.throttled and device.clock_hertz and device.clock_limit_hertz
    ]
    if not held:
        return None
    device = min(held, key=_clock)
    share = within(evidence.ledger.share(*COMPUTING) * (1 - _clock(device)))
    if share < LEAST:
        return None
    why = ", ".join(str(reason) for reason in device.throttled)
    sentence = f"The clock of GPU {device.index} is held down ({why}): that costs {percent(share)} of the time."
    told = [f"{(device.clock_hertz or 0) / 1e6:.0f} of {(device.clock_limit_hertz or 0) / 1e6:.0f} MHz"]
    if device.power_watts and device.power_limit_watts:
        told.append(f"{device.power_watts:.0f} of {device.power_limit_watts:.0f} W")
    if device.temperature is not None:
        told.append(f"{device.temperature:.0f} degrees")
    heat = any("therm" in str(reason).lower() for reason in device.throttled)
    change = (
        "let more air to it, or choose another machine"
        if heat
        else f"raise its power limit: nvidia-smi -i {device.index} -pl WATTS"
    )
    return Cause(
        name="device_throttled", share=share, sentence=sentence, evidence=tuple(told), change=change, saves=share
    )


def shared(evidence: Evidence) -> Cause | None:
    """Other processes compute on the same GPU."""
    crowd = [device for device in evidence.devices if device.processes]
    if not crowd or on_cpu(evidence):
        return None
    device = max(crowd, key=lambda one: one.processes or 0)
    others = device.processes or 0
    share = within(evidence.ledger.share(*COMPUTING) * others / (others + 1))
    if share < LEAST:
        return None
    sentence = (
        f"{some(others, 'other process computes', 'other processes compute')} on GPU {device.index}: that costs up to"
        f" {percent(share)} of the time."
    )
    told = () if device.utilisation is None else (f"its kernels ran {percent(device.utilisation)} of the time",)
    return Cause(
        name="device_shared",
        share=share,
        sentence=sentence,
        evidence=told,
        change="end the other processes, or choose another GPU: --device cuda:N (nvidia-smi names them)",
        saves=share,
    )


def _clock(device: DeviceStats) -> float:
    """The clock as a share of what it could be."""
    return min(1.0, (device.clock_hertz or 0.0) / (device.clock_limit_hertz or 1.0))
