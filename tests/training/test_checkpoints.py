"""A checkpoint is whole or absent, and what comes back is what went in, to the last bit."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forked import start

from steadytrain import files
from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.errors import CheckpointError, FailedError, ModelError, RunError, StorageError
from steadytrain.events import Ended
from steadytrain.models import read_weights
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps
from steadytrain.training.session.opening import _newest_checkpoint

plain_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text(st.characters(blacklist_characters="/"), max_size=5) | st.integers(0, 99)
trees = st.recursive(
    plain_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)


def save(directory: Path, step: int, state: dict[str, Any], *, keep: int | None = None) -> checkpoints.Written:
    plain, tensors = checkpoints.split(state)
    return checkpoints.save(directory, step, plain, checkpoints.stage(tensors), keep=keep)


@given(tree=trees)
@settings(max_examples=60, deadline=None)
def test_plain_values_come_back_as_they_were(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = save(tmp_path_factory.mktemp("c"), 1, {"tree": tree}).path
    assert checkpoints.load(place)["tree"] == tree


def test_what_no_checkpoint_holds_is_named() -> None:
    with pytest.raises(FailedError, match=r"optimizer/history is a set, which no checkpoint holds: keep tensors"):
        checkpoints.split({"optimizer": {"lr": 0.1, "history": {1}}})


def test_tensors_of_a_state_go_with_it() -> None:
    gc.disable()
    try:
        _, tensors = checkpoints.split({"model": {"w": torch.ones(2)}})
        kept = weakref.ref(tensors["/model/w"])
        del tensors
        assert kept() is None, "a GPU's memory would stay in use until garbage is collected"
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.randn(3, 5) * 50).to(dtype)
    back = checkpoints.load(save(tmp_path, 1, {"t": value}).path)["t"]
    assert back.dtype == dtype
    assert back.equal(value)


def test_not_a_number_and_infinity_keep_their_bits(tmp_path: Path) -> None:
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    back = checkpoints.load(save(tmp_path, 1, {"t": value}).path)["t"]
    assert back.view(torch.int32).equal(value.view(torch.int32))


def test_channels_last_layout_is_kept(tmp_path: Path) -> None:
    value = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = checkpoints.load(save(tmp_path, 1, {"t": value}).path)["t"]
    assert back.equal(value)
    assert back.stride() == value.stride()


def test_tensors_that_share_memory_are_all_saved(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    state = {"whole": whole, "same": whole, "part": whole[2:4], "turned": whole.view(2, 5).t()}
    back = checkpoints.load(save(tmp_path, 1, state).path)
    assert all(back[name].equal(value) for name, value in state.items())


def test_an_optimizer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(4)
    optimizer.step()
    back = checkpoints.load(save(tmp_path, 1, {"o": optimizer.state_dict()}).path)["o"]
    other = torch.nn.Parameter(weight.detach().clone())
    resumed = torch.optim.SGD([other], lr=0.5)
    resumed.load_state_dict(back)
    other.grad = torch.ones(4)
    for each in (optimizer, resumed):
        each.step()
    assert other.equal(weight)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000):
        save(tmp_path, step, {"step": step}, keep=2)
    assert [checkpoints.load(place)["step"] for place in checkpoints.saved(tmp_path)] == [10, 100_000_000]


def test_old_ones_that_a_kill_spared_go_when_the_run_is_taken_up_again(tmp_path: Path) -> None:
    recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
    run = Run.create(tmp_path / "run", recipe)
    for step in (5, 10, 15):
        save(run.checkpoints, step, {"step": step})
    state = _newest_checkpoint(run, None, print)
    assert state is not None and state["step"] == 15
    assert [place.name for place in checkpoints.saved(run.checkpoints)] == ["step-00000010", "step-00000015"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_the_mode_that_the_umask_asks_for(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        place = save(tmp_path, 1, {"w": torch.ones(4)}).path
        checkpoints.write_weights(tmp_path / "model.safetensors", {"w": torch.ones(4)}, {})
    finally:
        os.umask(before)
    files = [tmp_path / "model.safetensors", place / "state.safetensors", place / "state.json"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_where_the_folder_of_the_run_was_moved_away_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoints"
    place.parent.mkdir()
    save(place, 1, {"w": torch.ones(4)})
    place.parent.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match=r"cannot write .*step-00000002: there is no folder .*run any more"):
        save(place, 2, {"w": torch.ones(4)})
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert checkpoints.newest(tmp_path / "moved" / "checkpoints") == tmp_path / "moved" / "checkpoints/step-00000001"


def test_a_damaged_newer_one_does_not_cost_the_one_just_saved(tmp_path: Path) -> None:
    for step in (50, 100):
        save(tmp_path, step, {"w": torch.ones(4)}, keep=2)
    _damage(tmp_path / "step-00000100" / "state.json", "empty")
    for step in (60, 70):
        save(tmp_path, step, {"w": torch.ones(4)}, keep=1)
        assert checkpoints.newest(tmp_path) == tmp_path / f"step-{step:08d}"
    assert len(checkpoints.saved(tmp_path)) == 2


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "empty"])
def test_a_damaged_newest_one_falls_back_to_the_one_before(name: str, harm: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"w": torch.full((64,), float(step)), "step": step})
    _damage(tmp_path / "step-00000002" / name, harm)
    messages: list[str] = []
    place = checkpoints.newest(tmp_path, messages.append)
    assert place == tmp_path / "step-00000001"
    assert len(messages) == 1
    assert "step-00000002" in messages[0]


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_pipe_in_a_checkpoint_is_damage(name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoints.save(tmp_path, step, *checkpoints.split({"x": torch.ones(2)}))
    (tmp_path / "step-00000002" / name).unlink()
    os.mkfifo(tmp_path / "step-00000002" / name)
    notices = list[str]()
    assert checkpoints.newest(tmp_path, notices.append) == tmp_path / "step-00000001"
    assert "it is a pipe" in notices[0]
    os.mkfifo(tmp_path / "best.safetensors")
    with pytest.raises(CheckpointError, match="it is a pipe"):
        checkpoints.read_weights(tmp_path / "best.safetensors")


def test_when_all_are_damaged_it_says_so_and_how_to_start_afresh(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.ones(4)})
    _damage(tmp_path / "step-00000001" / "state.safetensors", "flip")
    with pytest.raises(CheckpointError, match=r"all 1 checkpoints .* delete that folder"):
        checkpoints.newest(tmp_path)


def test_an_empty_folder_has_no_newest(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None


def _save_again_and_again(place: Path) -> None:
    for step in range(1, 1000):
        save(place, step, {"w": torch.full((500_000,), float(step))}, keep=3)


def test_a_kill_while_saving_leaves_the_one_before_intact(tmp_path: Path) -> None:
    child = start(_save_again_and_again, tmp_path)
    deadline = time.monotonic() + 60
    while len(checkpoints.saved(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.kill()
    child.join()
    messages: list[str] = []
    newest_place = checkpoints.newest(tmp_path, messages.append)
    assert newest_place is not None and not messages
    step = int(newest_place.name.split("-")[1])
    assert checkpoints.load(newest_place)["w"].eq(step).all()
    save(tmp_path, 1000, {"w": torch.ones(1)}, keep=1)
    assert [place.name for place in tmp_path.iterdir()] == ["step-00001000"]


def _die_before_the_file_is_sealed(path: Path) -> None:
    vars(checkpoints)["seal"] = lambda part: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.write_weights(path, {"w": torch.ones(4)}, {})


def test_what_a_killed_writer_of_weights_left_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    checkpoints.write_weights(path, {"w": torch.zeros(4)}, {})
    child = start(_die_before_the_file_is_sealed, path)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert checkpoints.read_weights(path)[0]["w"].tolist() == [0.0] * 4
    left = next(folder for folder in tmp_path.iterdir() if folder.is_dir())
    (left / ".tmpAb12Cd").write_bytes(b"half of it")  # the name that safetensors gives a file until it is whole
    files._parts_in.cache_clear()  # a minute later, or in another process
    checkpoints.write_weights(path, {"w": torch.ones(4)}, {})
    assert [each.name for each in tmp_path.iterdir()] == ["best.safetensors"]


def test_a_full_disk_is_said_and_leaves_what_was_there(small_disk: Path) -> None:
    save(small_disk, 1, {"w": torch.ones(1000)})
    with pytest.raises(StorageError, match="the disk is full"):
        save(small_disk, 2, {"w": torch.ones(4_000_000)})
    assert [place.name for place in small_disk.iterdir()] == ["step-00000001"]
    assert checkpoints.newest(small_disk) == small_disk / "step-00000001"


def test_weights_and_what_they_are_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoints.write_weights(path, {"w": torch.ones(2)}, {"classes": ["a", "b"]})
    tensors, about = checkpoints.read_weights(path)
    assert tensors["w"].tolist() == [1.0, 1.0]
    assert about == {"classes": ["a", "b"]}
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, 1])
def test_a_flipped_bit_of_weights_is_refused_by_file_checksums_and_the_other_weights(
    place: float, tmp_path: Path
) -> None:
    best, last = tmp_path / "best.safetensors", tmp_path / "model.safetensors"
    for path in (best, last):
        checkpoints.write_weights(path, {"w": torch.ones(1000)}, {"input": {"mean": [0.485] * 40}})
    content = bytearray(best.read_bytes())
    written = re.search(rb'"steadytrain_sha256":"([0-9a-f]{12})', content)
    assert written is not None
    at = content.index(b"0.485") + 2 if place == 0.1 else round(place * (len(content) - 1))  # a digit of the header
    content[at] ^= 1
    best.write_bytes(content)
    for read, name in itertools.product((checkpoints.read_weights, read_weights), ("best", "alone")):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        remedy = f"take {last}, the last weights" if name == "best" else "take another copy of it"
        bytes_now = rf"its bytes have the SHA-256 [0-9a-f]{{12}}\.\.\., and it was written with {written[1].decode()}"
        with pytest.raises(ModelError, match=rf"^{path} is damaged: {bytes_now}\.\.\.: {remedy}$"):
            read(path)


def test_weights_of_other_programs_are_read_without_a_checksum_and_ours_by_them(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    checkpoints.write_weights(ours, {"w": torch.arange(5.0)}, {"classes": ["a"]})
    safetensors.torch.save_file(safetensors.torch.load_file(ours), theirs, metadata={"format": "pt"})
    for path in (ours, theirs):
        assert read_weights(path).tensors["w"].tolist() == checkpoints.read_weights(path)[0]["w"].tolist()
        assert timm.models.load_state_dict(str(path))["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_weights_that_another_program_wrote_anew_with_our_metadata_are_read(tmp_path: Path) -> None:
    ours, halved = tmp_path / "ours.safetensors", tmp_path / "halved.safetensors"
    checkpoints.write_weights(ours, {"a": torch.ones(5), "w": torch.arange(5.0)}, {"classes": ["a"]})
    with safetensors.safe_open(ours, framework="pt") as file:
        tensors = {name: file.get_tensor(name).half() for name in file.keys()}  # noqa: SIM118
        safetensors.torch.save_file(tensors, halved, metadata=file.metadata())
    tensors, about = checkpoints.read_weights(halved)
    assert tensors["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and about == {"classes": ["a"]}


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.float16)}
    for number in range(12):  # the library orders its metadata at random
        checkpoints.write_weights(tmp_path / f"{number}", tensors, {"classes": ["ä", "b"]})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def _damage(path: Path, harm: str) -> None:
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "cut":
        path.write_bytes(content[:-1])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "'model' is missing or of another type; remove it"),
    "a cursor of text": ({"cursor": {"step": "x", "position": 0}}, "'cursor' is missing or of another type"),
    "no machine": ({"about": {"digest": "a"}}, "'about' is missing or of another type"),
    "scores of text": ({"best": "x"}, "'best' is missing or of another type"),
    "no average": ({"ema": None}, "holds what no checkpoint of this run can"),
    "a schedule of another kind": ({"plateau": {"colour": 1}}, "holds what no checkpoint of this run can"),
    "a short generator": ({"rng": {"cpu": torch.zeros(5, dtype=torch.uint8)}}, "holds what no checkpoint of this run"),
    "no optimizer": ({"optimizer": {"state": {}, "param_groups": []}}, "^the checkpoint is of another model"),
}


def test_what_a_kill_left_of_a_checkpoint_goes_when_a_process_that_saves_begins(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    left = run.checkpoints / ".part"
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"half")
    assert _newest_checkpoint(run, None, pytest.fail) is None
    assert not left.exists()


def test_a_whole_checkpoint_with_another_content_ends_a_command_with_one_line(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.ema": 0.9}))
    list(steps(run, stop=lambda: "SIGTERM" if run.progress().position else None))
    (place,) = checkpoints.saved(run.checkpoints)
    good, number = checkpoints.load(place), checkpoints.step_of(place)
    older = {name: part for name, part in good.items() if name != "misses"}  # as of a version that did not have it
    for name, (change, words) in STRANGE.items():
        save(run.checkpoints, number, older | change if change else {})
        with pytest.raises((CheckpointError, RunError), match=words):
            list(steps(run))
            pytest.fail(name)
    save(run.checkpoints, number, good | {"about": good["about"] | {"spent": "[["}})  # that is told, and no more
    ended = list(steps(run, stop=lambda: "SIGTERM"))[-1]
    assert isinstance(ended, Ended) and ended.step == number


def test_a_file_written_in_pieces_holds_the_whole_tensors(tmp_path: Path) -> None:
    tensors = {
        "rows": torch.randn(5, 3),
        "halves": torch.randn(4, 2).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.empty(0, 3),
    }
    plain, live = checkpoints.split({"model": tensors})
    metas = {name: torch.empty_like(tensor, device="meta") for name, tensor in live.items()}

    def pieces(name: str) -> list[torch.Tensor]:
        return list(torch.split(live[name], 2)) if live[name].dim() else [live[name]]

    place = checkpoints.save(tmp_path, 3, plain, metas, pieces=pieces).path
    assert checkpoints.damage(place) is None
    loaded = checkpoints.load(place)["model"]
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    checkpoints.write_weights(tmp_path / "w.safetensors", metas, {"step": 3}, pieces=pieces)
    weights, about = checkpoints.read_weights(tmp_path / "w.safetensors")
    assert about == {"step": 3} and torch.equal(weights["/model/rows"], tensors["rows"])
