"""How much this machine multiplies in a second."""

from __future__ import annotations

import time

import pytest
import torch

from steadytrain.training.profile.timing import peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
def test_a_machine_multiplies_what_it_multiplies_and_is_asked_once(numbers: str) -> None:
    peak = peak_flops(CPU, numbers)
    assert 1e8 < peak < 1e15
    began = time.process_time()
    assert peak_flops(CPU, numbers) == peak
    assert time.process_time() - began < 2 * 1024**3 / peak  # no product was made again


def test_measuring_draws_no_random_number_of_the_process() -> None:
    before = torch.get_rng_state()
    peak_flops.__globals__["_peak"].cache_clear()
    peak_flops(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)
