"""The bytes of packs: whatever images lie in, however the work is done or interrupted."""

from __future__ import annotations

import io
import json
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.seams.frozen import Frozen, digests
from tests.seams.images import mark, png, write_marks, write_photos
from tests.seams.product import steady

import steadytrain as st


def _folder(work: Path, golden: Path) -> str:
    write_photos(work / "photos", golden / "images")
    return "photos"


def _files(work: Path, golden: Path) -> list[tuple[str, bytes]]:
    photos = write_photos(work / "hidden", golden / "images")
    return [(path.relative_to(photos).as_posix(), path.read_bytes()) for path in sorted(photos.rglob("*.*"))]


def _tar(path: Path, files: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _archive(work: Path, golden: Path) -> str:
    _tar(work / "photos.tar", _files(work, golden))
    return "photos.tar"


def _zip(work: Path, golden: Path) -> str:
    with zipfile.ZipFile(work / "photos.zip", "w") as archive:
        for number, (name, content) in enumerate(_files(work, golden)):
            archive.writestr(zipfile.ZipInfo(name), content, number % 2 * zipfile.ZIP_DEFLATED)
    return "photos.zip"


def _table(work: Path, golden: Path) -> str:
    lines = ["image,label"]
    for number, (name, content) in enumerate(_files(work, golden)):
        (work / "flat").mkdir(exist_ok=True)
        (work / "flat" / f"{number}{Path(name).suffix}").write_bytes(content)
        lines.append(f"flat/{number}{Path(name).suffix},{'odd' if number % 2 else 'even'}")
    (work / "labels.csv").write_text("\n".join(lines) + "\n")
    return "labels.csv"


def _list(work: Path, golden: Path) -> str:
    photos = write_photos(work / "photos", golden / "images")
    paths = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.*"))
    lines = [f"{number}\t{number % 4}\t{path}" for number, path in enumerate(paths)]
    (work / "photos" / "all.lst").write_text("\n".join(lines) + "\n")
    return "photos/all.lst"


def _webdataset(work: Path, golden: Path) -> str:
    for shard in range(3):
        files: list[tuple[str, bytes]] = []
        for number in range(4 * shard, 4 * shard + 4):
            files += [(f"{number:04d}.cls", b"%d" % (number % 3)), (f"{number:04d}.png", png(mark(number)))]
        _tar(work / f"marks-{shard:03d}.tar", files)
    return "marks-{000..002}.tar"


SOURCES: dict[str, Callable[[Path, Path], str]] = {
    "folder": _folder,
    "tar": _archive,
    "zip": _zip,
    "csv": _table,
    "lst": _list,
    "webdataset": _webdataset,
}


def _packed(work: Path) -> dict[str, str]:
    """Digests of what lies in ``out``."""
    return digests(work / "out")


@pytest.mark.parametrize("kind", SOURCES)
def test_packs_of_every_source_have_the_same_bytes(kind: str, work: Path, golden: Path, frozen: Frozen) -> None:
    source = SOURCES[kind](work, golden)
    (packed,) = st.pack(source, "out/a", encoding="pass")
    frozen(f"packs/{kind}", _packed(work))
    frozen(f"packs/{kind} card", json.loads(Path("out/a.json").read_text()))
    with st.Records.open(packed.path) as records:
        assert len(records) == packed.card.num_images


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("raw", {"encoding": "raw", "shorter_side": 24}),
        ("splits", {"encoding": "pass", "val_fraction": 0.3, "seed": 5}),
        ("per class", {"encoding": "pass", "train_per_class": 2, "seed": 1}),
        ("shards", {"encoding": "pass", "shards": 3}),
        ("chosen", {"encoding": "raw", "grey": True, "exclude": ["bee"]}),
    ],
)
def test_settings_that_need_no_encoder(
    name: str, options: dict[str, Any], work: Path, golden: Path, frozen: Frozen
) -> None:
    st.pack(_folder(work, golden), "out/a", workers=1, **options)
    frozen(f"packs/{name}", _packed(work))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("auto", {"shorter_side": 40}),
        ("auto grey", {"shorter_side": 20, "grey": True}),
        ("jpg", {"encoding": "jpg", "quality": 70, "restart": 0}),
        ("png", {"encoding": "png", "shorter_side": 32}),
        ("webp", {"encoding": "webp", "quality": 80}),
    ],
)
def test_settings_that_encode(name: str, options: dict[str, Any], work: Path, golden: Path, frozen: Frozen) -> None:
    """The encoders' bytes depend on their versions; which images, of which size, does not."""
    (packed,) = st.pack(_folder(work, golden), "out/a", workers=1, **options)
    frozen.encoded(f"packs/{name}", _packed(work))
    card = packed.card
    frozen(f"packs/{name} card", [card.num_images, dict(card.encodings), list(card.height), list(card.width)])


def test_workers_and_the_command_line_change_no_byte(work: Path, golden: Path) -> None:
    source = _folder(work, golden)
    st.pack(source, "out/a", workers=1, shorter_side=40)
    whole = _packed(work)
    steady("pack", source, "out/a", "--shorter-side", 40, "--workers", 2, "--force")
    assert _packed(work) == whole


def test_a_pack_that_was_interrupted_goes_on_to_the_same_bytes(
    work: Path, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_marks(work / "marks", 150)
    calls, clock = 0, time.monotonic

    def interrupt(done: int, total: int) -> None:
        """Press Ctrl-C after a little more than the five seconds of work that a kill may cost, by the clock."""
        nonlocal calls
        calls += 1
        if calls == 2:
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 5.1)
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        st.pack("marks", "out/a", workers=1, progress=interrupt)
    assert [name for name in _packed(work) if name.startswith(".")], "hidden work to go on from"
    messages: list[str] = []
    st.pack("marks", "out/a", workers=1, say=messages.append)
    assert any(line.startswith("continuing after ") for line in messages)
    resumed = _packed(work)
    st.pack("marks", "out/a", workers=2, force=True)
    assert _packed(work) == resumed
    frozen("packs/interrupted", resumed)


def test_merged_and_repacked_sources(work: Path, golden: Path, frozen: Frozen) -> None:
    """Several sources become one pack, and a pack is a source itself."""
    st.pack(_folder(work, golden), "first", encoding="pass", only=["ape", "cat"])
    _zip(work, golden)
    st.pack(["first.rec", "photos.zip"], "out/a", encoding="pass", max_bad=0)
    frozen("packs/merged", _packed(work))


def test_record_files_of_mxnet_are_read_and_packed_anew(work: Path, data_folder: Path, frozen: Frozen) -> None:
    (work / "photos.rec").write_bytes((data_folder / "mxnet-rec" / "im2rec" / "photos40.rec").read_bytes())
    st.pack("photos.rec", "out/a", encoding="raw", shorter_side=32)
    frozen("packs/mxnet", _packed(work))


def test_salvaged_records_and_a_new_index(work: Path, golden: Path, frozen: Frozen) -> None:
    st.pack(_folder(work, golden), "whole", encoding="pass")
    content = Path("whole.rec").read_bytes()
    Path("torn.rec").write_bytes(content[: len(content) // 2] + b"\0" * 64 + content[len(content) // 2 + 64 : -40])
    (work / "out").mkdir()
    steady("check", "torn.rec", "--salvage", "out/saved", code=None)
    Path("whole.idx").rename("whole.old")
    steady("check", "whole.rec", "--index", code=None)
    assert Path("whole.idx").read_bytes() == Path("whole.old").read_bytes()
    frozen("packs/salvaged", _packed(work))
