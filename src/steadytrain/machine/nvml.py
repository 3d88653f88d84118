"""Asking NVIDIA's management library one thing at a time, whatever the driver, the GPU and the release can tell.

The library's module (``pynvml``, of nvidia-ml-py) is handed in: nothing here imports it. What a GPU or a driver cannot
tell raises ``NVMLError`` there and is None here.
"""

from __future__ import annotations

from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons.
REASONS = {
    0x001: "idle",
    0x002: "set clocks",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}


class Reader:
    """One GPU; ``read("Name")`` is ``nvmlDeviceGetName`` of it, or None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle

    def read(self, name: str, *more: Any) -> Any:
        """What the library answers; None where it does not."""
        function = getattr(self.nvml, f"nvmlDeviceGet{name}", None)
        try:
            return None if function is None else function(self.handle, *more)
        except self.nvml.NVMLError:
            return None


def reasons(of: Reader) -> tuple[str, ...] | None:
    """Why the clock is not higher now; nothing where it could not be."""
    told = of.read("CurrentClocksEventReasons")
    bits = of.read("CurrentClocksThrottleReasons") if told is None else told  # the name of older releases
    return None if bits is None else tuple(word for bit, word in REASONS.items() if bits & bit)


def watts(milliwatts: int | None) -> float | None:
    """The library's unit of power in ours."""
    return None if milliwatts is None else milliwatts / 1000


def text(told: str | bytes) -> str:
    """Releases of the library differ in what they give."""
    return told.decode(errors="replace") if isinstance(told, bytes) else told
