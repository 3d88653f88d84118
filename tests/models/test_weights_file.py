"""Files of weights: every usual kind is read, nothing in them is ever run, and damage is named."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import zipfile
from collections import defaultdict, deque
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from steadytrain.errors import ModelError
from steadytrain.models.weights import read_weights

STATE = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}


class Trojan:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize(
    ("value", "averaged"),
    [
        (STATE, None),
        ({"state_dict": STATE, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, None),
        ({"model": STATE, "optimizer": {"state": {}}}, None),
        ({"state_dict": {"fc.weight": torch.zeros(2, 3)}, "state_dict_ema": STATE}, "state_dict_ema"),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_checkpoints_of_training_scripts_are_read(
    tmp_path: Path, value: Any, averaged: str | None, legacy: bool
) -> None:
    path = tmp_path / "model_best.pth.tar"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    file = read_weights(path)
    assert file.averaged == averaged
    assert set(file.tensors) == set(STATE)
    assert all(torch.equal(file.tensors[name], STATE[name]) for name in STATE)
    assert (file.input, file.licence) == (None, "unknown")


def test_the_old_file_of_a_gpu_is_read_on_a_cpu(data_folder: Path) -> None:
    file = read_weights(data_folder / "weights" / "cifar-resnet" / "resnet20-12fca82f.th")
    assert file.tensors["module.linear.weight"].shape == (10, 64)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("beside", [{}, {"state_dict": STATE}])
def test_code_in_a_file_is_refused_and_never_run(tmp_path: Path, beside: dict[str, Any], legacy: bool) -> None:
    path, mark = tmp_path / "model.pth", tmp_path / "it-ran"
    torch.save({**beside, "x": Trojan(f"touch {mark}")}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        ModelError, match=r"model.pth holds more than weights \(\w+.system\).*save its state_dict alone"
    ):
        read_weights(path)
    assert not mark.exists()


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(ModelError, match=r"holds more than weights \(torch.nn.modules.linear.Linear\)"):
        read_weights(tmp_path / "model.pt")


def damaged(folder: Path) -> list[Path]:
    torch.save(STATE, folder / "cut.pth")
    save_file(STATE, folder / "cut.safetensors")
    for path in (folder / "cut.pth", folder / "cut.safetensors"):
        path.write_bytes(path.read_bytes()[:-40])
    (folder / "empty.pth").touch()
    (folder / "empty.safetensors").touch()
    (folder / "text.pth").write_text("not found\n")
    (folder / "text.safetensors").write_text("<html>404</html>")
    (folder / "plain.pkl.pth").write_bytes(pickle.dumps([1, 2], protocol=2))
    with zipfile.ZipFile(folder / "archive.pt", "w") as archive:
        archive.writestr("readme.txt", "no weights")
    (folder / "header.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    return sorted(path for path in folder.iterdir())


def test_damage_is_named(tmp_path: Path) -> None:
    for path in damaged(tmp_path):
        with pytest.raises(ModelError) as caught:
            read_weights(path)
        message = str(caught.value)
        assert path.name in message and "\n" not in message
        assert "fetch it again" in message or "holds no weights" in message


@pytest.mark.parametrize("legacy", [False, True])
@given(flips=st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_are_named_or_harmless(tmp_path: Path, legacy: bool, flips: list[tuple[int, int]]) -> None:
    path = tmp_path / "model.pth"
    torch.save({"state_dict": STATE}, path, _use_new_zipfile_serialization=not legacy)
    data = bytearray(path.read_bytes())
    for place, mask in flips:
        data[place % len(data)] ^= mask
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        read_weights(path)


@pytest.mark.parametrize("header", ["[1]", "null", '"text"', '{"input": [1]}', '{"input": null, "licence": "mit"}'])
def test_a_header_that_is_not_ours_is_passed_over(tmp_path: Path, header: str) -> None:
    save_file(STATE, tmp_path / "model.safetensors", metadata={"steadytrain": header})
    assert read_weights(tmp_path / "model.safetensors").input is None


@pytest.mark.parametrize("text", ['{"size": "x"}', '{"mean": "abc"}', '{"channels": null}', '{"std": [1, "x", 1]}'])
def test_a_header_with_impossible_values_is_named(tmp_path: Path, text: str) -> None:
    save_file(STATE, tmp_path / "model.safetensors", metadata={"steadytrain": f'{{"input": {text}}}'})
    with pytest.raises(ModelError, match=r"model.safetensors is damaged .*input\.\w+ is .*; it must be"):
        read_weights(tmp_path / "model.safetensors")


def test_a_header_nested_without_end_is_damage(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors", metadata={"steadytrain": "[" * 100_000})
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or no weights file .*recursion"):
        read_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize("value", [{}, {"epoch": 3}, {"state_dict": {"a": 1}}, [1], torch.ones(2)])
def test_a_file_without_weights_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "other.pt")
    with pytest.raises(ModelError, match=r"other.pt holds no weights"):
        read_weights(tmp_path / "other.pt")


def test_what_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ModelError, match=r"it must end in .safetensors, .pth"):
        read_weights(tmp_path / "photo.jpg")
    with pytest.raises(ModelError, match=r"there is no weights file .*nothing.pth: check --weights"):
        read_weights(tmp_path / "nothing.pth")
    with pytest.raises(ModelError, match=r"is a folder: it holds no weights file"):
        read_weights(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is a folder: name a file in it, such as .*/run/model.safetensors"):
        read_weights(tmp_path)
    with pytest.raises(ModelError, match=r"check --weights. Did you mean model.safetensors\?"):
        read_weights(tmp_path / "run" / "mdel.safetensors")
    with pytest.raises(ModelError, match=r"^cannot read /proc/self/mem: Input/output error$"):
        read_weights(Path("/proc/self/mem"))


class AverageMeter:
    """A class of a user's training script."""

    def __init__(self) -> None:
        self.values = [0.5]

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AssertionError("code of the file's class was run")


