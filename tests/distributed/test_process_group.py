"""What ranks tell each other: as real processes, some of which fail, hang or are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.distributed.ranks import as_group, codes_of

from steadytrain.distributed import heartbeat, process_group
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.heartbeat import Heartbeat
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.errors import FailedError, InputError, RankLostError, StalledError
from steadytrain.launch.supervise import free_port

QUICK = {"SILENT": 2.0, "GRACE": 1.0, "OWN_GRACE": 1.0, "BEAT": 0.2, "_TRIES": 300}
Tensors = dict[str, dict[str, torch.Tensor]]


def _gathers(group: Group) -> dict[str, torch.Tensor]:
    rank = group.world.rank
    gathered = group.all_gather_json({"rank": rank, "text": "ä" * (1 + 500 * rank)})
    metadata, tensors = group.broadcast([1, "a"], {"w": torch.full((2, 3), float(rank)), "n": torch.tensor(rank)})
    assert metadata == [1, "a"] and [value["rank"] for value in gathered] == [0, 1] and len(gathered[1]["text"]) == 501
    each = group.all_gather(torch.tensor([rank], dtype=torch.uint8))
    return {**tensors, "each": torch.cat(each), "sharing": torch.tensor(group.sharing)}


@pytest.mark.parametrize(
    ("address", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "0.0.0.0"), ("203.0.113.9", "0.0.0.0")],
    ids=["own", "name", "another machine's"],
)
def test_a_witness_listens_on_its_ranks_address_alone_where_it_can(address: str, bound: str) -> None:
    with heartbeat._listen(address) as server:
        assert server.getsockname()[0] == bound


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
    codes, code = codes_of(_first_frozen, 2, {**QUICK, "START_SILENT": 2.0}, ends={0})
    assert codes == [None, RankLostError.exit_code]
    assert "rank 0" in code and "has not responded for 2 s" in code


def _frozen(group: Group) -> dict[str, torch.Tensor]:
    if group.world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        group.all_gather_json(None)  # never comes back: the pulse ends the process
    return {}


def test_a_frozen_rank_is_named_and_the_others_end() -> None:
    codes, code = codes_of(_frozen, 2, QUICK, ends={1})
    assert codes == [RankLostError.exit_code, None]
    assert "rank 1 on" in code and "is stopped, and has sent no heartbeat for 2 s" in code


def _meet_witness(group: Group) -> None:
    """Wait until rank 0 has an answer of rank 1's witness, a process that a busy machine takes seconds to start."""
    while group.world.is_first and 1 not in group.heartbeat._reached:
        time.sleep(0.05)
    group.all_gather_json(None)


def _holds_the_lock(group: Group) -> dict[str, torch.Tensor]:
    _meet_witness(group)
    if group.world.rank == 1:
        ctypes.PyDLL(None).sleep(4)  # native code that keeps the interpreter's lock
    group.all_gather_json(None)
    return {}


def test_a_rank_whose_native_code_keeps_the_lock_is_waited_for() -> None:
    quick = {**QUICK, "SILENT": 1.0, "START_SILENT": 1.0}
    codes, errors = codes_of(_holds_the_lock, 2, quick)
    assert codes == [0, 0], errors


def _killed_while_others_compute(group: Group) -> dict[str, torch.Tensor]:
    _meet_witness(group)
    if group.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(50)
    return {}


def test_a_killed_rank_is_noticed_where_nobody_exchanges_anything() -> None:
    codes, errors = codes_of(_killed_while_others_compute, 2, {**QUICK, "SILENT": 100.0})
    assert codes == [RankLostError.exit_code, -signal.SIGKILL], errors
    assert "rank 1 on" in errors and "is gone" in errors


def _hang(*_: object, **__: object) -> None:
    """Do as NCCL that waits for its own threads, or for a network that carries nothing."""
    time.sleep(1e6)


def _fails_with_the_store(group: Group) -> dict[str, torch.Tensor]:
    pytest.MonkeyPatch().setattr("torch.distributed.destroy_process_group", _hang)
    if group.world.is_first:
        raise ValueError("no such kernel")
    group.all_gather_json(None)
    return {}


def test_the_others_read_why_the_rank_failed_that_holds_the_store_and_it_ends_though_nothing_can_be_closed() -> None:
    codes, errors = codes_of(_fails_with_the_store, 2, QUICK)
    # the other one's watch, or its exchange, which is a traceback here
    assert codes in ([1, 1], [1, RankLostError.exit_code]), errors
    assert "rank 0 on" in errors and "failed: no such kernel" in errors


def _fails_and_hangs(group: Group) -> dict[str, torch.Tensor]:
    if group.world.rank == 1:
        group.heartbeat.fail("no such kernel", exit_code=7)
        time.sleep(50)  # as a device that never finishes what was asked of it
    group.all_gather_json(None)
    return {}


