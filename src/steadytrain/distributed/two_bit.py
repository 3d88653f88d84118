"""Gradients as two bits a value, as MXNet packs them: a step up, a step down or nothing, and what is left is kept.

Each value is added to what is left of the earlier ones. Where the sum reaches the threshold a step of it is sent, and
taken off what is left: nothing is lost, it is sent later (Strom 2015, "Scalable distributed DNN training using
commodity GPU cloud computing"; the law and the bytes are those of MXNet's ``type="2bit"``).

A byte holds four values, the first in its highest bits: ``11`` a step up, ``10`` a step down, ``00`` nothing. The
bytes are filled up to a multiple of four, as MXNet's are. One thing differs: there, a value that is no number, or
infinite, stays in what is left for ever and sends nothing, or a step at every update, and nobody learns of it. Here it
is sent as ``01``, arrives as NaN on every rank, where it is noticed, and leaves no trace in what is left.

>>> gradient = torch.tensor([0.6, -0.7, 0.2, 1.4, -0.5])
>>> sent = pack(gradient, torch.zeros(5), 0.5)
>>> bytes(sent.codes.tolist()).hex(), unpack(sent.codes, 5, 0.5).tolist()
('e3800000', [0.5, -0.5, 0.0, 0.5, -0.5])
>>> [round(left, 3) for left in sent.residual.tolist()]
[0.1, -0.2, 0.2, 0.9, 0.0]
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_FILL = 16  # values that the bytes are filled up to a multiple of
_NOT_FINITE = 1
# Four codes, one in each byte of a word whose first byte is its lowest, come together in its highest byte.
_GATHER = 1 << 30 | 1 << 20 | 1 << 10 | 1


class Packed(NamedTuple):
    """What :func:`pack` gives: ``codes`` uint8 [num_bytes(n)] to send, and ``residual`` float32 [n] to keep."""

    codes: Tensor
    residual: Tensor


def num_bytes(n: int) -> int:
    """How many bytes ``n`` values take.

    >>> num_bytes(37), num_bytes(16), num_bytes(0)
    (12, 4, 0)
    """
    return -(-n // _FILL) * _FILL // 4


def pack(gradient: Tensor, residual: Tensor, threshold: float) -> Packed:
    """Two bits for each value of a gradient; neither argument is changed.

    Args:
        gradient: float32 [n], on any device.
        residual: float32 [n], what is left of earlier gradients; zeros at first.
        threshold: above 0, taken as float32; the step that is sent.
    """
    step = _float32(threshold)
    total = residual + gradient
    steps = functional.hardshrink(total, _below(step)).clamp_(-step, step)
    # On a CPU a sum is the quickest way to see that all are finite; a GPU would have to be waited for.
    odd = None if total.is_cpu and total.sum().isfinite() else ~total.isfinite()
    left = total.sub_(steps)
    codes = functional.pad(steps.div_(step).to(torch.int8), (0, -len(total) % _FILL)).view(torch.int32)
    low = codes & 0x01010101  # in each byte of a word -1, 0 or 1: whether there is a step
    down = codes.bitwise_right_shift_(1).bitwise_and_(0x01010101)
    codes = (low << 1).bitwise_or_(low.bitwise_xor_(down))
    if odd is not None:
        left = torch.where(odd, residual, left)
        codes.view(torch.uint8)[: len(total)].masked_fill_(odd, _NOT_FINITE)
    return Packed(codes.mul_(_GATHER).bitwise_right_shift_(24).to(torch.uint8), left)


def unpack(codes: Tensor, n: int, threshold: float) -> Tensor:
    """What was sent: float32 [n], each value ``threshold``, ``-threshold``, 0, or NaN for what was not finite.

    Args:
        codes: uint8 [num_bytes(n)], from :func:`pack` or from MXNet.
        n: how many values.
        threshold: that of packing.
    """
    return functional.embedding(codes.int(), _table(_float32(threshold), codes.device)).view(-1)[:n]


@lru_cache(maxsize=16)
def _table(step: float, device: torch.device) -> Tensor:
    """The four values of each byte: float32 [256, 4]."""
    codes = torch.arange(256).unsqueeze(1) >> torch.tensor([6, 4, 2, 0]) & 3
    return torch.tensor([0.0, float("nan"), -step, step])[codes].to(device)


def _below(value: float) -> float:
    """The next smaller float32 of one above 0."""
    (bits,) = struct.unpack("i", struct.pack("f", value))
    (smaller,) = struct.unpack("f", struct.pack("i", bits - 1))
    assert isinstance(smaller, float)
    return smaller


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    assert isinstance(rounded, float)
    return rounded
