"""MXNet's optimizer states, ``PREFIX-0007.states``: a pickle, read without running anything that is in it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

from steadytrain.errors import ModelError, first_line
from steadytrain.files import require_regular
from steadytrain.interop.mxnet.params import Array, read_array

_MAX_BYTES = 8 << 30


class _NDArray:
    """Stand-in for an MXNet array in a pickle: its bytes, in the form of a ``.params`` file."""

    handle: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.handle = state.get("handle") if isinstance(state, dict) else None


class _Unpickler(pickle._Unpickler):
    """Unpickler that allows only MXNet arrays and bytes; other names are refused before they are looked up.

    It is Python's own in Python: the one in C allocates whatever number a damaged file names.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name == "NDArray" and module.partition(".")[0] == "mxnet":
            return _NDArray
        if (module, name) in (("builtins", "bytearray"), ("__builtin__", "bytearray")):
            return bytearray
        if (module, name) == ("_codecs", "encode"):
            return _encode
        full = f"{module}.{name}"[:200]
        raise _RefusedError(full if full.isprintable() else repr(full))

    def load_bytearray8(self) -> None:
        """Read a bytearray; Python's own takes the memory that a damaged file asks for, and only then its bytes."""
        me: Any = self  # what typeshed does not know of Python's own
        size = int.from_bytes(me.read(8), "little")
        if len(data := me.read(size)) < size:
            raise pickle.UnpicklingError(f"it names {size:,} bytes and has {len(data):,}")
        me.append(bytearray(data))

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: load_bytearray8}


class _RefusedError(Exception):
    pass


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Encode text as bytes, as pickles of Python's older protocols ask for."""
    return text.encode("latin1") if isinstance(text, str) else b""


def read_states(path: Path) -> dict[int, Array | None]:
    """Read the momentum of SGD by the number of its parameter; None where there is none yet.

    Parameters are numbered in the order of the module's ``param_names``: the symbol's arguments, data and labels aside.

    Raises:
        ModelError: no such file, damaged, or states of another optimizer, which are refused by name.
    """
    try:
        require_regular(path)
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelError(f"{path} has {size:,} bytes: at most {_MAX_BYTES:,} are read")
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except _RefusedError as error:
        raise ModelError(
            f"{path} holds {error}, which could run code and is not read: save the states without the optimizer"
            " (dump_optimizer=False); the weights do not need them"
        ) from error
    except Exception as error:  # whatever a damaged pickle raises
        why = first_line(error)
        raise ModelError(f"{path} is no optimizer state of MXNet ({why}): name the .states file") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__} and no states by number: name the .states file")
    states: dict[int, Array | None] = {}
    for key, value in content.items():
        if not isinstance(key, int):
            raise ModelError(f"{path} has states by {key!r} instead of numbers: those of Module are read")
        states[key] = _momentum(value, path, key)
    return states


def _momentum(value: object, path: Path, key: int) -> Array | None:
    """The array of one state; None where there is none yet. Raises ModelError."""
    if value is None:
        return None
    if isinstance(value, tuple):  # Adam's two moments look like multi_precision's momentum and weight: neither is read
        raise ModelError(f"{path}, state {key}: a tuple of {len(value)} arrays: {_OTHER}")
    if not isinstance(value, _NDArray) or not isinstance(value.handle, bytes | bytearray):
        raise ModelError(f"{path}, state {key}: a {type(value).__name__}: {_OTHER}")
    data = bytes(value.handle)
    return read_array(io.BytesIO(data), len(data), f"{path}, state {key}")


_OTHER = "these are not the states of SGD with momentum (Adam's and others' are not read); training begins without them"
