"""Damaged and hostile files for every reader: does each end in time, in memory, and with an error of ours?

A table of targets (``TARGETS``) pairs small valid files with the function that reads them. Inputs are the files with
bytes flipped, numbers replaced by extreme ones, stretches removed, repeated, swapped or nested. Where ``atheris``
(Google's fuzzer, guided by the lines that an input reaches) can be imported, it chooses among inputs; elsewhere, and
with ``--plain``, they are drawn from a seed alone. An input fails that ends the process, takes more than 10 seconds of
the processor or 1 GiB more memory, or raises anything but an error of steadytrain's own tree (images:
``BadImageError``; a server: an answer of status 500, or an exception in its log). It is kept in ``--work``, and
``--replay FILE --only TARGET`` shows it again with its traceback. What ``--work`` holds of commands before counts: its
corpus is used with and without atheris, and the figures go on from its ``figures.json``.

usage: python benchmarks/fuzz.py --work FOLDER [--seconds 600] [--slice 20] [--only TARGET ...] [--plain] [--save]
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gzip
import io
import json
import logging
import mmap
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tarfile
import threading
import time
import traceback
import types
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image

with contextlib.suppress(ImportError):
    import atheris

GUIDED = "atheris" in globals() and "--plain" not in sys.argv and "--replay" not in sys.argv
with atheris.instrument_imports(include=["steadytrain"]) if GUIDED else contextlib.nullcontext():
    import machine
    from steadytrain.cli.options import read_recipe
    from steadytrain.config import Data, Model, Recipe
    from steadytrain.data.checking.records import examine_records
    from steadytrain.data.images.decode import BadImageError, decode, read_header
    from steadytrain.data.images.look import look_at
    from steadytrain.data.loader.decode import probe
    from steadytrain.data.packing.pack import pack
    from steadytrain.data.recordio.reader import Records
    from steadytrain.data.recordio.writer import RecordWriter
    from steadytrain.data.results.predictions import ImageResult, read_predictions
    from steadytrain.data.sources.find import find
    from steadytrain.data.sources.unpacked import Unpacked
    from steadytrain.errors import SteadyError
    from steadytrain.export.http_server import serve
    from steadytrain.export.serve import ServeSettings
    from steadytrain.interop.logs import read_log
    from steadytrain.interop.mxnet.checkpoint import open_checkpoint
    from steadytrain.interop.mxnet.params import read_params, write_params
    from steadytrain.interop.mxnet.states import read_states
    from steadytrain.interop.mxnet.symbol import read_symbol
    from steadytrain.models.exported import Description
    from steadytrain.models.weights import Input, read_weights
    from steadytrain.monitor.history_reader import read_history
    from steadytrain.reports import live
    from steadytrain.reports.page import page
    from steadytrain.reports.run_list import list_runs
    from steadytrain.reports.summary import Account
    from steadytrain.reports.watch import Watch
    from steadytrain.run import Run
    from steadytrain.training import checkpoints
    from steadytrain.training.inference.trained import Trained, read_class_file, restore

SECONDS_EACH, MEMORY_EACH, STUCK_SECONDS, MOST_BYTES = 10, 2**30, 120, 1 << 16
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
WORDS = [b"-1", b"1e308", b"-1e999", b"NaN", b"null", b"{}", b"[]", b'"x"', b"true", b"\\ud800", b"\xff", b"../../x"]
WORDS += [
    b"\0",
    b"\t",
    b"\n",
    b"9" * 400,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"%s" % (b"a" * 5000),
    b"s3://x/y",
    b"\r\n\r\n",
]
Read = Callable[[bytes], object]


class TimeUpError(BaseException):
    """An input took too long; no reader catches it."""


@dataclass(frozen=True)
class Target:
    """Valid files, and the function that reads one: ``make`` is given a folder of its own, and returns both."""

    name: str
    make: Callable[[Path], tuple[Sequence[bytes], Read]]
    errors: tuple[type[BaseException], ...] = (SteadyError,)


# -- inputs ------------------------------------------------------------------------------------------------------------


def mutate(data: bytes, draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return the data with one to five changes."""
    value = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        at = draw.randrange(len(value) + 1)
        to = min(len(value), at + draw.choice((1, 2, 4, 8, 16, 64, 512)))
        match draw.randrange(11):
            case 0 if value:
                value[at % len(value)] ^= 1 << draw.randrange(8)
            case 1:
                value[at:to] = draw.randbytes(to - at)
            case 2:
                del value[at:to]
            case 3:
                del value[at:]
            case 4:
                value[at:at] = value[at:to] * draw.choice((1, 2, 50))
            case 5:
                number = draw.choice(NUMBERS)
                kind = draw.choice(("<I", ">I", "<Q", ">Q", "<H", ">H"))
                packed = struct.pack(kind, number & (256 ** struct.calcsize(kind) - 1))
                value[at : at + len(packed)] = packed
            case 6:
                value[at : to if draw.random() < 0.5 else at] = draw.choice(WORDS)
            case 7:  # a number written in digits
                if found := list(re.finditer(rb"-?\d+(?:\.\d+)?", bytes(value[:8192]))):
                    match_ = draw.choice(found)
                    other = draw.choice([str(draw.choice(NUMBERS)).encode(), *WORDS])
                    value[match_.start() : match_.end()] = other
            case 8:  # a line, or a stretch between two lines
                lines = bytes(value).split(b"\n")
                line = lines.pop(draw.randrange(len(lines)))
                for _ in range(draw.choice((0, 1, 2))):
                    lines.insert(draw.randrange(len(lines) + 1), line)
                value = bytearray(b"\n".join(lines))
            case 9:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                value[at:to] = other[start : start + draw.choice((4, 16, 256))]
            case 10:
                fields = re.split(rb"([,:\t ])", bytes(value[:8192]))
                fields[draw.randrange(len(fields))] = draw.choice(WORDS)
                value = bytearray(b"".join(fields)) + value[8192:]
    return bytes(value[: 4 * MOST_BYTES])


