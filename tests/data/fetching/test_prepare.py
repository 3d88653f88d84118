"""Each data set becomes record files with the split that it is known for; killed, it goes on to the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import math
import os
import re
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data.fetching.server import serve

from steadytrain.cli import main
from steadytrain.data.fetching import prepare
from steadytrain.data.fetching.catalogue import DataSet, catalogue, find_data_set
from steadytrain.data.fetching.download import WebFile
from steadytrain.data.packing.pack import PackedFile
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, FailedError

Files = Mapping[str, bytes]


def photo(seed: int, side: int = 80) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((side, side)).save(out, "JPEG", quality=90)
    return out.getvalue()


def tar(files: Files, mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def photos(names: list[str]) -> dict[str, bytes]:
    return {name: photo(number) for number, name in enumerate(names)}


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return gzip.compress(head + values.astype(np.uint8).tobytes())


def matlab(**values: object) -> bytes:
    io_module = pytest.importorskip("scipy.io")
    out = io.BytesIO()
    io_module.savemat(out, values)
    return out.getvalue()


def caltech101() -> Files:
    names = [
        f"101_ObjectCategories/{c}/image_{i:04}.jpg" for c in ("ant", "BACKGROUND_Google", "bee") for i in range(33)
    ]
    inner = tar(photos(names))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as outer:
        outer.writestr("caltech-101/101_ObjectCategories.tar.gz", inner)
        outer.writestr("caltech-101/Annotations.tar", b"x")
    return {"caltech-101.zip": out.getvalue()}


def caltech256() -> Files:
    classes = ("001.ak47", "002.american-flag", "257.clutter")
    names = [f"256_ObjectCategories/{c}/{c[:3]}_{i:04}.jpg" for c in classes for i in range(62)]
    return {"256_ObjectCategories.tar": tar(photos(names), "w")}


def cifar10() -> Files:
    def batch(n: int, seed: int) -> bytes:
        random = np.random.default_rng(seed)
        return b"".join(bytes([i % 10]) + random.bytes(3072) for i in range(n))

    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": batch(10, i) for i in range(1, 6)}
    files["cifar-10-batches-bin/test_batch.bin"] = batch(10, 9)
    files["cifar-10-batches-bin/batches.meta.txt"] = b"\n".join(b"class%d" % i for i in range(10))
    return {"cifar-10-binary.tar.gz": tar(files)}


def mnist() -> Files:
    random = np.random.default_rng(0)
    files = {}
    for part, n in (("train", 20), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte.gz"] = idx(random.integers(0, 256, (n, 28, 28)))
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(n) % 10)
    return files


def imagenette() -> Files:
    places = [
        f"imagenette2-160/{s}/n0{c}/{i}.JPEG" for s, n in (("train", 4), ("val", 2)) for c in "12" for i in range(n)
    ]
    return {"imagenette2-160.tgz": tar(photos(places))}


def pets() -> Files:
    names = [f"{breed}_{i}" for breed in ("Abyssinian", "american_bulldog") for i in range(1, 5)]
    lists = {
        "trainval.txt": "\n".join(f"{name} 1 1 1" for name in names if name[-1] in "123"),
        "test.txt": "\n".join(f"{name} 1 1 1" for name in names if name[-1] == "4"),
        "list.txt": "#Image CLASS-ID SPECIES BREED ID",
    }
    images = photos([f"images/{name}.jpg" for name in names]) | {"images/Abyssinian_1.mat": b"not an image"}
    annotations = {f"annotations/{name}": text.encode() for name, text in lists.items()}
    return {"images.tar.gz": tar(images), "annotations.tar.gz": tar(annotations)}


def food101() -> Files:
    names = [f"{dish}/{i}" for dish in ("apple_pie", "waffles") for i in range(4)]
    files = photos([f"food-101/images/{name}.jpg" for name in names])
    files["food-101/meta/train.txt"] = "\n".join(name for name in names if name[-1] != "3").encode()
    files["food-101/meta/test.txt"] = "\n".join(name for name in names if name[-1] == "3").encode()
    return {"food-101.tar.gz": tar(files)}


def cub200() -> Files:
    names = [f"00{c}.Bird_{c}/Bird_{c}_{i}.jpg" for c in (1, 2) for i in range(4)]
    files = photos([f"CUB_200_2011/images/{name}" for name in names])
    lines = [f"{i} {name}" for i, name in enumerate(names, 1)]
    files["CUB_200_2011/images.txt"] = "\n".join(lines).encode()
    files["CUB_200_2011/train_test_split.txt"] = "\n".join(f"{i} {int(i % 4 > 0)}" for i in range(1, 9)).encode()
    return {"CUB_200_2011.tgz": tar(files)}


def dtd() -> Files:
    names = [f"{c}/{c}_{i:04}.jpg" for c in ("banded", "zigzagged") for i in range(6)]
    files = photos([f"dtd/images/{name}" for name in names])
    for number, split in enumerate(("train", "val", "test")):
        files[f"dtd/labels/{split}1.txt"] = "\n".join(names[2 * number :: 6] + names[2 * number + 1 :: 6]).encode()
    return {"dtd-r1.0.1.tar.gz": tar(files)}


def flowers102() -> Files:
    sets = {"trnid": [[1, 3, 5, 7]], "valid": [[2, 4]], "tstid": [[6, 8, 9]]}
    return {
        "102flowers.tgz": tar(photos([f"jpg/image_{i:05}.jpg" for i in range(1, 10)])),
        "imagelabels.mat": matlab(labels=[[1, 2, 1, 1, 2, 2, 2, 1, 2]]),
        "setid.mat": matlab(**sets),
    }


def stl10() -> Files:
    random = np.random.default_rng(0)
    files = {"stl10_binary/class_names.txt": b"airplane\nbird\n"}
    for part, n in (("train", 6), ("test", 4)):
        files[f"stl10_binary/{part}_X.bin"] = random.bytes(n * 3 * 96 * 96)
        files[f"stl10_binary/{part}_y.bin"] = bytes(1 + i % 2 for i in range(n))
    return {"stl10_binary.tar.gz": tar(files)}


def svhn() -> Files:
    random = np.random.default_rng(0)
    return {
        f"{part}_32x32.mat": matlab(
            X=random.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), y=np.arange(1, n + 1).reshape(-1, 1) % 10 + 1
        )
        for part, n in (("train", 20), ("test", 10))
    }


def eurosat() -> Files:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in photos([f"2750/{c}/{c}_{i}.jpg" for c in ("Forest", "River") for i in range(10)]).items():
            archive.writestr(name, data)
    return {"EuroSAT.zip": out.getvalue()}


CASES: dict[str, tuple[Callable[[], Files], dict[str, int], int]] = {
    "caltech101": (caltech101, {"train": 60, "val": 6}, 2),
    "caltech256": (caltech256, {"train": 120, "val": 4}, 2),
    "cifar10": (cifar10, {"train": 50, "val": 10}, 10),
    "mnist": (mnist, {"train": 20, "val": 10}, 10),
    "imagenette-160": (imagenette, {"train": 8, "val": 4}, 2),
    "pets": (pets, {"train": 6, "val": 2}, 2),
    "food101": (food101, {"train": 6, "val": 2}, 2),
    "cub200": (cub200, {"train": 6, "val": 2}, 2),
    "dtd": (dtd, {"train": 4, "val": 4, "test": 4}, 2),
    "flowers102": (flowers102, {"train": 4, "val": 2, "test": 3}, 2),
    "stl10": (stl10, {"train": 6, "val": 4}, 2),
    "svhn": (svhn, {"train": 20, "val": 10}, 10),
    "eurosat": (eurosat, {"train": 16, "val": 4}, 2),
}


def fetch(name: str, folder: Path, *, data_set: DataSet, **options: Any) -> list[PackedFile]:
    """Fetch this data set by the name of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "find_data_set", lambda name: data_set)
        return prepare.fetch(name, folder, **options)


