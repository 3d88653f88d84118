"""What ranks tell each other: as real processes, some of which fail, hang or are killed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from tests.distributed.ranks import as_group, codes_of

from steadytrain.distributed import heartbeat, process_group
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.errors import InputError, RankLostError
from steadytrain.launch.supervise import free_port

Tensors = dict[str, dict[str, torch.Tensor]]


def _gathers(group: Group) -> dict[str, torch.Tensor]:
    rank = group.world.rank
    gathered = group.all_gather_json({"rank": rank, "text": "ä" * (1 + 500 * rank)})
    metadata, tensors = group.broadcast([1, "a"], {"w": torch.full((2, 3), float(rank)), "n": torch.tensor(rank)})
    assert metadata == [1, "a"] and [value["rank"] for value in gathered] == [0, 1] and len(gathered[1]["text"]) == 501
    each = group.all_gather(torch.tensor([rank], dtype=torch.uint8))
    return {**tensors, "each": torch.cat(each), "sharing": torch.tensor(group.sharing)}


def _programs(group: Group) -> Tensors:
    return {"gathers": _gathers(group), "in_turn": _in_turn(group), "one_fails": _one_fails(group)}


@pytest.fixture(scope="module")
def ranks() -> list[Tensors]:
    """What two ranks saw, by program."""
    return as_group(_programs, 2)


def test_json_and_tensors_go_between_ranks(ranks: list[Tensors]) -> None:
    for gathered in (rank["gathers"] for rank in ranks):
        assert gathered["w"].tolist() == [[0.0] * 3] * 2 and int(gathered["n"]) == 0
        assert gathered["each"].tolist() == [0, 1]
        assert int(gathered["sharing"]) == 2, "both use the same cores"


def _in_turn(group: Group) -> dict[str, torch.Tensor]:
    began = time.monotonic()
    group.run_first_then_rest(lambda: time.sleep(0.5 if group.world.is_first else 0.0), is_first=group.world.is_first)
    return {"seconds": torch.tensor(time.monotonic() - began)}


def test_the_others_wait_for_their_turn(ranks: list[Tensors]) -> None:
    assert all(float(rank["in_turn"]["seconds"]) >= 0.5 for rank in ranks)


def _one_fails(group: Group) -> dict[str, torch.Tensor]:
    expected = InputError if group.world.rank == 1 else RankLostError
    with pytest.raises(expected, match="no such file") as caught, group.all_or_none():
        if group.world.rank == 1:
            raise InputError("no such file: b.rec")
    return {"named": torch.tensor("rank 1 on" in str(caught.value))}


def test_where_one_fails_the_others_hear_which_and_why(ranks: list[Tensors]) -> None:
    assert [bool(rank["one_fails"]["named"]) for rank in ranks] == [True, False]


def _killed(group: Group) -> dict[str, torch.Tensor]:
    if group.world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_gather_json(None)
    except RankLostError:
        os._exit(RankLostError.exit_code)
    return {}


def test_a_killed_rank_is_noticed_at_once() -> None:
    began = time.monotonic()
    assert codes_of(_killed, 2)[0] == [RankLostError.exit_code, -signal.SIGKILL]
    assert time.monotonic() - began < heartbeat.SILENT


def _first_frozen(group: Group) -> dict[str, torch.Tensor]:
    if group.world.is_first:
        os.kill(os.getpid(), signal.SIGSTOP)  # with the place where all met: to the others a machine without power
    else:
        group.all_gather_json(None)
    return {}


def test_a_rank_says_for_whom_it_waits_where_the_first_one_never_comes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_group, "WAITING_SECONDS", 0.01)
    monkeypatch.setattr(process_group, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    port = free_port()
    with pytest.raises(RankLostError, match=f"rank 1 of 2 could not meet the others at 127.0.0.1:{port}"):
        Group(World(rank=1, size=2, address="127.0.0.1", port=port))
    said = f"rank 1 of 2 has waited 0.01 s for rank 0 at 127.0.0.1:{port}, and waits up to 0.0166667 minutes"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.slow
def test_where_the_first_rank_is_frozen_the_others_end_though_nothing_answers_them() -> None:
    codes, code = codes_of(_first_frozen, 2, {"SILENT": 2.0, "GRACE": 1.0, "BEAT": 0.2}, ends={0})
    assert codes == [None, RankLostError.exit_code]
    assert "rank 0" in code and "has not responded for 2 s" in code


def _frozen(group: Group) -> dict[str, torch.Tensor]:
    if group.world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        group.all_gather_json(None)  # never comes back: the pulse ends the process
    return {}


def test_a_frozen_rank_is_named_and_the_others_end() -> None:
    codes, code = codes_of(_frozen, 2, {"SILENT": 2.0, "GRACE": 1.0, "BEAT": 0.2}, ends={1})
    assert codes == [RankLostError.exit_code, None]
    assert "rank 1 on" in code and "no heartbeat for 2 s" in code


@pytest.mark.parametrize("device", [None, torch.device("cuda", 3)])
def test_a_group_of_gpus_is_bound_to_this_ranks_one_from_the_start(
    device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def new_group(**options: object) -> object:
        asked.append(options)
        return object()

    monkeypatch.setattr("torch.distributed.new_group", new_group)
    group = object.__new__(Group)
    group.new_group("gloo" if device is None else "nccl", device=device)
    assert [options["device_id"] for options in asked] == [device]


def test_an_engine_on_a_gpu_asks_for_a_group_that_is_bound_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []
    group = object.__new__(Group)
    group.world = World()
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(group, "new_group", lambda backend, device: asked.append((backend, device)), raising=False)
    Engine(torch.device("cuda", 3), group)
    assert asked == [("nccl", torch.device("cuda", 3))]
