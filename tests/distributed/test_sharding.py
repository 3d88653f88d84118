"""Parts of parameters on two ranks over gloo: the training of DistributedDataParallel, in half of the memory."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import as_group
from torch import Tensor, nn

from steadytrain import optim
from steadytrain.config import Optim, Precision
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.sharding import ShardedEngine
from steadytrain.training import checkpoints
from steadytrain.training.ema import Ema
from steadytrain.training.precision import Policy
from steadytrain.training.state import Cursor, Meters, State

CPU = torch.device("cpu")
UPDATES = 6


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    # A bias before batch norm has a gradient of rounding noise, which AdamW makes as large as the rate.
    first = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 10)).to(
        memory_format=torch.channels_last
    )


class Training:
    """A net as one of several ranks, in two micro-batches an update, its gradients clipped."""

    def __init__(
        self, engine: Engine, name: str, saved: dict[str, Any] | None = None, *, averages: bool = False
    ) -> None:
        # The first rank's values count: others need no memory for theirs.
        with torch.device("meta" if engine.is_sharded and engine.world.rank else "cpu"):
            net = _net()
        engine.shard(net)
        groups = [{"params": list(net.parameters()), "weight_decay": 0.01}]
        optimizer = optim.build(Optim(name=name), groups, lr=0.01, device=CPU)
        ema = Ema(net, 0.8, copied=engine.copy(net), own_values=engine.own_values) if averages else None
        self.state = State(net, optimizer, Policy(Precision(name="fp32"), CPU), engine, ema, Meters(CPU), Cursor())
        if saved is not None:
            self.state.load_state_dict(copy.deepcopy(saved))
        self.call = engine.prepare(net, self.state.cursor.step)
        self.layouts: set[str] = set()
        next(part for part in net if isinstance(part, nn.Conv2d)).register_forward_hook(self._look)

    def _look(self, conv: Any, inputs: tuple[Tensor, ...], activations: Tensor) -> None:
        """See how the gathered weights and the activations of a convolution lie in memory."""
        weights = conv.weight
        assert isinstance(weights, Tensor)
        for name, tensor in (("weights", weights), ("activations", activations)):
            is_last = tensor.is_contiguous(memory_format=torch.channels_last)
            self.layouts.add(f"{name} {'last' if is_last else 'first'}")

    def run(self, updates: int) -> list[float]:
        state, losses = self.state, []
        for _ in range(updates):
            seed = 10 * state.cursor.step + state.engine.world.rank
            images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            images = images.to(memory_format=torch.channels_last)
            for part, last in zip(images.chunk(2), (False, True), strict=True):
                with state.engine.micro_batch(last=last):
                    loss = self.call(part).square().mean() / 2
                    state.engine.backward(loss, last=last)
            norm = nn.utils.clip_grad_norm_(state.module.parameters(), 0.5)
            losses += [float(loss.detach()), float(state.engine.whole(norm))]
            state.optimizer.step()
            state.optimizer.zero_grad()
            if state.ema is not None:
                state.ema.update(state.module)
            state.cursor.step += 1
        return losses

    @property
    def optimizer_bytes(self) -> int:
        """Of what this rank keeps for the optimizer."""
        values = [v for state in self.state.optimizer.state.values() for v in state.values() if v.dim()]
        return sum(4 * self.state.engine.own_values(value).numel() for value in values)

    def logits(self, images: Tensor) -> Tensor:
        """As evaluation has them, of as many images as each rank likes."""
        with self.state.engine.settled(self.state.module), torch.no_grad():
            logits: Tensor = self.state.module.eval()(images)
        self.state.module.train()
        return logits


def _program(group: Group, *, name: str) -> dict[str, Any]:
    plain, sharded = Training(Engine(CPU, group), name), Training(ShardedEngine(CPU, group), name)
    losses = {"plain": plain.run(UPDATES), "sharded": sharded.run(3)}
    saved = sharded.state.engine.whole(copy.deepcopy(sharded.state.state_dict()))
    losses["sharded"] += sharded.run(UPDATES - 3)
    resumed, other = Training(ShardedEngine(CPU, group), name, saved), Training(Engine(CPU, group), name, saved)
    losses["resumed"], losses["by ddp"] = resumed.run(UPDATES - 3), other.run(UPDATES - 3)
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)
    logits = sharded.logits(images if group.world.rank else images[:3])
    return {
        "losses": losses,
        "bytes": {"plain": plain.optimizer_bytes, "sharded": sharded.optimizer_bytes},
        "logits": logits[:3],
        "layouts": {"plain": sorted(plain.layouts), "sharded": sorted(sharded.layouts)},
        "ends": {
            name: {
                key: training.state.engine.whole(value).clone()
                for key, value in training.state.state_dict()["model"].items()
            }
            for name, training in (("plain", plain), ("sharded", sharded), ("resumed", resumed))
        },
        "optimizer": {
            name: {str(k): sorted((key, list(v.shape)) for key, v in values.items()) for k, values in state.items()}
            for name, state in (
                ("plain", plain.state.state_dict()["optimizer"]["state"]),
                ("sharded", sharded.state.state_dict()["optimizer"]["state"]),
            )
        },
    }


@pytest.fixture(scope="module", params=["sgd", "adamw"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return as_group(partial(_program, name=request.param), 2)


def test_losses_and_norms_are_those_of_ddp(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["losses"]["sharded"] == pytest.approx(rank["losses"]["plain"], rel=1e-4)
        for name, _ in _net().named_parameters():
            torch.testing.assert_close(rank["ends"]["sharded"][name], rank["ends"]["plain"][name], rtol=1e-3, atol=1e-4)


def test_activations_stay_channels_last_though_gathered_weights_do_not(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["layouts"]["plain"] == ["activations last", "weights last"]
        assert rank["layouts"]["sharded"] == ["activations last", "weights first"]


def test_each_rank_has_half_of_the_optimizers_state(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["bytes"]["sharded"] == pytest.approx(rank["bytes"]["plain"] / 2, rel=0.01)


def test_what_is_saved_is_whole_and_loads_anywhere(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["optimizer"]["sharded"] == rank["optimizer"]["plain"]
        _net().load_state_dict(rank["ends"]["sharded"])
        assert rank["losses"]["by ddp"] == pytest.approx(rank["losses"]["plain"][6:], rel=1e-4)


def test_a_resumed_run_goes_on_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["losses"]["resumed"] == rank["losses"]["sharded"][6:]
        parameters = [name for name, _ in _net().named_parameters()]
        assert all(torch.equal(rank["ends"]["resumed"][name], rank["ends"]["sharded"][name]) for name in parameters)


def test_ranks_evaluate_different_numbers_of_images(ranks: list[dict[str, Any]]) -> None:
    net = _net()
    net.load_state_dict(ranks[0]["ends"]["sharded"])
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(images)[:3], ranks[1]["logits"], rtol=1e-4, atol=1e-5)


def _copies_program(group: Group) -> dict[str, Any]:
    """Two copies of the parameters, in two parts each, and their average; saved piece by piece, loaded by all."""
    plain, rank = Training(Engine(CPU, group), "adamw", averages=True), group.world.rank
    sharded = Training(ShardedEngine(CPU, group, copy_ranks=2), "adamw", averages=True)
    assert list(group.subgroups.values()) == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]
    recorded = {name for entry in group.collectives() for name in entry["process_group"][:1]}
    assert group.subgroups.keys() <= recorded, "each has had its first exchange, and is named as torch records it"
    losses = {"plain": plain.run(3), "sharded": sharded.run(3)}
    averages = [
        {name: training.state.engine.whole(value).clone() for name, value in ema.module.state_dict().items()}
        for training in (plain, sharded)
        if (ema := training.state.ema) is not None
    ]
    engine, state = sharded.state.engine, sharded.state.state_dict()
    written, live = checkpoints.split(state)
    parts = engine.parts(live)
    copies = checkpoints.stage(parts.own)
    with tempfile.TemporaryDirectory() as folder:
        if group.world.is_first:
            save = partial(checkpoints.save, Path(folder), 3, written, parts.whole)
            saved = checkpoints.load(save(pieces=partial(parts.pieces, copies)).path)
        else:
            parts.send(copies)
            metas = {name: torch.empty_like(value, device="meta") for name, value in live.items()}
            saved = checkpoints.join(written, metas)
            saved["rng"], saved["meters"] = state["rng"], state["meters"]
        whole = engine.whole({name: state[name] for name in ("model", "optimizer", "ema")})
        tensors = checkpoints.split(whole)[1]
        is_equal = not group.world.is_first or all(
            torch.equal(value, tensors[name])
            for name, value in checkpoints.split({name: saved[name] for name in whole})[1].items()
        )
        resumed = Training(ShardedEngine(CPU, group), "adamw", saved, averages=True)  # in four parts
    return {
        "losses": losses | {"resumed": resumed.run(3), "on": sharded.run(3)},
        "averages": averages,
        "is_equal": is_equal,
        "own bytes": sum(value.nbytes for value in parts.own.values()),
    }


@pytest.fixture(scope="module")
def copies() -> list[dict[str, Any]]:
    return as_group(_copies_program, 4)


def test_two_copies_of_the_parts_and_their_average_train_as_ddp(copies: list[dict[str, Any]]) -> None:
    for rank in copies:
        assert rank["losses"]["sharded"] == pytest.approx(rank["losses"]["plain"], rel=1e-4)
        plain, sharded = rank["averages"]
        parameters = [name for name, _ in _net().named_parameters()]
        assert sharded.keys() == plain.keys()
        for name in parameters:
            torch.testing.assert_close(sharded[name], plain[name], rtol=1e-2, atol=1e-3)


def test_parts_are_written_as_one_file_and_loaded_by_another_number_of_parts(copies: list[dict[str, Any]]) -> None:
    assert all(rank["is_equal"] for rank in copies)
    for rank in copies:
        assert rank["losses"]["resumed"] == pytest.approx(rank["losses"]["on"], rel=1e-5)
    own = [rank["own bytes"] for rank in copies]
    assert own[1] > 0 and own[2] == own[3] == 0, "one copy is saved"