def small(name: str, files: Files) -> DataSet:
    """A data set of the catalogue whose files are these: same layout, other checksums."""
    known = find_data_set(name)
    assert [file.name for file in known.files] == list(files)
    remote = tuple(WebFile(name=n, urls=(), md5=hashlib.md5(d).hexdigest(), bytes=len(d)) for n, d in files.items())
    return replace(known, files=remote)


@pytest.mark.parametrize("name", CASES)
def test_each_layout_is_packed_with_its_known_split(tmp_path: Path, name: str) -> None:
    make, counts, num_classes = CASES[name]
    files = make()
    messages: list[str] = []
    with serve(files) as server:
        packed = fetch(
            name, tmp_path, mirrors=[server.address], workers=1, say=messages.append, data_set=small(name, files)
        )
        asked = len(server.asked)
        assert {f.path.name: f.card.num_images for f in packed} == {f"{name}-{s}.rec": n for s, n in counts.items()}
        assert len(packed[0].card.classes) == num_classes
        assert not [
            line for line in messages if "left out" in line and "clutter" not in line.lower() and "BACK" not in line
        ]
        again = fetch(name, tmp_path, mirrors=[server.address], say=messages.append, data_set=small(name, files))
    assert (len(server.asked), [f.path for f in again]) == (asked, [f.path for f in packed])
    assert "nothing to do" in messages[-1]


def test_images_and_labels_equal_the_arrays(tmp_path: Path) -> None:
    files = stl10()
    with serve(files) as server:
        train, _ = fetch("stl10", tmp_path, mirrors=[server.address], workers=1, data_set=small("stl10", files))
    with tarfile.open(fileobj=io.BytesIO(files["stl10_binary.tar.gz"])) as archive:
        member = archive.extractfile("stl10_binary/train_X.bin")
        assert member is not None
        raw = np.frombuffer(member.read(), np.uint8).reshape(6, 3, 96, 96)
    assert list(train.card.classes) == ["airplane", "bird"]
    with Records.open(train.path) as records:
        shown = np.asarray(Image.open(io.BytesIO(records.image(0))))
        assert np.array_equal(shown, raw[0].transpose(2, 1, 0))  # each plane is stored column by column
        assert records.labels[:].ravel().tolist() == [0, 0, 0, 1, 1, 1]