# -- targets -----------------------------------------------------------------------------------------------------------


def image_bytes(kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    """Encode a small image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 16, 4), np.uint8)
    image, out = Image.fromarray(pixels, "RGBA"), io.BytesIO()
    (image if kind in ("PNG", "WEBP", "TIFF") else image.convert("RGB")).save(out, kind, **options)
    return out.getvalue()


def image_folder(folder: Path) -> Path:
    """Write two classes of four images."""
    for number in range(8):
        path = folder / "images" / "ab"[number % 2] / f"{number}.{'png' if number < 4 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes("PNG" if number < 4 else "JPEG", number))
    return folder / "images"


def packed(folder: Path) -> Path:
    """Pack them."""
    return pack(str(image_folder(folder)), folder / "a.rec", workers=1)[0].path


def read_all(path: Path) -> None:
    """Read all that a record file has."""
    with Records.open(path) as records:
        _ = records.labels, records.record_ids, records.classes, records.channels
        for number in range(min(len(records), 20)):
            records.image(number)
        records.places(np.arange(min(len(records), 20)))


def of_packed(suffix: str) -> Callable[[Path], tuple[Sequence[bytes], Read]]:
    """Return the target of one file of a packed set, beside the others."""

    def make(folder: Path) -> tuple[Sequence[bytes], Read]:
        path = packed(folder)
        file = path.with_suffix(suffix)

        def read(data: bytes) -> None:
            file.write_bytes(data)
            read_all(path)

        return [file.read_bytes()], read

    return make


def make_bare_records(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return records without anything beside them, read by the loader and by ``steady check``."""
    seeds, path = [packed(folder).read_bytes()], folder / "bare" / "b.rec"
    path.parent.mkdir()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        examine_records(path, workers=0)
        read_all(path)

    return seeds, read


def list_source(path: Path) -> None:
    """List a source, and read its images."""
    scratch = path.parent / "scratch"
    try:
        for listing in find(str(path), scratch=scratch, say=lambda _: None):
            with Unpacked(listing) as images:
                for number in range(min(len(images), 20)):
                    with contextlib.suppress(BadImageError):
                        read_header(images.image(number))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def of_source(name: str, seeds: Callable[[Path], Sequence[bytes]]) -> Callable[[Path], tuple[Sequence[bytes], Read]]:
    """Return the target of a source of images."""

    def make(folder: Path) -> tuple[Sequence[bytes], Read]:
        path = folder / name

        def read(data: bytes) -> None:
            path.write_bytes(data)
            list_source(path)

        return seeds(folder), read

    return make


def table_seeds(line: str, head: str = "") -> Callable[[Path], Sequence[bytes]]:
    """Return the text of a table whose lines are formatted of number, class and path."""

    def seeds(folder: Path) -> Sequence[bytes]:
        paths = sorted(str(path.relative_to(folder)) for path in image_folder(folder).rglob("*.*"))
        return ["".join([head, *(line.format(n, n % 2, path) for n, path in enumerate(paths))]).encode()]

    return seeds


def tar_seeds(mode: Any = "w", *, is_webdataset: bool = False) -> Callable[[Path], Sequence[bytes]]:
    """Return tars of the images."""

    def seeds(folder: Path) -> Sequence[bytes]:
        values = []
        for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode=mode, format=kind) as tar:
                for path in sorted(image_folder(folder).rglob("*.*")):
                    name = path.name if is_webdataset else f"{path.parent.name}/{'x' * 60}é{path.name}"
                    tar.add(path, name)
                    if is_webdataset:
                        info, text = tarfile.TarInfo(f"{path.stem}.cls"), str(int(path.stem) % 2).encode()
                        info.size = len(text)
                        tar.addfile(info, io.BytesIO(text))
            values.append(out.getvalue())
        return values

    return seeds


