"""Who feeds: what runs each system, and the settings of which the fastest takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Setting = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A system that feeds.

    Args:
        environment: one of ``environments.ENVIRONMENTS``; empty: it is ours, in the running Python.
        script: beside this file.
        settings: number of cores -> what to try.
        works: that it has the augmentation for.
    """

    environment: str
    script: str
    settings: Callable[[int], Sequence[Setting]]
    works: tuple[str, ...] = ("originals", "packed", "cifar10")


def _mxnet(cores: int) -> list[Setting]:
    return [{"iterators": n, "threads": cores} for n in ((1, 2) if cores == 1 else (1, cores, 2 * cores))]


def _dali(cores: int) -> list[Setting]:
    tried = (("mxnet", True), ("mxnet", False), ("file", True))
    return [{"reader": reader, "fast_idct": fast, "threads": cores} for reader, fast in tried]


def _torchvision(cores: int, *, decoder: str) -> list[Setting]:
    """Return settings with as many processes as cores, and one more; on one core also with none."""
    return [{"decoder": decoder, "workers": workers} for workers in ((0, 1) if cores == 1 else (cores, cores + 1))]


def _timm(cores: int) -> list[Setting]:
    return [{"workers": cores}, {"workers": cores + 1}]


def _webdataset(cores: int) -> list[Setting]:
    return [{"decoder": decoder, "workers": cores} for decoder in ("torchvision", "pillow")]


def _spdl(cores: int) -> list[Setting]:
    return [{"decoder": decoder, "threads": cores} for decoder in ("torchvision", "ffmpeg")]


def _pillow(cores: int) -> list[Setting]:
    return [{"threads": 0}] if cores == 1 else [{"threads": cores}, {"threads": cores + 1}]


PEERS = {
    "mxnet": Peer("mxnet", "feed_mxnet.py", _mxnet),
    "dali": Peer("dali", "feed_dali.py", _dali),
    "torchvision": Peer("torch", "feed_torchvision.py", partial(_torchvision, decoder="pillow")),
    "torchvision-io": Peer("torch", "feed_torchvision.py", partial(_torchvision, decoder="torchvision")),
    "timm": Peer("torch", "feed_timm.py", _timm, ("originals", "packed")),
    "webdataset": Peer("torch", "feed_webdataset.py", _webdataset),
    "spdl": Peer("torch", "feed_spdl.py", _spdl),
    "pillow": Peer("torch", "feed_pillow.py", _pillow),
    "ffcv": Peer("ffcv", "feed_ffcv.py", lambda cores: [{"threads": cores}], ("originals", "packed")),
}
OURS = Peer("", "feed_steadytrain.py", lambda cores: [{"threads": cores}])
OURS_ALONE = Peer("", "feed_steadytrain.py", lambda cores: [{"threads": cores, "library": False}])
OURS_MARKED = Peer("", "feed_steadytrain.py", lambda cores: [{"threads": cores, "marked": True}])
