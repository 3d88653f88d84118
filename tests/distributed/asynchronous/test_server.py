"""Parameter servers: what several of them make of a model's parameters is what its optimizer makes in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.distributed.asynchronous.engine import _cut_states, _joined
from steadytrain.distributed.asynchronous.server import (
    ParameterServer,
    compress,
    cut,
    places_of,
    saved_value,
)
from steadytrain.distributed.compression import CompressionName
from steadytrain.optim import kinds

CPU = torch.device("cpu")
UPDATES = 4


def model() -> nn.Sequential:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(45, 7))
    return module.to(memory_format=torch.channels_last)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0, "lr_scale": 0.5}]


def gradients(parameters: Sequence[nn.Parameter], update: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    return [torch.randn(p.shape, generator=generator).to(memory_format=_format(p)) for p in parameters]


def _format(parameter: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if parameter.dim() == 4 else torch.contiguous_format


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]).numpy()


class Servers:
    """Several servers of one model."""

    def __init__(self, spec: Optim, count: int, saved: dict[str, Any] | None = None, step: int = 0) -> None:
        module = model()
        groups = groups_of(module)
        make = partial(optim.build, spec, lr=0.1, device=CPU)
        local = make(groups)
        if saved is not None:
            local.load_state_dict(saved["optimizer"])
        self.places = places_of(local.param_groups)
        self.parameters = [p for group in local.param_groups for p in group["params"]]
        weights = flat(self.parameters) if saved is None else saved["weights"]
        kind = kinds()[spec.name]
        cuts = cut(self.places, count, whole=kind.sees != "element")
        self.spans = list(itertools.pairwise(cuts))
        options = [{k: v for k, v in group.items() if k != "params"} for group in local.param_groups]
        states = {
            number: {name: saved_value(name, value, p) for name, value in local.state[p].items()}
            for number, p in enumerate(self.parameters)
            if saved is not None
        }
        self.options = [{"lr": group["lr"]} for group in local.param_groups]
        self.servers = [ParameterServer() for _ in range(count)]
        for server, (start, end) in zip(self.servers, self.spans, strict=True):
            states_here = _cut_states(states, self.places, start, end)
            whole = kind.sees != "element"
            server.load(
                self.places,
                options,
                make,
                step,
                start,
                weights[start:end],
                states_here,
                whole=whole,
                keeps_gradients=not whole,
            )

    def push(self, batch: int, gradient: np.ndarray[Any, Any], rank: int = 0) -> np.ndarray[Any, Any]:
        sent, before = torch.from_numpy(gradient), gradient.copy()
        weights = np.concatenate(
            [
                server.push(rank, batch, "none", [], self.options, compress(sent[start:end], "none"))[0]
                for server, (start, end) in zip(self.servers, self.spans, strict=True)
            ]
        )
        assert np.array_equal(gradient, before), "what lies in shared memory must not be written to"
        return weights.copy()

    def save(self) -> dict[str, Any]:
        """Weights, and the state of the optimizer as in one process."""
        saved = [server.save() for server in self.servers]
        parts: dict[int, dict[str, list[Any]]] = {}
        for *_, states in saved:
            for number, state in states.items():
                for name, value in state.items():
                    parts.setdefault(number, {}).setdefault(name, []).append(value)
        joined = {
            number: {name: _joined(values, self.parameters[number]) for name, values in part.items()}
            for number, part in parts.items()
        }
        groups = optim.build(Optim("sgd"), groups_of(model()), lr=0.1, device=CPU).state_dict()["param_groups"]
        return {
            "weights": np.concatenate([weights for weights, *_ in saved]),
            "optimizer": {"state": joined, "param_groups": groups},
        }


def in_one_process(spec: Optim, updates: range) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    optimizer = optim.build(spec, groups_of(model()), lr=0.1, device=CPU)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for update in updates:
        for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return flat(parameters), optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "servers"),
    [(name, count) for name in kinds() for count in (1, 2, 3)],
)
def test_servers_make_what_the_optimizer_makes_in_one_process(name: str, servers: int) -> None:
    spec = Optim(name)
    whole, state = in_one_process(spec, range(UPDATES))
    ours = Servers(spec, servers)
    for update in range(UPDATES):
        # of one worker, whose delay is none; DCASGD's own is that of one update
        got = ours.push(update, flat(gradients(ours.parameters, update)))
    if name != "dcasgd":
        np.testing.assert_allclose(got, whole, rtol=2e-6, atol=2e-7)
    saved = ours.save()["optimizer"]["state"]
    assert saved.keys() == state["state"].keys()
    for number, values in state["state"].items():
        assert saved[number].keys() == values.keys()
        for key, value in values.items():
            if name != "dcasgd" and isinstance(value, torch.Tensor):
                assert saved[number][key].shape == value.shape
                torch.testing.assert_close(saved[number][key], value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "ftml", "muon"])
def test_what_is_saved_goes_on_the_same_with_other_servers(name: str) -> None:
    spec = Optim(name)
    first = Servers(spec, 2)
    for update in range(UPDATES):
        first.push(update, flat(gradients(first.parameters, update)))
    saved = first.save()
    groups = optim.build(spec, groups_of(model()), lr=0.1, device=CPU).state_dict()["param_groups"]
    second = Servers(spec, 3, {**saved, "optimizer": {**saved["optimizer"], "param_groups": groups}}, step=UPDATES)
    for update in range(UPDATES, 2 * UPDATES):
        sent = flat(gradients(first.parameters, update))
        np.testing.assert_allclose(second.push(update, sent), first.push(update, sent), rtol=2e-6, atol=2e-7)


def test_a_batch_is_applied_once_however_often_it_is_pushed() -> None:
    servers = Servers(Optim("sgd"), 2)
    sent = flat(gradients(servers.parameters, 0))
    once = servers.push(7, sent)
    assert np.array_equal(servers.push(7, sent, rank=1), once)
    assert servers.servers[0].has_applied(7) and not servers.servers[0].has_applied(8)


@pytest.mark.parametrize("nesterov", [True, False])
def test_each_workers_gradients_move_a_momentum_of_its_own(nesterov: bool) -> None:
    """As if each worker had an optimizer, all of them on the same weights; so one worker is one process."""
    spec, pushing = Optim("sgd", nesterov=nesterov), (0, 1, 1, 0, 2, 1, 0, 2)
    servers, groups = Servers(spec, 2), groups_of(model())
    optimizers = [optim.build(spec, groups, lr=0.1, device=CPU) for _ in range(3)]
    parameters = [p for group in groups for p in group["params"]]
    for update, rank in enumerate(pushing):
        for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
            parameter.grad = gradient
        sent = flat([p.grad for p in parameters if p.grad is not None])
        optimizers[rank].step()
        np.testing.assert_allclose(servers.push(update, sent, rank), flat(parameters), rtol=2e-6, atol=2e-7)
    saved = servers.save()["optimizer"]["state"]
    for number, parameter in enumerate(parameters):
        momentum_buffers = [optimizer.state[parameter]["momentum_buffer"] for optimizer in optimizers]
        torch.testing.assert_close(saved[number]["momentum_buffer"], sum(momentum_buffers) / 3, rtol=2e-5, atol=1e-6)


def test_workers_of_a_resumed_run_begin_with_the_momentum_of_its_checkpoint() -> None:
    first = Servers(Optim("sgd"), 1)
    for update in range(UPDATES):
        first.push(update, flat(gradients(first.parameters, update)))
    sent = flat(gradients(first.parameters, UPDATES))
    ours = [Servers(Optim("sgd"), 1, first.save(), step=UPDATES).push(UPDATES, sent, rank) for rank in (0, 5)]
    wanted = first.push(UPDATES, sent)
    for weights in ours:
        np.testing.assert_array_equal(weights, wanted)


def test_dcasgd_compensates_the_delay_of_the_worker_that_pushes() -> None:
    """Zheng et al. 2017, equation 10: g + lamda * g * g * (w now - w that the worker had)."""
    servers = Servers(Optim("dcasgd", weight_decay=0.0, options={"lamda": 2.0}), 2)
    start = flat(servers.parameters)
    for server in servers.servers:
        server.pull(0), server.pull(1)
    first, second = (flat(gradients(servers.parameters, update)) for update in (0, 1))
    rates = np.concatenate(
        [
            np.full(p.numel(), group["lr"])
            for group, options in zip(servers.options, groups_of(model()), strict=True)
            for p in options["params"]
        ]
    ).astype(np.float32)
    decay = np.concatenate(
        [np.full(p.numel(), group["weight_decay"]) for group in groups_of(model()) for p in group["params"]]
    ).astype(np.float32)
    after_first = start - rates * (first + decay * start)
    np.testing.assert_allclose(servers.push(0, first, rank=0), after_first, rtol=1e-5, atol=1e-6)
    compensated = second + 2.0 * second * second * (after_first - start) + decay * after_first
    wanted = after_first - rates * compensated
    np.testing.assert_allclose(servers.push(1, second, rank=1), wanted, rtol=1e-5, atol=1e-6)


def test_shares_of_all_workers_make_one_update_of_their_sum() -> None:
    servers, shared = Servers(Optim("sgd"), 1), Servers(Optim("sgd"), 1)
    first, second = (flat(gradients(servers.parameters, update)) for update in (0, 1))
    whole = servers.push(0, first + second)
    for rank, share in ((1, second), (0, np.zeros_like(first)), (0, first)):  # worker 0 was started again
        if rank == 0 and share is not first:
            continue
        shared.servers[0].push_share(rank, 0, "none", [], shared.options, 2, share)
    np.testing.assert_array_equal(shared.servers[0].pull(0)[0], whole)
    assert shared.servers[0].pull(0)[1] == 1


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_compressed_pushes_are_half_as_large(form: CompressionName) -> None:
    servers = Servers(Optim("sgd", momentum=0.0, weight_decay=0.0), 1)
    gradient = torch.from_numpy(flat(gradients(servers.parameters, 0)))
    sent = compress(gradient, form)
    assert sent.nbytes == 2 * len(gradient)
    torch.testing.assert_close(servers.servers[0]._decompress(sent, form), gradient, rtol=0.01, atol=0.01)


def test_missing_gradients_leave_their_parameters_alone() -> None:
    servers = Servers(Optim("adamw"), 2)
    before = flat(servers.parameters)
    sent = torch.from_numpy(flat(gradients(servers.parameters, 0)))
    for server, (start, end) in zip(servers.servers, servers.spans, strict=True):
        server.push(0, 0, "none", [0], servers.options, sent[start:end].numpy())
    after = np.concatenate([server.pull(0)[0] for server in servers.servers])
    end = servers.places[0].end
    assert np.array_equal(after[:end], before[:end]) and not np.array_equal(after[end:], before[end:])
