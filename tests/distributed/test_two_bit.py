"""Two bits a value: the bytes, the steps and what is left are those of MXNet 1.9.1, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steadytrain.distributed.compression import num_bytes, pack, unpack

Golden = dict[str, npt.NDArray[np.generic]]


@pytest.fixture(scope="module")
def golden(data_folder: Path) -> Golden:
    """Gradients, packed bytes and sums that MXNet 1.9.1 made."""
    path = data_folder / "mxnet-golden" / "gradient-compression.npz"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _gradients(golden: Golden, key: int) -> Tensor:
    """float32 [6 rounds, 2 workers, n]."""
    return torch.from_numpy(golden[f"gradient/key{key}"]).flatten(2)


@pytest.mark.parametrize("key", [3, 5])
def test_the_bytes_are_those_that_mxnet_sends(golden: Golden, key: int) -> None:
    gradients = _gradients(golden, key)[:, 0]
    left = torch.zeros(gradients.shape[1])
    for gradient, wanted in zip(gradients, golden[f"wire/t0.5/key{key}/packed"], strict=True):
        codes, left = pack(gradient, left, 0.5)
        assert codes.numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("key", [3, 5])
@pytest.mark.parametrize(
    ("trace", "threshold", "workers"),
    [(f"device{n}/t{t:g}", t, n) for t in (0.5, 0.1, 2.0) for n in (1, 2)]
    + [(f"dist_sync/{t:g}/w2", t, 2) for t in (0.5, 0.1, 2.0)],
)
def test_rounds_give_what_mxnets_workers_pull(
    golden: Golden, trace: str, threshold: float, workers: int, key: int
) -> None:
    gradients = _gradients(golden, key)
    n = gradients.shape[2]
    left = [torch.zeros(n) for _ in range(workers)]
    for number, wanted in enumerate(golden[f"{trace}/key{key}/pulled"]):
        total = torch.zeros(n)
        for worker in range(workers):
            codes, left[worker] = pack(gradients[number, worker], left[worker], threshold)
            total += unpack(codes, n, threshold)
        assert total.numpy().tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_what_is_no_finite_number_arrives_as_none_and_is_not_kept(golden: Golden) -> None:
    odd = torch.from_numpy(golden["nonfinite/device2/t0.5/first_gradient"])  # nan, inf, -inf, 1e30, -1e30, 0.3
    before = torch.full((6,), 0.25)
    codes, left = pack(odd, before, 0.5)
    arrived = unpack(codes, 6, 0.5)
    assert arrived.isnan().tolist() == [True, True, True, False, False, False]
    assert arrived[3:].tolist() == [0.5, -0.5, 0.5]
    assert left[:3].tolist() == [0.25] * 3 and left.isfinite().all()
    assert unpack(pack(torch.full((6,), 0.3), left, 0.5).codes, 6, 0.5)[:3].tolist() == [0.5] * 3


@given(st.lists(st.floats(-4, 4, width=32), max_size=70), st.sampled_from([0.5, 0.1, 1.5]))
def test_nothing_is_lost_and_no_argument_is_changed(values: list[float], threshold: float) -> None:
    gradient, before = torch.tensor(values), torch.linspace(-1, 1, len(values))
    kept = gradient.clone(), before.clone()
    codes, left = pack(gradient, before, threshold)
    sent = unpack(codes, len(values), threshold)
    assert len(codes) == num_bytes(len(values)) and codes.dtype == torch.uint8
    assert torch.equal(sent + left, before + gradient) or torch.allclose(sent + left, before + gradient, atol=1e-6)
    step = np.float32(threshold)
    assert set(sent.tolist()) <= {0.0, float(step), -float(step)}
    reached = (before + gradient).abs() >= float(step)
    assert torch.equal(sent != 0, reached)
    assert torch.equal(gradient, kept[0]) and torch.equal(before, kept[1])


@pytest.mark.gpu
def test_a_gpu_packs_the_same_bytes() -> None:
    gradient, before = torch.randn(1001), torch.randn(1001)
    path, there = pack(gradient, before, 0.3), pack(gradient.cuda(), before.cuda(), 0.3)
    assert torch.equal(path.codes, there.codes.cpu()) and torch.equal(path.residual, there.residual.cpu())
    assert torch.equal(unpack(path.codes, 1001, 0.3), unpack(there.codes, 1001, 0.3).cpu())
