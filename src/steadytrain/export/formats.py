"""Write a network as a file that other programs run: of a module and example inputs, without a run.

:func:`steadytrain.models.exported.open_module` opens what it writes. A network that is exported by
:mod:`steadytrain.export.export` is checked as well.

>>> import tempfile, torch
>>> from steadytrain.models.exported import engine_for, open_module
>>> net = torch.nn.Linear(4, 2).eval()
>>> path = Path(tempfile.mkdtemp()) / "net.pt2"
>>> write_module(net, torch.zeros(2, 4), path, metadata={"made by": "hand"})
>>> opened = open_module(path)
>>> torch.equal(opened.module(torch.ones(7, 4)), net(torch.ones(7, 4))), opened.metadata
(True, {'made by': 'hand'})
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from steadytrain.errors import ModelError, SteadyError, first_line
from steadytrain.files import replacing
from steadytrain.models.engines.engine import EngineFormat, Metadata, StoredPrecision
from steadytrain.models.exported import engine_for
from steadytrain.training.precision import DTYPES, store


def write_module(
    module: nn.Module,
    example: Tensor | Sequence[Tensor],
    path: Path,
    numbers: StoredPrecision = "fp32",
    *,
    engine: EngineFormat | None = None,
    calibration: Callable[[], Iterable[Tensor]] = tuple,
    metadata: Metadata | None = None,
) -> None:
    """Write the file of an engine: inputs ``images``, outputs ``logits`` (of several: numbered), for any batch size.

    Args:
        module: in evaluation mode.
        example: its input, or several.
        path: of the file; whole or not at all.
        numbers: that it computes in.
        engine: that it is for; None: the usual one for its ending.
        calibration: gives float32 inputs from whose ranges the scales of int8 follow.
        metadata: text by name, which is found in the file.

    Raises:
        ModelError: the network cannot be expressed so, is too large, or a library is not installed.
        StorageError: the file cannot be written.
    """
    assert not module.training, "export wants a network in evaluation mode"
    row = engine or engine_for(path)
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    # An exporter takes a dimension of 1 for one that is always 1.
    inputs = tuple(torch.cat([tensor, tensor]) if tensor.shape[0] == 1 else tensor for tensor in inputs)
    with _exporting(row.title, numbers), replacing(path) as part:
        if numbers == "int8":
            assert row.quantize is not None
            row.quantize(module, inputs, part, calibration())
        elif numbers != "fp32" and row.is_halved_first:
            row.write(Half(module, numbers), inputs, part, numbers)
        else:
            row.write(module, inputs, part, numbers)
        if metadata:
            row.add_metadata(part, metadata)


class Half(nn.Module):
    """A network that computes in 16 bits between images and logits of 32; the module itself is left as it is.

    Batch norms keep their 32 bits, as in training with ``pure-bf16``.
    """

    def __init__(self, module: nn.Module, numbers: Literal["fp16", "bf16"]) -> None:
        super().__init__()
        self.dtype = DTYPES[numbers]
        self.module = store(copy.deepcopy(module), self.dtype)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images.to(self.dtype))
        return logits.float()


@contextmanager
def _exporting(title: str, numbers: str) -> Iterator[None]:
    """Silence the exporters' output, and turn their failures into a ModelError."""
    disabled, interval = logging.root.manager.disable, tqdm.monitor_interval
    logging.disable(logging.WARNING)
    tqdm.monitor_interval = 0  # no thread that watches a bar which nobody sees
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (SteadyError, OSError):
        raise
    except Exception as error:
        raise ModelError(f"{title} cannot take this network in {numbers} ({first_line(error)})") from error
    finally:
        logging.disable(disabled)
        tqdm.monitor_interval = interval


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
