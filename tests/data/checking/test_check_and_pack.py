"""What check finds in a source of any kind is what packing that source then makes of it: the same images, no other."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.packing.pictures import picture
from tests.data.sources.samples import encoded, write_tar
from tests.data.sources.test_arrays_idx import write_idx

from steadytrain.data.checking.findings import Report
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.packing.pack import pack
from steadytrain.errors import DataError, TooManyBadError


def _file(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


JPEG = _file(picture(1, (64, 48)), "JPEG")
BAD = {
    "cut.png": encoded(50)[:-60],
    "cut.jpg": JPEG[: len(JPEG) // 2],
    "page.jpg": b"<html>404</html>",
    "empty.png": b"",
    "float.tif": _file(Image.new("F", (9, 9)), "TIFF"),
}
ODD = {
    "grey.png": _file(picture(2, mode="L"), "PNG"),
    "cmyk.jpg": _file(picture(3).convert("CMYK"), "JPEG"),
    "palette.gif": _file(picture(4).convert("P"), "GIF"),
    "long.png": _file(picture(5, (400, 4)), "PNG"),
    "really.jpg": encoded(60),
}


def images(*, bad: bool = True) -> dict[str, bytes]:
    """Names below a folder of classes: twelve pictures a class, odd ones and bad ones among them."""
    files = {f"{name}/{n:02d}.png": encoded(n + 20 * (name == "dog")) for name in ("cat", "dog") for n in range(12)}
    files |= {f"cat/{name}": data for name, data in ODD.items()}
    return files | ({f"dog/{name}": data for name, data in BAD.items()} if bad else {})


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _split(folder: Path) -> Path:
    _write(folder / "train", images())
    return _write(folder / "val", {f"{name}/{n}.png": encoded(90 + n) for n in range(3) for name in ("cat", "dog")})


def _listed(folder: Path) -> Path:
    rows = [f"{n}\t{int(name[0] == 'd')}\t{name}\n" for n, name in enumerate(images())]
    _write(folder, images() | {"a.lst": "".join([*rows, "99\t0\tcat/gone.png\n"]).encode()})
    return folder / "a.lst"


def _table(folder: Path) -> Path:
    rows = [f"{name},{name.partition('/')[0]}\n" for name in images()]
    _write(folder, images() | {"a.csv": "".join(["path,label\n", *rows]).encode()})
    return folder / "a.csv"


def _zip(folder: Path) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in images().items():
            archive.writestr(name, data)
    return folder / "a.zip"


def _packed_tar(folder: Path) -> Path:
    path = write_tar(folder / "b.tar", images())
    (folder / "a.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder / "a.tar.gz"


def _shards(folder: Path) -> Path:
    for number, name in enumerate(("cat", "dog")):
        files = [(file_name, data) for file_name, data in images().items() if file_name.startswith(name)]
        members = [
            member
            for n, (file_name, data) in enumerate(files)
            for member in ((f"{name}{n:03d}.{file_name[-3:]}", data), (f"{name}{n:03d}.cls", str(number).encode()))
        ]
        write_tar(folder / f"s-{number}.tar", members)
    return folder / "s-{0,1}.tar"


def _idx(folder: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 9, 9), np.uint8)
    write_idx(folder, "train", pixels[:30], np.arange(30, dtype=np.uint8) % 3)
    write_idx(folder, "t10k", pixels[30:], np.arange(10, dtype=np.uint8) % 3)
    return folder


def _records(folder: Path) -> Path:
    """A record file with bad images in it: packed soundly, then written over."""
    [(path, _)] = pack(_write(folder / "images", images(bad=False)), folder / "a")
    data = bytearray(path.read_bytes())
    for offset in [int(line.split("\t")[1]) for line in path.with_suffix(".idx").read_text().splitlines()][3:6]:
        data[offset + 32 : offset + 60] = bytes(28)
    path.write_bytes(data)
    card = json.loads(path.with_suffix(".json").read_text())
    del card["checksum"]
    path.with_suffix(".json").write_text(json.dumps(card | {"digest": "", "spots": ""}))
    return folder / "*.rec"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": lambda folder: _write(folder, images()),
    "splits": lambda folder: _split(folder).parent,
    "list": _listed,
    "table": _table,
    "tar": lambda folder: write_tar(folder / "a.tar", images()),
    "zip": _zip,
    "tar.gz": _packed_tar,
    "shards": _shards,
    "idx": _idx,
    "records": _records,
}


def _bad(report: Report) -> list[str]:
    kinds = ("no-image", "damaged-image", "truncated-image", "unusable-image", "unreadable")
    return sorted(finding.name or "" for kind in kinds for finding in report.findings.of(kind))


@pytest.mark.parametrize("kind", SOURCES)
def test_the_images_that_are_found_bad_are_those_that_packing_leaves_out(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "data")
    messages: list[str] = []
    report = examine_source(str(source), workers=0)
    packed = pack(str(source), tmp_path / "out", max_bad=20, say=messages.append)
    assert _bad(report) == sorted(rejected.name for _, card in packed for rejected in card.rejected)
    assert len(_bad(report)) == {"idx": 0, "records": 3, "list": 6}.get(kind, 5)
    assert report.num_sound == sum(card.num_images for _, card in packed)
    assert tuple(report.classes) == packed[0].card.classes
    assert set(report.remarks) <= set(messages)


@pytest.mark.parametrize("num_bad", [5, 6])
def test_too_many_bad_images_are_too_many_for_both(tmp_path: Path, num_bad: int) -> None:
    bad = {f"cat/bad{n}.jpg": b"no image" for n in range(num_bad)}
    source = _write(tmp_path / "data", images(bad=False) | bad)
    report = examine_source(source, workers=0)
    assert report.findings.counts["too-many-bad"] == (num_bad > 5)
    if num_bad > 5:
        with pytest.raises(TooManyBadError):
            pack(source, tmp_path / "out")
    else:
        assert len(pack(source, tmp_path / "out")[0].card.rejected) == 5


REFUSED: dict[str, dict[str, bytes]] = {
    "one class": {"cat/1.png": encoded(1), "cat/2.png": encoded(2)},
    "no class": {"1.png": encoded(1), "2.png": encoded(2)},
    "no image": {"cat/notes.txt": b"x"},
    "both train and Train": {f"{name}/{label}/1.png": encoded(1) for name in ("train", "Train") for label in "ab"},
    "archives beside folders": {"a.tar": b"", "cat/1.png": encoded(1), "dog/1.png": encoded(2)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_packing_refuses_is_refused_by_check_in_the_same_words(tmp_path: Path, case: str) -> None:
    source = _write(tmp_path / "data", REFUSED[case])
    with pytest.raises(DataError) as caught:
        pack(source, tmp_path / "out")
    report = examine_source(source, workers=0)
    assert [finding.detail for finding in report.findings.of("refused")] == [str(caught.value)]
    assert not report.is_usable
