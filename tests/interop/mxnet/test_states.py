"""MXNet's optimizer states: the momentum that MXNet had, and nothing else that a pickle can hold."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.interop.mxnet.cases import ask
from tests.interop.mxnet.test_graph import as_08, old_lenet

from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.convert import convert_states
from steadytrain.interop.mxnet.params import write_params
from steadytrain.interop.mxnet.states import read_states
from steadytrain.interop.mxnet.symbol import parse_symbol, write_symbol
from steadytrain.training.checkpoints import read_weights

FORMS = [pickle.dumps({0: None}), pickle.dumps({0: None, 1: bytearray(b"abc")}, protocol=2)]


def test_a_name_of_several_lines_is_refused_in_one(tmp_path: Path) -> None:
    (tmp_path / "a.states").write_bytes(b"\x80\x04\x8c\x03a\nb\x8c\x03c\rd\x93.")
    with pytest.raises(ModelError, match="could run code") as refused:
        read_states(tmp_path / "a.states")
    assert str(refused.value).isprintable()


@pytest.mark.peer
def test_momentum_is_mxnets(mxnet_python: str, tmp_path: Path) -> None:
    each = old_lenet()
    write_symbol(tmp_path / "a-symbol.json", parse_symbol(as_08(each.symbol), where="a"))
    write_params(tmp_path / "a-0000.params", each.prefixed)
    np.save(tmp_path / "images.npy", each.images)
    np.save(tmp_path / "labels.npy", np.array([3, 4], np.float32))
    files = {"symbol": "a-symbol.json", "params": "a-0000.params", "images": "images.npy", "labels": "labels.npy"}
    request = {key: str(tmp_path / name) for key, name in files.items()}
    ask(mxnet_python, [{"do": "train", "prefix": str(tmp_path / "b"), **request}], tmp_path)
    assert convert_states(tmp_path / "b-0002.states", tmp_path / "b-symbol.json", tmp_path / "m.safetensors") == 6
    momentum, about = read_weights(tmp_path / "m.safetensors")
    assert momentum.keys() == each.params.keys() - each.aux and about["optimizer"] == "sgd"
    assert {name: tuple(value.shape) for name, value in momentum.items()} == {
        name: each.params[name].shape for name in momentum
    }
    assert float(momentum["f_b"].abs().max()) > 0


class Runs:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_other_contents_are_refused_by_name_and_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.states"
    path.write_bytes(pickle.dumps({0: Runs(tmp_path / "ran")}))
    with pytest.raises(ModelError, match=r"holds pathlib\S*.*which could run code"):
        read_states(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(pickle.dumps({0: (None, None)}))
    with pytest.raises(ModelError, match=r"state 0: a tuple of 2 arrays: these are not the states of SGD"):
        read_states(path)


@given(place=st.integers(0, 200), value=st.integers(0, 255), form=st.sampled_from(FORMS))
def test_damaged_states_are_errors(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int, form: bytes
) -> None:
    path = tmp_path_factory.mktemp("states") / "a.states"
    content = bytearray(form)
    content[place % len(content)] = value
    path.write_bytes(bytes(content))
    try:
        read_states(path)
    except ModelError as error:
        assert "\n" not in str(error)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.states"
    path.write_bytes(pickle.BYTEARRAY8 + (1 << 32).to_bytes(8, "little"))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"it names 4,294,967,296 bytes and has 0\): name the \.states file$"):
            read_states(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    path.write_bytes(pickle.dumps({0: bytearray(b"x" * 300)}, protocol=5))
    with pytest.raises(ModelError, match="state 0"):
        read_states(path)