def test_one_rank_of_each_machine_says_who_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr(heartbeat, "GRACE", 0.1)
    store, hosts = torch.distributed.HashStore(), ("a", "a", "a", "b", "b")  # type: ignore[attr-defined]
    beating = [Heartbeat(store, World(rank=rank, size=5), hosts) for rank in range(5)]
    ended: dict[int, tuple[str, bool]] = {}
    for rank, each in enumerate(beating[1:], start=1):
        each.end = lambda message, is_printed, rank=rank: ended.update({rank: (message, is_printed)})  # type: ignore[misc]
    try:
        beating[0].fail("no memory")
        for _ in range(500):
            if len(ended) == 4:
                break
            time.sleep(0.01)
    finally:
        for each in beating:
            each.close()
    assert {message for message, _ in ended.values()} == {"rank 0 on a failed: no memory"}
    assert [each.is_first_here() for each in beating[1:]] == [True, False, True, False]
    assert beating[2].is_first_here(lost=[1]) and not beating[4].is_first_here(lost=[1])
    assert {rank: is_printed for rank, (_, is_printed) in ended.items()} == {1: True, 2: False, 3: True, 4: False}


def test_a_failed_rank_that_hangs_before_it_leaves_ends_with_its_own_code() -> None:
    codes, errors = codes_of(_fails_and_hangs, 2, QUICK)
    assert codes == [RankLostError.exit_code, 7]
    assert "failed: no such kernel (this rank did not end by itself)" in errors


def _cannot_close(group: Group) -> dict[str, torch.Tensor]:
    pytest.MonkeyPatch().setattr("torch.distributed.destroy_process_group", _hang)
    return {}


def test_a_group_that_cannot_be_closed_keeps_no_rank() -> None:
    assert codes_of(_cannot_close, 2, {**QUICK, "CLOSE_SECONDS": 0.2})[0] == [0, 0]


def _hangs_at_first(group: Group) -> dict[str, torch.Tensor]:
    if group.world.rank == 1:
        pytest.MonkeyPatch().setattr("torch.distributed.new_group", _hang)
    group.new_group("nccl" if group.world.rank == 1 else "gloo")
    return {}


def test_a_first_exchange_that_hangs_ends_in_time_and_names_rank_network_and_remedy() -> None:
    codes, errors = codes_of(_hangs_at_first, 2, {**QUICK, "FIRST_EXCHANGE_SECONDS": 2.0})
    assert StalledError.exit_code in codes and set(codes) <= {StalledError.exit_code, RankLostError.exit_code}
    assert "rank 1 on" in errors and "has waited 2 s in opening nccl (2 ranks on" in errors
    assert "NCCL_SOCKET_IFNAME" in errors and "NCCL_DEBUG=INFO" in errors and "NCCL_P2P_DISABLE=1" in errors


def _adds_up_wrongly(group: Group) -> dict[str, torch.Tensor]:
    pytest.MonkeyPatch().setattr("torch.distributed.all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    with pytest.raises(FailedError, match=r"261,\d{3} of 262,144 sums of the first all-reduce over gloo are wrong"):
        group.new_group("gloo")
    return {}


def test_wrong_sums_are_found_before_the_first_update() -> None:
    as_group(_adds_up_wrongly, 2)


def _says_that_it_connects(group: Group) -> dict[str, torch.Tensor]:
    new_group = torch.distributed.new_group

    def said(**options: Any) -> Any:
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks\n")  # as gloo of torch 2.10
        return new_group(**options)

    pytest.MonkeyPatch().setattr("torch.distributed.new_group", said)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 1)
        group.new_group("gloo")
        os.write(1, b"{}")
        output.seek(0)
        return {"is_json": torch.tensor(output.read() == b"{}")}


def test_only_what_the_command_prints_goes_to_standard_output() -> None:
    assert all(rank["is_json"] for rank in as_group(_says_that_it_connects, 2))


def _dumps(group: Group) -> dict[str, torch.Tensor]:
    names = [entry["profiling_name"] for entry in group.collectives()]
    return {"num": torch.tensor(names.count("gloo:all_reduce"))}


def test_collectives_are_recorded() -> None:
    assert [int(rank["num"]) for rank in as_group(_dumps, 2)] == [1, 1]


def test_a_group_of_gpus_is_bound_to_this_ranks_one_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr("torch.distributed.new_group", lambda **options: asked.append(options))
    group = object.__new__(Group)
    for name in ("all_gather_json", "_try_out"):
        monkeypatch.setattr(group, name, lambda *_: None, raising=False)
    group.heartbeat, group.world = cast("Heartbeat", SimpleNamespace(at=None)), World()
    group.new_group("nccl", device=torch.device("cuda", 3))
    assert [options["device_id"] for options in asked] == [torch.device("cuda", 3)]


def test_an_engine_on_a_gpu_asks_for_a_group_that_is_bound_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []
    group = object.__new__(Group)
    group.world = World()
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(group, "new_group", lambda backend, device: asked.append((backend, device)), raising=False)
    Engine(torch.device("cuda", 3), group)
    assert asked == [("nccl", torch.device("cuda", 3))]


def test_a_rank_whose_run_was_removed_writes_nothing_and_says_nothing(tmp_path: Path) -> None:
    """Another rank was refused, and took the new run's folder away."""
    about = {"world": World(), "subgroups": {}, "collectives": list, "place": str}
    rank = SimpleNamespace(record_path=tmp_path / "gone" / "a.json", **about)
    Group.dump(cast("Group", rank))
    assert not any(tmp_path.iterdir())