def zip_seeds(folder: Path) -> Sequence[bytes]:
    """Return zips of the images, stored and deflated."""
    values = []
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", kind) as file:
            for path in sorted(image_folder(folder).rglob("*.*")):
                file.write(path, f"{path.parent.name}/é{path.name}")
        values.append(out.getvalue())
    return values


def make_idx_arrays(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return MNIST's form: images and labels in one input, a length before the first."""
    images = struct.pack(">IIII", 0x803, 6, 8, 8) + bytes(range(64)) * 6
    labels = struct.pack(">II", 0x801, 6) + bytes([0, 1, 2, 0, 1, 2])

    def read(data: bytes) -> None:
        size = int.from_bytes(data[:2], "little")
        path = folder / "set" / "train-images-idx3-ubyte"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data[2 : 2 + size])
        path.with_name("train-labels-idx1-ubyte").write_bytes(data[2 + size :])
        list_source(path.parent)

    return [struct.pack("<H", len(images)) + images + labels], read


def make_cifar(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return CIFAR's pickles and binary batches."""
    batch = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3], b"filenames": [b"a.png"] * 4}
    place = folder / "cifar"

    def read(data: bytes) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        is_pickle = data[:1] == b"\x80"
        for name in ("data_batch_1", "test_batch"):
            (place / (name if is_pickle else f"{name}.bin")).write_bytes(data)
        list_source(place)

    return [pickle.dumps(batch, protocol=2), (bytes([1]) + bytes(3072)) * 3], read


def of_file(name: str, read: Callable[[Path], object], *seeds: bytes) -> Callable[[Path], tuple[Sequence[bytes], Read]]:
    """Return the target of a file that a function reads."""

    def make(folder: Path) -> tuple[Sequence[bytes], Read]:
        path = folder / name

        def read_file(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        return seeds, read_file

    return make


def params_seed(folder: Path) -> bytes:
    """Write MXNet's arrays of the network below."""
    shape = {"arg:fc_weight": (3, 3), "arg:fc_bias": (3,)}
    write_params(folder / "m.params", {name: np.ones(size, np.float32) for name, size in shape.items()})
    return (folder / "m.params").read_bytes()


SYMBOL = {
    "nodes": [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "Pooling", "name": "pool", "attrs": {"global_pool": "True", "kernel": "(1, 1)"}, "inputs": [[0, 0, 0]]},
        {"op": "null", "name": "fc_weight", "attrs": {"__shape__": "(3, 3)"}, "inputs": []},
        {"op": "null", "name": "fc_bias", "inputs": []},
        {
            "op": "FullyConnected",
            "name": "fc",
            "attrs": {"num_hidden": "3"},
            "inputs": [[1, 0, 0], [2, 0, 0], [3, 0, 0]],
        },
        {"op": "null", "name": "label", "inputs": []},
        {"op": "SoftmaxOutput", "name": "softmax", "inputs": [[4, 0, 0], [5, 0, 0]]},
    ],
    "arg_nodes": [0, 2, 3, 5],
    "node_row_ptr": list(range(8)),
    "heads": [[6, 0, 0]],
    "attrs": {"mxnet_version": ["int", 10901]},
}


