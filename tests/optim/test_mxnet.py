"""The optimizers that only MXNet had, step by step against what MXNet 1.9.1 computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadytrain.optim import mxnet

KINDS: dict[str, type[mxnet._Rule]] = {
    "signum": mxnet.Signum,
    "ftml": mxnet.FTML,
    "dcasgd": mxnet.DCASGD,
    "lbsgd": mxnet.LBSGD,
    "ftrl": mxnet.Ftrl,
    "sgld": mxnet.SGLD,
}
COMMON = {"learning_rate", "wd", "rescale_grad", "clip_gradient", "multi_precision"}

DEVIATIONS = {
    "reused_buffer": "MXNet adds up a buffer that was overwritten meanwhile",
    "dcasgd.clip0": "MXNet clips to zero where clipping is off elsewhere",
    "lbsgd.lars": "MXNet measures the gradient before it is divided by the batch size",
    "lbsgd.linear.clip": "MXNet clips the mean of batch_scale gradients, not each of them",
    "lbsgd.linear.mp": "as lbsgd.linear.clip",
}
"""Cases whose weights are others here, and why."""


def cases(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    listed = json.loads((folder / "mxnet-golden" / "optimizers.json").read_text())
    return [(name, case) for name, case in listed.items() if case["optimizer"] in KINDS]


def rate(case: dict[str, Any], step: int) -> float:
    """The learning rate of an update, from 1: MXNet's FactorScheduler drops it one update late."""
    scheduler = case["lr_scheduler"]
    if scheduler is None:
        default = 0.1 if case["optimizer"] == "ftrl" else 0.01
        return float(case["args"].get("learning_rate", default))
    constants = scheduler["args"]
    return float(constants["base_lr"] * constants["factor"] ** max(0, -(-step // constants["step"]) - 1))


def replay(name: str, case: dict[str, Any], golden: Any) -> None:
    """Make the 12 updates of a case, and compare all weights after each."""
    constants = case["args"]
    half, scale, clip = case["dtype"] == "float16", constants.get("rescale_grad", 1.0), constants.get("clip_gradient")
    weights, groups = dict[str, nn.Parameter](), []
    for tensor, parameter in zip(case["tensors"], case["param_names"], strict=True):
        value = golden[f"init/{tensor}"]
        weights[tensor] = nn.Parameter(torch.from_numpy(value.astype(np.float16).astype(np.float32) if half else value))
        decay = constants.get("wd", 0.0) if parameter.endswith(("_weight", "_gamma")) else 0.0
        groups.append({"params": [weights[tensor]], "weight_decay": decay})
    own = {key: value for key, value in constants.items() if key not in COMMON | {"begin_num_update"}}
    optimizer = KINDS[case["optimizer"]](groups, **own)
    if isinstance(optimizer, mxnet.SGLD):
        drawn = {id(weights[tensor]): golden[f"{name}/noise/{tensor}"] for tensor in case["tensors"]}

        def noise(group: dict[str, Any], weight: Tensor, step: int, number: int) -> Tensor:
            values: Tensor = torch.from_numpy(drawn[id(weight)][step - 1])
            return values.div(float(group["lr"]) ** 0.5)

        optimizer.noise = noise  # type: ignore[method-assign]
    for step in range(12):
        for tensor, weight in weights.items():
            gradient = golden[f"grad/{tensor}"][step]
            if half:
                gradient = gradient.astype(np.float16).astype(np.float32)
            if case["gradient_buffers"] == "first_zero" and step == 0:
                gradient = gradient * 0
            prepared = torch.from_numpy(gradient) * scale
            weight.grad = prepared.clamp(-clip, clip) if clip else prepared
        for group in optimizer.param_groups:
            group["lr"] = rate(case, constants.get("begin_num_update", 0) + step + 1)
        optimizer.step()
        for tensor, weight in weights.items():
            place = f"{name}/master/{tensor}" if half else f"{name}/weights/{tensor}"
            message = f"{name}, {tensor}, update {step + 1}"
            np.testing.assert_allclose(
                weight.detach().numpy(), golden[place][step], rtol=1e-5, atol=2e-5, err_msg=message
            )


@pytest.mark.parametrize("kind", list(KINDS))
def test_updates_are_mxnets(data_folder: Path, kind: str) -> None:
    golden = np.load(data_folder / "mxnet-golden" / "optimizers.npz")
    compared = 0
    for name, case in cases(data_folder):
        is_known = any(part in name for part in DEVIATIONS)
        if case["optimizer"] == kind and "raises" not in case and not is_known:
            replay(name, case, golden)
            compared += 1
    assert compared >= 3


def test_deviations_are_those_that_are_documented(data_folder: Path) -> None:
    golden = np.load(data_folder / "mxnet-golden" / "optimizers.npz")
    for name, case in cases(data_folder):
        if "raises" not in case and any(part in name for part in DEVIATIONS):
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                replay(name, case, golden)
