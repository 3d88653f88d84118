"""A living MXNet 1.9.1, in an environment of its own, reads what is written here."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.framing import MAGIC, pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter

pytestmark = pytest.mark.peer

READ = """
import hashlib, json, sys
import numpy as np
import mxnet as mx
path, size = sys.argv[1], int(sys.argv[2])
index = path[:-4] + ".idx"
file = mx.recordio.MXIndexedRecordIO(index, path, "r")
told = {"keys": [int(key) for key in file.keys], "records": []}
for key in file.keys:
    header, image = mx.recordio.unpack(file.read_idx(key))
    told["records"].append([int(header.id), np.atleast_1d(header.label).astype("float64").tolist(),
                            hashlib.sha256(image).hexdigest()])
told["sequential"] = 0
plain = mx.recordio.MXRecordIO(path, "r")
while plain.read() is not None:
    told["sequential"] += 1
if size:
    batches = mx.io.ImageRecordIter(path_imgrec=path, path_imgidx=index, data_shape=(3, size, size), batch_size=1,
                                    preprocess_threads=1)
    told["batches"] = [[float(b.label[0].asnumpy()[0]), b.data[0].asnumpy().astype("float64").mean((0, 2, 3)).tolist()]
                       for b in batches]
print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def mxnet(mxnet_python: str) -> Callable[..., dict[str, Any]]:
    """``mxnet(path, size=0)``: what MXNet reads; with a size, also by ImageRecordIter at that side."""

    def read(path: Path, size: int = 0) -> dict[str, Any]:
        variables = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
        command = [mxnet_python, "-c", READ, str(path), str(size)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout.split("TOLD")[1])
        return document

    return read


def test_packed_images_are_read_to_the_byte_and_to_the_pixel(
    mxnet: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 5, "dog": 4}, size=(32, 32))
    write_folder(folder, {"elk": 2}, size=(32, 32), suffix=".jpg")
    [(path, card)] = pack(folder, tmp_path / "data")
    answer = mxnet(path, size=32)
    with Records.open(path) as records:
        ours = [[i, [float(records.labels[i])], hashlib.sha256(records.image(i)).hexdigest()] for i in range(11)]
    assert answer["records"] == ours
    assert answer["keys"] == list(range(11))
    assert answer["sequential"] == 11
    assert [label for label, _ in answer["batches"]] == [0] * 5 + [1] * 4 + [2] * 2
    mean = np.mean([mean for _, mean in answer["batches"]], axis=0)
    assert mean / 255 == pytest.approx(card.mean, abs=2e-3)  # two of them JPEG: decoders differ by rounding


def test_label_vectors_ids_and_payloads_with_the_magic(mxnet: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    magic = struct.pack("<I", MAGIC)
    images = [b"", magic, b"abcd" + magic * 3 + b"e", b"a" + magic, magic + bytes(100) + magic]
    with RecordWriter(tmp_path / "odd.rec") as writer:
        for i, image in enumerate(images):
            writer.write(pack_header([i, 2.5, -3.0], id=7 * i) + image, key=7 * i)
        writer.write(pack_header(4.0, id=MAGIC) + b"the magic as an id", key=MAGIC)
    answer = mxnet(tmp_path / "odd.rec")
    wanted = [[7 * i, [i, 2.5, -3.0], hashlib.sha256(image).hexdigest()] for i, image in enumerate(images)]
    assert answer["records"] == [*wanted, [MAGIC, [4.0], hashlib.sha256(b"the magic as an id").hexdigest()]]


def test_real_photographs_of_a_list(
    mxnet: Callable[..., dict[str, Any]], extracted: Callable[[str], Path], tmp_path: Path
) -> None:
    root = extracted("clothing-10.tar") / "test"
    names = sorted(str(path.relative_to(root)) for path in root.glob("*/*.jpg"))[::9]
    (tmp_path / "a.lst").write_text("".join(f"{1000 - i}\t{i % 3}\t{name}\n" for i, name in enumerate(names)))
    [(path, _)] = pack(tmp_path / "a.lst", tmp_path / "a", root=root, shorter_side=64)
    answer = mxnet(path, size=64)
    assert [record[0] for record in answer["records"]] == [1000 - i for i in range(len(names))]
    assert [label for label, _ in answer["batches"]] == [i % 3 for i in range(len(names))]