def make_params(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return MXNet's arrays, of each version."""
    seeds = [params_seed(folder)]
    for version in range(4):
        write_params(folder / "v.params", {"arg:a": np.ones((2, 3), np.float16)}, version=version)
        seeds.append((folder / "v.params").read_bytes())
    return seeds, of_file("x.params", read_params)(folder)[1]


def make_states(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return momentum as MXNet pickles it."""
    write_params(folder / "v.params", [np.ones((2, 2), np.float32)])
    array = (folder / "v.params").read_bytes()[24:-8]
    kind = type("NDArray", (), {"__module__": "mxnet.ndarray"})
    module = types.ModuleType("mxnet.ndarray")
    vars(module)["NDArray"] = kind
    sys.modules |= {"mxnet": types.ModuleType("mxnet"), "mxnet.ndarray": module}
    momentum = kind()
    vars(momentum)["handle"] = bytearray(array)
    seeds = [pickle.dumps({0: None, 1: momentum}, protocol=protocol) for protocol in (2, 5)]
    del sys.modules["mxnet"], sys.modules["mxnet.ndarray"]
    return seeds, of_file("x.states", read_states)(folder)[1]


def make_symbol(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return MXNet's symbol, and its network with arrays."""
    (folder / "m-0001.params").write_bytes(params_seed(folder))
    path = folder / "m-symbol.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_symbol(path)
        open_checkpoint(f"mxnet:{folder / 'm'}")

    return [json.dumps(SYMBOL).encode(), json.dumps(SYMBOL, indent=1).replace("attrs", "param").encode()], read


LOGS = (
    b"INFO:root:Epoch[0] Batch [20]\tSpeed: 1234.56 samples/sec\taccuracy=0.125\n"
    b"INFO:root:Epoch[0] Train-accuracy=0.2\nINFO:root:Epoch[0] Time cost=12.3\n"
    b"INFO:root:Epoch[0] Validation-accuracy=0.25\n" * 3,
    b"Train: 0 [   0/100 (  0%)]  Loss: 6.93 (6.93)  Time: 1.0s, 64.0/s  (1.0s, 64.0/s)  LR: 1.0e-01  Data: 0.5 (0.5)\n"
    b"Test: [  10/10]  Time: 0.1 (0.1)  Loss:  2.3 (2.3)  Acc@1:  10.0 ( 12.5)  Acc@5:  50.0 ( 55.0)\n" * 3,
    b"Epoch: [0]  [ 0/10]  eta: 0:00:10  lr: 0.1  img/s: 12.5  loss: 2.3 (2.3)  acc1: 10.0 (10.0)  time: 1.0"
    b"  data: 0.1\nTest:   Acc@1 10.500 Acc@5 50.500\n" * 3,
    b'DLLL {"timestamp": "1600000000.1", "type": "LOG", "step": [0, 10], "data": {"train.loss": 6.9}}\n' * 3,
    b':::MLLOG {"namespace": "", "time_ms": 1600000000000, "event_type": "POINT_IN_TIME", "key": "eval_accuracy", '
    b'"value": 0.5, "metadata": {"epoch_num": 1}}\n' * 3,
    b"epoch,train_loss,eval_loss,eval_top1,lr\n0,2.3,2.2,10.5,0.1\n1,2.2,2.1,12.5,0.1\n",
)
PREDICTIONS = (
    ",".join(ImageResult._fields) + "\na/1.png,a.rec,0,a,a,0.9,0.9,0.1,1\na/2.png,a.rec,1,a,b,0.1,0.8,2.3,2\n"
).encode()
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /events?after=3 HTTP/1.1\r\nhost: localhost\r\nlast-event-id: 1.2\r\nconnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1:80\r\norigin: http://localhost\r\naccept-encoding: gzip\r\n\r\n",
]


def posts() -> list[bytes]:
    """Return requests for classes of an image, in each form that they may have."""
    image = image_bytes("PNG")
    text = base64.b64encode(image).decode()
    form = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + image + b"\r\n--x--\r\n"
    bodies = [
        ("image/png", image),
        ("application/json", json.dumps({"images": [text], "top": 2, "threshold": 0.1}).encode()),
        ("application/json", json.dumps({"instances": [{"b64": text}]}).encode()),
        ("multipart/form-data; boundary=x", form),
        ("application/json\r\ncontent-encoding: gzip", gzip.compress(json.dumps({"image": text}).encode())),
    ]
    head = "POST /predict?top=3 HTTP/1.1\r\nhost: localhost\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n"
    chunked = (
        "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    values = [head.format(kind, len(body)).encode() + body for kind, body in bodies]
    return [*values, chunked.encode() + b"%x\r\n" % len(image) + image + b"\r\n0\r\n\r\n", *REQUESTS]


def make_recipe(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return recipes as JSON, TOML and YAML; the first byte says which."""
    recipe = Recipe(data=Data(train="a.rec"), model=Model("resnet18"), batch_size=8)
    toml = b'batch_size = 8\nseed = 3\n[data]\ntrain = "a.rec"\n[model]\nname = "resnet18"\n'
    toml += b"[optim]\nlr = 0.1\nmilestones = [1, 2]\n"
    yaml = b"batch_size: 8\ndata:\n  train: &a a.rec\n  val: *a\nmodel: {name: resnet18}\noptim: {lr: 0.1}\n"

    def read(data: bytes) -> None:
        path = folder / f"r.{('json', 'toml', 'yaml')[data[0] % 3 if data else 0]}"
        path.write_bytes(data[1:])
        Recipe.from_dict(read_recipe(path))

    return [b"0" + recipe.to_json().encode(), b"1" + toml, b"2" + yaml], read


def kept_run(folder: Path) -> Path:
    """Copy a run that the tests keep; of its two ranks the first one's log."""
    kept = Path(__file__).parents[1] / "tests" / "golden" / "run-2026-11" / "run"
    shutil.copytree(kept, folder, ignore=shutil.ignore_patterns("events-1.jsonl", "checkpoints"))
    return folder


def make_events(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return the events of a run, read as reports and the live page do."""
    run = Run.open(kept_run(folder / "run"))
    log = run.log_path()
    lines = log.read_bytes().splitlines(keepends=True)
    few = {json.loads(line)["kind"]: line for line in reversed(lines)}  # the first of each kind

    def read(data: bytes) -> None:
        log.write_bytes(data)
        Watch(Run.open(folder / "run")).read()
        read_history(Run.open(folder / "run"))
        account = Account.of(Run.open(folder / "run"))
        if zlib.crc32(data) % 10 == 0:  # it takes longer than all the rest
            page([account], now=1.8e9)

    return [b"".join(line for line in lines if line in few.values())], read


RUN_FILES = {
    "recipe.json": b"",
    "events.jsonl": b"",
    "notes.json": b'{"tags": ["baseline", "a"], "note": "cosine"}',
    "predictions.csv": PREDICTIONS,
}


def make_run(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return the files of a run, read as lists of runs and reports do; the first byte says which."""
    run = kept_run(folder / "runs" / "run")
    log = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join([*log[:6], log[-1]]))
    names = list(RUN_FILES)
    sound = {name: data or (run / name).read_bytes() for name, data in RUN_FILES.items()}

    def read(data: bytes) -> None:
        name = names[data[0] % len(names)] if data else names[0]
        (run / name).write_bytes(data[1:])
        try:
            list_runs(run.parent)
            opened = Run.open(run)
            Account.of(opened)
        finally:
            (run / name).write_bytes(sound[name])

    return [bytes([number]) + data for number, data in enumerate(sound.values())], read


def make_description(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return what an exported file says of itself."""
    text = Description(model="digits", input=Input(size=8, channels=1), classes=("0", "1")).to_json()

    def read(data: bytes) -> None:
        Description.from_json(data.decode("utf-8", "replace"), where="a file")

    return [text.encode()], read


def make_journal(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return the journal of records that a kill cut short, and their part, a length before the first."""
    path = folder / "half.rec"
    journal, part = folder / ".half.rec.journal", folder / ".half.rec.part"
    with contextlib.suppress(KeyboardInterrupt), RecordWriter(path, work="x") as writer:
        for key in range(6):
            writer.write(bytes([key]) * 40, key)
            writer.mark({"next": key})
        raise KeyboardInterrupt
    first, second = journal.read_bytes(), part.read_bytes()

    def read(data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        journal.write_bytes(data[4 : 4 + size])
        part.write_bytes(data[4 + size :])
        with contextlib.suppress(KeyboardInterrupt), RecordWriter(path, work="x") as writer:
            assert list(writer.index_lines()) == [f"{key}\t{48 * key}\n" for key in range(len(writer))]
            raise KeyboardInterrupt

    return [struct.pack("<I", len(first)) + first + second], read


def make_image(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return images of each format, read by header, whole, as checking does and as the loader does."""
    options: list[tuple[str, dict[str, Any]]] = [(k, {}) for k in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    options += [("JPEG", {"progressive": True}), ("TIFF", {"compression": "tiff_lzw"})]

    def read(data: bytes) -> None:
        for reader in (read_header, look_at, probe, decode):
            reader(data)

    return [image_bytes(kind, **more) for kind, more in options], read


def tensor_seeds(folder: Path) -> tuple[bytes, bytes]:
    """Return the same weights as safetensors and as torch's pickle."""
    checkpoints.write_weights(folder / "w.safetensors", {"a": torch.ones(2, 3)}, {"model": {"name": "x"}})
    out = io.BytesIO()
    torch.save({"state_dict": {"a": torch.ones(2, 3)}, "epoch": 3}, out)
    return (folder / "w.safetensors").read_bytes(), out.getvalue()


def make_safetensors(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return weights, read as weights to start from, and as a run's own."""
    path = folder / "x.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_weights(path)
        checkpoints.read_weights(path)

    return tensor_seeds(folder)[:1], read


def make_pickle(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return weights that torch has pickled."""
    return tensor_seeds(folder)[1:], of_file("x.pth", read_weights)(folder)[1]


def make_checkpoint(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return the two files of a checkpoint, a length before the first."""
    place = folder / "checkpoints" / "step-00000005"
    plain, tensors = checkpoints.split({"model": {"a": torch.ones(2)}, "cursor": {"step": 5}})
    checkpoints.save(place.parent, 5, plain, tensors)
    files = sorted(path for path in place.iterdir() if path.is_file())
    first, second = (path.read_bytes() for path in files)

    def read(data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        files[0].write_bytes(data[4 : 4 + size])
        files[1].write_bytes(data[4 + size :])
        checkpoints.damage(place)
        checkpoints.load(place)

    return [struct.pack("<I", len(first)) + first + second], read


class _Failures(logging.Handler):
    """Keeps what a server logs of exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.lines.append("".join(traceback.format_exception(*record.exc_info)))


def asking(serve: Callable[[socket.socket, Callable[[], object]], object]) -> Read:
    """Run a server on a thread of this process; return what sends it bytes, and raises what it should not have done."""
    listener, is_ready, failures = socket.create_server(("127.0.0.1", 0), backlog=128), threading.Event(), _Failures()
    threading.Thread(target=serve, args=(listener, is_ready.set), daemon=True).start()
    is_ready.wait(60)
    logging.getLogger("uvicorn.error").addHandler(failures)

    def read(data: bytes) -> None:
        answer = b""
        name = listener.getsockname()
        with contextlib.suppress(ConnectionError), socket.create_connection(name, timeout=30) as connection:
            connection.sendall(data)
            with contextlib.suppress(OSError):  # it may have hung up already
                connection.shutdown(socket.SHUT_WR)
            while piece := _receive(connection, answer):
                answer += piece
        if failures.lines:
            raise RuntimeError(failures.lines.pop())
        if b"HTTP/1.1 500" in answer:
            raise RuntimeError(answer[:300].decode("latin1"))

    return read


def _receive(connection: socket.socket, answer: bytes) -> bytes:
    """Receive more of an answer; empty at its end, and once a stream of events goes on: that has none."""
    is_stream = b"text/event-stream" in answer
    connection.settimeout(1 if is_stream else 30)
    try:
        return connection.recv(65536)
    except TimeoutError:
        if is_stream:
            return b""
        raise


def make_serve(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return requests to ``steady serve``."""
    torch.save(timm.create_model("test_resnet").state_dict(), folder / "w.pth")
    settings = ServeSettings(threads=1, max_batch=4, max_wait_ms=0)

    def load() -> Trained:
        return restore(folder / "w.pth", model="timm/test_resnet", device="cpu")

    return posts(), asking(lambda listener, ready: serve(load, settings, listener, on_ready=lambda _: ready()))


def make_live(folder: Path) -> tuple[Sequence[bytes], Read]:
    """Return requests to the page of ``steady watch --web``."""
    make_events(folder)
    run = Run.open(folder / "run")

    def show(listener: socket.socket, ready: Callable[[], object]) -> None:
        ready()
        live.serve(run, listener)

    return REQUESTS, asking(show)


JSON_LINES = '{{"path": "{2}", "label": {1}, "id": {0}}}\n'
TARGETS = (
    Target("records", make_bare_records),
    Target("packed .rec", of_packed(".rec")),
    Target("packed .idx", of_packed(".idx")),
    Target("packed .lst", of_packed(".lst")),
    Target("card", of_packed(".json")),
    Target(".lst", of_source("s.lst", table_seeds("{0}\t{1}.000000\t{2}\n"))),
    Target("CSV", of_source("s.csv", table_seeds('"{2}",{1},{0}\n', "path,label,id\n"))),
    Target("TSV", of_source("s.tsv", table_seeds("{2}\t{1}\n"))),
    Target("JSON lines", of_source("s.jsonl", table_seeds(JSON_LINES))),
    Target("idx-ubyte", make_idx_arrays),
    Target("CIFAR", make_cifar),
    Target("tar", of_source("s.tar", tar_seeds())),
    Target("tar.gz", of_source("s.tar.gz", tar_seeds("w:gz"))),
    Target("WebDataset", of_source("s.tar", tar_seeds(is_webdataset=True))),
    Target("zip", of_source("s.zip", zip_seeds)),
    Target("MXNet .params", make_params),
    Target("MXNet symbol", make_symbol),
    Target("MXNet .states", make_states),
    Target("logs", of_file("x.log", read_log, *LOGS, gzip.compress(LOGS[0]))),
    Target("predictions", of_file("p.csv", lambda path: list(read_predictions(path)), PREDICTIONS)),
    Target("recipes", make_recipe),
    Target("events", make_events),
    Target("run folders", make_run),
    Target("class lists", of_file("c.txt", read_class_file, b"cat\ndog\n", b"cat\tn01\ndog\tn02\n")),
    Target("descriptions of exported files", make_description),
    Target("journals of packing", make_journal),
    Target("images", make_image, (SteadyError, BadImageError)),
    Target("safetensors", make_safetensors),
    Target("pickled weights", make_pickle),
    Target("checkpoints", make_checkpoint),
    Target("HTTP of serve", make_serve),
    Target("HTTP of watch --web", make_live),
)


# -- one input ---------------------------------------------------------------------------------------------------------


def _is_late(number: int, frame: FrameType | None) -> None:
    raise TimeUpError


def fault_of(target: Target, read: Read, data: bytes) -> str:
    """Read an input; return what is wrong: empty, or a line and a traceback. ``refused`` for an error of ours."""
    since = time.process_time()
    if not GUIDED:  # what a signal raises within atheris ends the process: there the clock is looked at afterwards
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
    try:
        read(data)
        fault = ""
    except target.errors as error:
        is_long = "\n" in str(error) or not str(error)
        fault = f"the message is not one line: {error!r}" if is_long else "refused"
    except TimeUpError:
        fault = f"more than {SECONDS_EACH} s\n{traceback.format_exc()}"
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        fault = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    spent = time.process_time() - since
    if spent > SECONDS_EACH and not fault.startswith("more"):
        fault = f"more than {SECONDS_EACH} s"
    # Asking costs milliseconds, and so much memory is not had in less time than this.
    more = more_memory() if spent > 0.05 else 0
    return f"{more >> 20} MiB more memory" if more > MEMORY_EACH else fault


_MOST = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]


def more_memory() -> int:
    """Return by how many bytes the largest memory of this process has grown since the call before."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    more, _MOST[0] = most - _MOST[0], most
    return more << 10


COUNTED = ("inputs", "refused", "guided", "ended", "seconds")


class Session:
    """A target in a process of its own: counts in shared memory, and the inputs that failed as files."""

    def __init__(self, target: Target, work: Path) -> None:
        self.target, self.kept = target, work / re.sub(r"\W+", "-", target.name.lower()).strip("-")
        self.corpus = self.kept / "corpus"
        self.corpus.mkdir(parents=True, exist_ok=True)
        self.counts = np.frombuffer(mmap.mmap(-1, 32), np.int64)  # inputs, refused, faults
        self.current = mmap.mmap(-1, 8 + 5 * MOST_BYTES)
        self.inputs = self.refused = self.guided = self.ended = 0
        self.seconds = 0.0

    def go_on_from(self, row: dict[str, Any]) -> None:
        """Begin with the figures of commands before."""
        self.inputs, self.refused, self.guided, self.ended, self.seconds = (row[name] for name in COUNTED)

    def read(self, read: Read, data: bytes) -> None:
        """Read an input, and keep it where it fails."""
        self.current[:8] = len(data).to_bytes(8, "little")
        self.current[8 : 8 + len(data)] = data
        fault = fault_of(self.target, read, data)
        self.counts[0] += 1
        self.counts[1] += fault == "refused"
        if fault not in ("", "refused"):
            self.keep(data, fault)

    def keep(self, data: bytes, fault: str) -> None:
        """Keep an input once for each kind of fault, which is its type and the place in our code."""
        places = re.findall(r'steadytrain/(\S+)", line (\d+)', fault)
        name = f"{zlib.crc32(repr((fault.split(':')[0][:60], places[-1:])).encode()):08x}"
        if not (self.kept / f"{name}.input").exists():
            (self.kept / f"{name}.txt").write_text(fault, encoding="utf-8", errors="replace")
            (self.kept / f"{name}.input").write_bytes(data)

    def run(self, seconds: float, seed: int) -> None:
        """Fuzz for so many seconds in a child process, and take up what it counted."""
        self.counts[:] = 0
        began = time.monotonic()
        child = os.fork()
        if not child:
            try:
                self._fuzz(seconds, seed)
            except BaseException:  # noqa: BLE001 - the harness is at fault, not the input
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        seen, moved, status = -1, began, None
        while status is None:
            time.sleep(0.2)
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            if self.counts[0] != seen:
                seen, moved = int(self.counts[0]), time.monotonic()
            elif status is None and time.monotonic() - moved > STUCK_SECONDS:
                os.kill(child, signal.SIGKILL)
        shutil.rmtree(f"/dev/shm/steady-fuzz-{child}", ignore_errors=True)
        size = int.from_bytes(self.current[:8], "little")
        self.ended += bool(status)
        if status and status != 3 << 8 and seen:  # ended by a signal, or by the fuzzer for it
            self.keep(self.current[8 : 8 + size], f"the process ended with status {status}: crash, or no end")
        elif status:
            machine.say(f"{self.target.name}: the harness failed, status {status}")
        self.inputs, self.refused = self.inputs + int(self.counts[0]), self.refused + int(self.counts[1])
        self.guided += GUIDED * int(self.counts[0])
        self.seconds += time.monotonic() - began

    def _fuzz(self, seconds: float, seed: int) -> None:
        signal.signal(signal.SIGPROF, _is_late)
        faulthandler.enable()
        folder = Path(f"/dev/shm/steady-fuzz-{os.getpid()}")
        folder.mkdir()
        os.chdir(folder)
        os.environ["STEADYTRAIN_CACHE"] = str(folder / "cache")
        try:
            seeds, read = self.target.make(folder)
            more_memory()
            draw = random.Random(seed)
            for data in seeds:
                self.read(read, data)
            if self.counts[1]:
                machine.say(f"{self.target.name}: {int(self.counts[1])} of {len(seeds)} seeds are refused")
            if GUIDED:
                self._guided(seconds, seeds, read)
                return
            seeds = [*seeds, *(path.read_bytes() for path in sorted(self.corpus.iterdir()))]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.read(read, mutate(draw.choice(seeds), draw, seeds))
        finally:
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)

    def _guided(self, seconds: float, seeds: Sequence[bytes], read: Read) -> None:
        for number, data in enumerate(seeds):
            (self.corpus / f"seed-{number}").write_bytes(data)
        end = time.monotonic() + seconds

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            draw = random.Random(seed)
            value = atheris.Mutate(data, max_size) if draw.random() < 0.3 else mutate(data or b"0", draw, seeds)
            return bytes(value[:max_size])

        def one(data: bytes) -> None:
            if time.monotonic() > end:
                os.chdir("/")
                shutil.rmtree(f"/dev/shm/steady-fuzz-{os.getpid()}", ignore_errors=True)
                os._exit(0)
            self.read(read, data)

        words = ["fuzz", str(self.corpus), f"-max_len={MOST_BYTES}", "-rss_limit_mb=0", "-verbosity=0"]
        # Not 0: atheris then ends the process, by exit code 77, at the first input that takes a second of the clock.
        words += [f"-timeout={STUCK_SECONDS}", "-handle_segv=0", "-len_control=0"]
        atheris.Setup(words, one, custom_mutator=mutated)
        atheris.Fuzz()


def figures(sessions: Sequence[Session], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each target, those of ``others`` as they were."""
    rows = [*others]
    for session in sessions:
        texts = [path.read_text(encoding="utf-8").splitlines()[0][:160] for path in sorted(session.kept.glob("*.txt"))]
        row = {"target": session.target.name, **{name: round(getattr(session, name)) for name in COUNTED}}
        rows.append({**row, "faults": texts})
    return {name: sum(row[name] for row in rows) for name in COUNTED} | {"targets": rows}


def main() -> None:
    """Run the targets in turns."""
    options = machine.parser(__doc__, work="inputs that failed, and the fuzzer's corpus")
    options.add_argument("--seconds", type=float, default=600, help="all targets together (600)")
    options.add_argument("--slice", type=float, default=20, help="seconds of a target in its turn (20)")
    options.add_argument("--only", nargs="+", choices=[target.name for target in TARGETS], metavar="TARGET")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--plain", action="store_true", help="draw inputs from a seed alone, without atheris")
    options.add_argument(
        "--replay", type=Path, help="read this input with the target of --only, and print its traceback"
    )
    words = options.parse_args()
    chosen = [target for target in TARGETS if words.only is None or target.name in words.only]
    if words.replay is not None:
        signal.signal(signal.SIGPROF, _is_late)
        _, read = chosen[0].make(words.work)
        print(fault_of(chosen[0], read, words.replay.read_bytes()) or "read")
        return
    work = words.work.resolve()
    sessions, end, turn = [Session(target, work) for target in chosen], time.monotonic() + words.seconds, 0
    before, path = dict[str, Any](), work / "figures.json"
    if path.exists():
        before = {row["target"]: row for row in json.loads(path.read_text())["targets"]}
    for session in sessions:
        if session.target.name in before:
            session.go_on_from(before.pop(session.target.name))
    others = [*before.values()]  # of commands that had these, which are not among --only
    while time.monotonic() < end:
        for session in sessions:
            if time.monotonic() < end:
                session.run(min(words.slice, max(1.0, end - time.monotonic())), words.seed + turn + session.inputs)
        turn += 1
        path.write_text(json.dumps(figures(sessions, others), indent=1))
        machine.say(f"turn {turn}: {sum(session.inputs for session in sessions):,} inputs")
    machine.record("fuzz", figures(sessions, others), save=words.save)


if __name__ == "__main__":
    main()
