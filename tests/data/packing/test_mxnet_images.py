"""A living MXNet 1.9.1 decodes what is packed here: every encoding, and what became of odd files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.data.packing.odd import GROUPS
from tests.data.packing.pictures import picture, write_folder

from steadytrain.data.images.decode import decode
from steadytrain.data.images.encode import Encoding, Subsampling
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

READ = """
import json, sys
import mxnet as mx
told = []
def ask(decode):
    try:
        pixels = decode()
        return [list(pixels.shape), float(pixels.astype("float64").mean())]
    except Exception:
        return None
file = mx.recordio.MXRecordIO(sys.argv[1], "r")
while (record := file.read()) is not None:
    image = mx.recordio.unpack(record)[1]
    told.append([ask(lambda: mx.image.imdecode(image).asnumpy()), ask(lambda: mx.recordio.unpack_img(record)[1])])
print("TOLD" + json.dumps(told))
"""

Decoded = tuple[list[int], float]  # shape, mean of all values


class Seen(NamedTuple):
    """What MXNet made of a record: its own decoder, and the OpenCV that Python has; None where it could not."""

    own: Decoded | None
    python: Decoded | None


def _read(path: Path) -> list[Seen]:
    python = os.environ.get("STEADYTRAIN_MXNET_PYTHON")
    if not python:
        pytest.skip("STEADYTRAIN_MXNET_PYTHON is not set: it names the Python of an environment with MXNet 1.9.1")
    variables = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
    done = subprocess.run([python, "-c", READ, str(path)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Seen(*row) for row in json.loads(done.stdout.split("TOLD")[1])]


@pytest.mark.parametrize("subsampling", ["420", "444"])
def test_mxnet_decodes_both_kinds_of_chroma(tmp_path: Path, subsampling: Subsampling) -> None:
    folder = write_folder(tmp_path / "a", {"cat": 2, "dog": 2}, size=(70, 50), suffix=".bmp")
    [(path, _)] = pack(folder, tmp_path / "set", encoding="jpg", subsampling=subsampling)
    for number, seen in enumerate(_read(path)):
        assert seen.own is not None and seen.own[0] == [50, 70, 3]
        assert abs(seen.own[1] - np.asarray(picture(number, (70, 50)), np.float64).mean()) < 2


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("encoding", ["jpg", "png", "webp", "raw"])
def test_mxnet_decodes_every_encoding_that_the_page_says_it_does(
    tmp_path: Path, encoding: Encoding, grey: bool
) -> None:
    folder = write_folder(tmp_path / "a", {"cat": 2, "dog": 2}, size=(70, 50), suffix=".bmp")
    [(path, _)] = pack(folder, tmp_path / "set", encoding=encoding, grey=grey)
    for number, seen in enumerate(_read(path)):
        expected = np.asarray(picture(number, (70, 50)).convert("L" if grey else "RGB"), np.float64).mean()
        assert (seen.own is not None) is (encoding in ("jpg", "png"))
        assert seen.python is not None
        assert seen.python[0][:2] == [50, 70]
        assert seen.python[1] == pytest.approx(expected, abs=1.0 if encoding == "webp" else 0.3)
        assert seen.own is None or seen.own[1] == pytest.approx(expected, abs=0.3)


def test_what_becomes_of_odd_files_is_decoded_by_mxnet_to_the_same_picture(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"plain": 3, "odd": 0})
    for number, odd in enumerate(odd for rows in GROUPS.values() for odd in rows):
        odd.make(photos / "odd" / f"{number:03d}.jpg")
    [(path, card)] = pack(photos, tmp_path / "set", max_bad=999)
    images = _read(path)
    assert len(images) == card.num_images > 50
    with Records.open(path) as records:
        for number, seen in enumerate(images):
            ours = np.asarray(decode(records.image(number)).convert("RGB"), np.float64)
            assert seen.own is not None, number
            assert seen.own[0] == list(ours.shape)
            assert seen.own[1] == pytest.approx(ours.mean(), abs=0.5)
