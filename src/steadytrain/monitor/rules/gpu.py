"""What holds a GPU back: copies to it, its clock, and whom it is shared with."""

from __future__ import annotations

from steadytrain.events import DeviceStats
from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import COMPUTE
from steadytrain.monitor.rules.cause import LEAST, Cause, clip


def transfer(evidence: Evidence) -> Cause | None:
    """Find a device that waits for batches to be copied to it."""
    share = evidence.ledger.share("transfer")
    if share < LEAST:
        return None
    seconds, side = evidence.mean_seconds("transfer"), int(evidence.started.model.get("size") or 0)
    figures = [f"{duration(seconds)} an update"]
    if side and seconds > 0:
        figures.append(f"that is {evidence.recipe.batch_size * side * side * 3 / seconds / 1e9:.1f} GB a second")
    sentence = f"The GPU waits {percent(share)} of the time for batches to be copied to it."
    return Cause(name="transfer", share=share, sentence=sentence, evidence=tuple(figures), change="steady doctor")


def throttled(evidence: Evidence) -> Cause | None:
    """Find a GPU whose clock is held down."""

    def speed(device: DeviceStats) -> float:
        return min(1.0, (device.clock_hertz or 0.0) / (device.clock_limit_hertz or 1.0))

    slow = [d for d in evidence.devices if d.throttled and d.clock_hertz and d.clock_limit_hertz]
    if not slow:
        return None
    device = min(slow, key=speed)
    share = clip(evidence.ledger.share(*COMPUTE) * (1 - speed(device)))
    if share < LEAST:
        return None
    reasons = ", ".join(str(reason) for reason in device.throttled)
    figures = [f"{(device.clock_hertz or 0) / 1e6:.0f} of {(device.clock_limit_hertz or 0) / 1e6:.0f} MHz"]
    if device.power_watts and device.power_limit_watts:
        figures.append(f"{device.power_watts:.0f} of {device.power_limit_watts:.0f} W")
    if device.temperature is not None:
        figures.append(f"{device.temperature:.0f} degrees")
    is_hot = "therm" in reasons.lower()
    power = f"raise its power limit: nvidia-smi -i {device.index} -pl WATTS"
    return Cause(
        name="device_throttled",
        share=share,
        sentence=f"The clock of GPU {device.index} is held down ({reasons}): that costs {percent(share)} of the time.",
        evidence=tuple(figures),
        change="let more air to it, or choose another machine" if is_hot else power,
        saves=share,
    )


def shared(evidence: Evidence) -> Cause | None:
    """Find other processes that compute on the same GPU."""
    if evidence.on_cpu or not any(device.processes for device in evidence.devices):
        return None
    device = max(evidence.devices, key=lambda device: device.processes or 0)
    others = device.processes or 0
    share = clip(evidence.ledger.share(*COMPUTE) * others / (others + 1))
    if share < LEAST:
        return None
    who = count(others, "other process computes", "other processes compute")
    busy = device.utilisation
    return Cause(
        name="device_shared",
        share=share,
        sentence=f"{who} on GPU {device.index}: that costs up to {percent(share)} of the time.",
        evidence=() if busy is None else (f"its kernels ran {percent(busy)} of the time",),
        change="end the other processes, or choose another GPU: --device cuda:N (nvidia-smi names them)",
        saves=share,
    )