def test_clutter_is_left_out_with_a_notice(tmp_path: Path) -> None:
    files, messages = caltech256(), list[str]()
    with serve(files) as server:
        options = {
            "mirrors": [server.address],
            "workers": 1,
            "say": messages.append,
            "data_set": small("caltech256", files),
        }
        train, _ = fetch("caltech256", tmp_path / "a", **options)  # type: ignore[arg-type]
        assert "257.clutter" not in train.card.classes and train.card.counts == (60, 60)
        assert any("left out: 257.clutter, 827 images of none of the 256 classes" in line for line in messages)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../../evil.txt": b"x"}, "holds no .*trainval.txt"),
        (
            {"annotations/trainval.txt": b"../../../etc/passwd 1 1 1\n", "annotations/test.txt": b"a_1 1 1 1"},
            "the label is empty",
        ),
    ],
)
def test_names_in_an_archive_are_never_paths(tmp_path: Path, files: Files, message: str) -> None:
    values = {"images.tar.gz": pets()["images.tar.gz"], "annotations.tar.gz": tar(files)}
    with serve(values) as server, pytest.raises((DataError, FailedError), match=message):
        fetch("pets", tmp_path / "in", mirrors=[server.address], workers=1, data_set=small("pets", values))
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert not list(tmp_path.glob("in/*.rec"))


KILLED = """
import sys
from pathlib import Path
from tests.data.fetching.test_prepare import caltech256, fetch, small
fetch("caltech256", sys.argv[1], mirrors=[sys.argv[2]], workers=1, data_set=small("caltech256", caltech256()))
"""


def test_killed_three_times_it_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    files = caltech256()
    (data,) = files.values()
    with serve(files) as server:
        fetch(
            "caltech256", tmp_path / "whole", mirrors=[server.address], workers=1, data_set=small("caltech256", files)
        )
        server.sent = 0
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), server.address]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
        for share in (0.2, 0.45, 0.7):
            server.stands_at, before = share * len(data), _num_come(tmp_path)
            with subprocess.Popen(command, env=env) as process:
                _wait_for(lambda: server.sent >= server.stands_at, process)
                _wait_for(lambda before=before: _num_come(tmp_path) > before, process)  # type: ignore[misc]
                process.send_signal(signal.SIGKILL)
        server.stands_at = math.inf
        subprocess.run(command, env=env, check=True)
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in server.ranges[1:] if asked]
    assert len(starts) == 3 and starts == sorted(starts) and starts[0] > 0
    for part in ("train.rec", "val.rec", "train.idx", "val.idx", "train.lst", "val.lst"):
        whole, killed = (tmp_path / folder / f"caltech256-{part}" for folder in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()


def _num_come(folder: Path) -> int:
    """How many bytes of an archive on its way lie in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.tar.part"))


def _wait_for(is_reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not is_reached():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)


def test_every_checksum_of_torchvision_is_as_torchvision_states_it() -> None:
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "datasets"
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
    for data_set in catalogue().values():
        for file in data_set.files:
            assert re.fullmatch("[0-9a-f]{32}", file.md5) and file.bytes > 0
            assert all(url.startswith("https://") for url in file.urls) and file.urls
            if "torchvision" in data_set.checked:
                assert file.md5 in text, (data_set.name, file.name)
        assert "not fetched here" in data_set.checked
        assert data_set.licence and data_set.source and data_set.images and data_set.classes and data_set.splits


def test_the_list_names_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(name)} ", out, re.M) for name in [*catalogue(), "imagenet"])
    assert "CC BY-SA 4.0" in out
    assert main(["fetch", "--json"]) == 0
    assert '"md5": "67b4f42ca05d46448c6bb8ecd2220f6d"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cifar11"], "there is no data set cifar11 to fetch. Did you mean cifar10"),
        (["imagenet"], "register at https://image-net.org"),
        (["ImageNet", "-o", "out"], "then run steady pack FOLDER imagenet"),
        (["mnist", "--mirror", "http://93.184.215.14/"], "plain http across the internet"),
        (["-o", "x"], "no data set named"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", *argv]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("steady: ") and message in last


def test_a_command_shows_what_it_fetches_and_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = mnist()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steadytrain.data.fetching.prepare.find_data_set", lambda name: small(name, files))
    with serve(files) as server:
        assert main(["fetch", "mnist", "--mirror", server.address, "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "mnist/mnist-train.rec: 20 images of 10 classes" in out and "fetching train-images-idx3-ubyte.gz" in err
    assert sorted(path.name for path in Path("mnist/downloads/mnist").glob("[!.]*")) == sorted(files)


def test_the_list_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from steadytrain.cli import main; main(['fetch']);"
        "sys.exit(str({'torch', 'numpy'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