class Settings(dict[str, Any]):
    """A user's class of dictionaries, such as yacs' and Lightning's."""


@pytest.mark.parametrize(
    "beside",
    [
        {"best_acc": np.float64(0.71)},
        {"history": np.arange(4.0), "random": np.random.default_rng(0).bit_generator.state},
        {"args": argparse.Namespace(output=Path("/x"), when=datetime(2026, 1, 2), seen={1, 2})},
        {"log": defaultdict(list, {"loss": [1.0]}), "last": deque([1, 2], maxlen=2)},
        {"meter": AverageMeter(), "settings": Settings(lr=0.1, nested=Settings(a=AverageMeter()))},
        {"optimizer": {"state": {0: {"exp_avg": torch.zeros(9), "step": 3}}, "param_groups": [{"lr": 0.1}]}},
    ],
    ids=lambda value: " ".join(value),
)
@pytest.mark.parametrize("legacy", [False, True])
def test_what_else_scripts_keep_in_a_checkpoint_is_left_unread(
    tmp_path: Path, beside: dict[str, Any], legacy: bool
) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({**beside, "epoch": 3, "state_dict": STATE}, path, _use_new_zipfile_serialization=not legacy)
    file = read_weights(path)
    assert set(file.tensors) == set(STATE)
    assert all(torch.equal(file.tensors[name], STATE[name]) for name in STATE)


def test_a_whole_loss_beside_the_weights_is_left_unread(tmp_path: Path) -> None:
    torch.save({"criterion": torch.nn.CrossEntropyLoss(torch.ones(2)), "model": STATE}, tmp_path / "a.pth")
    assert set(read_weights(tmp_path / "a.pth").tensors) == set(STATE)


@pytest.mark.parametrize(
    ("value", "averaged"),
    [
        ({"net": STATE, "acc": 92.1, "epoch": 3}, None),
        ({"ckpt": {"network": {"params": STATE}}, "optim": {"m": {str(k): torch.zeros(1) for k in range(9)}}}, None),
        ({"student": {key: value + 1 for key, value in STATE.items()}, "teacher": STATE}, "teacher"),
        (Settings(weights=Settings(STATE)), None),
    ],
)
def test_weights_are_found_under_any_key(tmp_path: Path, value: Any, averaged: str | None) -> None:
    torch.save(value, tmp_path / "a.pt")
    file = read_weights(tmp_path / "a.pt")
    assert file.averaged == averaged
    assert all(torch.equal(file.tensors[name], STATE[name]) for name in STATE)
