"""Whatever is named is recognised by what it holds, or refused in one line that says what to do."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import content, encoded, found, told, write_tar

from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.find import find_all, require_there
from steadytrain.data.sources.folder import list_folder
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.tables import read_list
from steadytrain.errors import DataError


def test_suggestion_for_a_mistyped_name_is_a_source_not_a_file_beside_it(tmp_path: Path) -> None:
    for ending in ("rec", "idx", "lst", "json"):
        (tmp_path / f"photos.{ending}").write_text("")
    (tmp_path / "list.lst").write_text("")
    for name, near in {"photos": r"photos\.rec", "photos.rek": r"photos\.rec", "lits.lst": r"list\.lst"}.items():
        with pytest.raises(DataError, match=rf"Did you mean {near}\?$"):
            require_there(str(tmp_path / name))


def test_folders_and_lists_are_what_they_always_were(
    extracted: Callable[[str], Path], data_folder: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 2, "dog": 2})
    assert [told(listing) for listing in found(folder, tmp_path)] == [told(listing) for listing in list_folder(folder)]
    lst = data_folder / "mxnet-rec" / "im2rec" / "cifar120.lst"
    root = extracted("mxnet-rec/im2rec/sources.tar") / "img"
    assert [told(listing) for listing in found(lst, tmp_path, root=root)] == [told(read_list(lst, root=root))]
    (tmp_path / "list.txt").write_bytes(lst.read_bytes())
    assert [told(listing) for listing in found(tmp_path / "list.txt", tmp_path, root=root)] == [
        told(read_list(lst, root=root))
    ]
    assert not (tmp_path / "scratch").exists()


def test_names_say_nothing(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "x.zip", {f"{name}/1.png": encoded(1) for name in ("cat", "dog")})
    assert found(tar, tmp_path / "scratch")[0].classes == ("cat", "dog")
    (tmp_path / "data.txt").write_bytes(gzip.compress(b"cat/1.png,cat\ncat/1.png,cat\ndog/1.png,dog\n"))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(encoded(3))
    [listing] = found(tmp_path / "data.txt", tmp_path / "scratch")
    assert content(listing, 0) == encoded(3)  # paths start from the table, not from where it was decompressed


def test_a_folder_of_images_with_labels_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.png").write_bytes(encoded(number))
    (folder / "labels.csv").write_text("id,label\n3,cat\n0,dog\n")
    with pytest.raises(DataError, match=r"have no classes: give .*labels\.csv, if it holds their labels"):
        found(folder, tmp_path / "scratch")
    [listing] = found(folder, tmp_path / "scratch", labels=folder / "labels.csv")
    assert (listing.names, listing.labels.tolist()) == (["3.png", "0.png"], [0, 1])
    (tmp_path / "in-order.txt").write_text("cat\ndog\ncat\ndog\n")
    [listing] = found(folder, tmp_path / "scratch", labels=tmp_path / "in-order.txt")
    assert (listing.names, listing.labels.tolist()) == ([f"{n}.png" for n in range(4)], [0, 1, 0, 1])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing there": ("photo", {}, r"there is no file or folder .*photo\. Did you mean photos\?"),
    "an address": ("https://x.org/a.tar", {}, "is in a store: name a local copy"),
    "images": ("photos/cat/*.png", {}, "names 2 images without labels"),
    "folders": ("photos/*", {}, r"names .*cat, a folder: give one folder"),
    "kinds": ("{a.tar,list.csv}", {}, r"names files of several kinds \(a\.tar, list\.csv\)"),
    "tables": ("list*.csv", {}, r"names several files \(list\.csv, list2\.csv\), each a table .*: give each alone"),
    "lists": ("*.lst", {}, r"names several files \(a\.lst, b\.lst\), each a list"),
    "idx": ("*-ubyte", {}, r"names several files \(a-ubyte, b-ubyte\), each idx files"),
    "root of a folder": ("photos", {"root": Path("x")}, "--root goes with a .lst or a table, and .*photos is none"),
    "labels of a table": ("list.csv", {"labels": Path("list.csv")}, "--labels goes with a folder or an archive"),
    "no labels": ("photos", {"labels": Path("nowhere")}, "there is no file of labels .*nowhere"),
    "no root": ("list.csv", {"root": Path("nowhere")}, "there is no folder nowhere: .* with --root"),
    "mixture": (".", {}, r"holds archives \(a\.tar\) next to other data \(photos\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_end_in_one_line(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    write_tar(tmp_path / "a.tar", {"cat/1.png": b"x", "dog/1.png": b"y"})
    for name in ("list.csv", "list2.csv"):
        (tmp_path / name).write_text("photos/cat/0000.png,cat\nphotos/dog/0002.png,dog\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.lst").write_text("0\t0\tphotos/cat/0000.png\n1\t1\tphotos/dog/0002.png\n")
        (tmp_path / f"{name}-ubyte").write_bytes(struct.pack(">4BI2B", 0, 0, 8, 1, 2, 0, 1))
    source, options, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        found(source, tmp_path / "scratch", **options)
    assert "\n" not in str(error.value)


def _sources(folder: Path) -> dict[str, Path]:
    """One small source of each kind."""
    files = {f"{name}/{n}.png": encoded(n) for name in ("cat", "dog") for n in range(2)}
    write_tar(folder / "tree.tar", files)
    with zipfile.ZipFile(folder / "tree.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    write_tar(
        folder / "samples.tar",
        {"1.png": encoded(1), "1.cls": b"0", "2.png": encoded(2), "2.json": b'{"label": 1}', "2.cls": b"1"},
    )
    (folder / "gz-images-idx3-ubyte").write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 2) + bytes(8)))
    (folder / "gz-labels-idx1-ubyte").write_bytes(struct.pack(">4BI2B", 0, 0, 8, 1, 2, 0, 1))
    (folder / "data_batch_1.bin").write_bytes(bytes(3073) + b"\1" + bytes(3072))
    with RecordWriter(folder / "a.rec") as writer:
        for number in range(3):
            writer.write(pack_header(number, id=number) + encoded(number), number)
    (folder / "a.idx").unlink()
    (folder / "a.csv").write_text('path,label,split\n"1.png",cat;dog,train\n2.png,dog,val\n')
    for number in (1, 2):
        (folder / f"{number}.png").write_bytes(encoded(number))
    names = ["tree.tar", "tree.zip", "samples.tar", "gz-images-idx3-ubyte", "a.rec", "a.csv"]
    return {name: folder / name for name in names}


@pytest.mark.parametrize("name", ["tree.tar", "tree.zip", "samples.tar", "gz-images-idx3-ubyte", "a.rec", "a.csv"])
def test_damage_anywhere_ends_in_one_line_or_in_a_listing(tmp_path: Path, name: str) -> None:
    path = _sources(tmp_path)[name]
    whole = path.read_bytes()
    random = np.random.default_rng(len(whole))
    found(path, tmp_path / "scratch")
    for _ in range(100):
        damaged = bytearray(whole[: int(random.integers(1, len(whole) + 1))] if random.random() < 0.3 else whole)
        for at in random.integers(0, min(len(damaged), 3000), int(random.integers(0, 4))):
            damaged[at] = int(random.choice([0, 0x80, 0xFF, ord("9"), int(random.integers(256))]))
        path.write_bytes(damaged)
        try:
            for listing in found(path, tmp_path / "scratch"):
                assert len(listing) == len(listing.labels) == len(listing.sizes)
        except DataError as error:
            assert "\n" not in str(error)


def test_a_million_members_need_little_memory(tmp_path: Path) -> None:
    """Columns, not objects: a part of a million, and what each of them costs."""
    import tracemalloc

    count = 5_000
    header = write_tar(tmp_path / "one.tar", {"x/000000.jpg": b""}).read_bytes()[:512]
    names = [f"{'cat' if n % 2 else 'dog'}/{n:06d}.jpg" for n in range(count)]
    file = io.BytesIO()
    for name in names:
        block = bytearray(header)
        block[:100] = name.encode().ljust(100, b"\0")
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
        file.write(block)
    (tmp_path / "a.tar").write_bytes(file.getvalue() + bytes(1024))
    tracemalloc.start()
    [listing] = found(tmp_path / "a.tar", tmp_path / "scratch")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(listing) == count
    assert peak / count < 700


def test_a_list_that_leads_nowhere_says_where_it_may_start_from(tmp_path: Path) -> None:
    write_folder(tmp_path / "data" / "img", {"cat": 2, "dog": 2})
    names = sorted(str(path.relative_to(tmp_path / "data" / "img")) for path in (tmp_path / "data").rglob("*.*"))
    lst = tmp_path / "data" / "a.lst"
    lst.write_text("".join(f"{n}\t{n // 2}\t{name}\n" for n, name in enumerate(names)))
    with pytest.raises(DataError, match=r"none of the 4 paths in .*a\.lst exists .*: give --root .*img$"):
        found(lst, tmp_path)
    lst.write_text("0\t0\tx.jpg\n1\t1\ty.jpg\n")
    with pytest.raises(DataError, match=r"name the folder that holds x\.jpg, .* with --root"):
        found(lst, tmp_path)


def test_broken_link_is_named_as_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to("gone")
    with pytest.raises(DataError, match=r"photos is a broken link \(to gone\): fix it"):
        found(tmp_path / "photos", tmp_path / "scratch")


def test_a_source_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 2, "dog": 2})
    with pytest.raises(DataError, match="is listed twice, so that each of its images would be used twice"):
        find_all([str(folder), f"{folder}/."], scratch=tmp_path / "scratch", say=lambda _: None)


def test_output_inside_the_source_is_named_as_the_reason(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 2, "dog": 2})
    for out in (folder / "out" / "o", folder / "out" / "deep" / "o"):
        with pytest.raises(
            DataError, match=r"holds no image in .*data \(out\): .* is inside .*data: write it somewhere else"
        ):
            pack(folder, out)
        assert not (folder / "out").exists()
    assert [file.path.name for file in pack(folder, folder / "o")] == ["o.rec"]
    (folder / "empty").mkdir()
    with pytest.raises(DataError) as hidden:
        pack(folder, folder / ".cache" / "o")
    assert "lies in" not in str(hidden.value)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(write_folder(tmp_path / "data", {"cat": 2, "dog": 2}))
    with pytest.raises(DataError, match=r"the name of the source is empty \(an unset variable\?\)"):
        found(name, tmp_path / "scratch")


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_what_is_left_out_as_a_recycle_bin_is_named_and_may_be_excluded(tmp_path: Path, kind: str) -> None:
    files = {f"d/{name}/{n}.png": encoded(n) for name in ("#recycle", "cat", "dog") for n in range(3)}
    source = tmp_path / ("d" if kind == "folder" else f"d.{kind}")
    for name, data in files.items() if kind == "folder" else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if kind == "tar":
        write_tar(source, files)
    elif kind == "zip":
        with zipfile.ZipFile(source, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    said: list[str] = []
    [listing] = found(source, tmp_path / "scratch", said)
    assert listing.classes == ("cat", "dog")
    assert said == [f"{source}: #recycle/ left out, named like recycle bins, caches and masks: rename what is a class"]
    [(_, card)] = pack(source, tmp_path / "out", exclude=["#recycle"], say=lambda _: None)
    assert card.classes == ("cat", "dog")
    with pytest.raises(DataError, match="there is no class #recycle"):
        pack(source, tmp_path / "only", only=["#recycle", "cat"], say=lambda _: None)


def test_every_table_that_may_hold_the_labels_is_named(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded(0))
    for name in ("notes.csv", "truth.csv"):
        (tmp_path / name).write_text("path,label\na.png,cat\nb.png,dog\n")
    with pytest.raises(DataError, match=r"give .*notes\.csv or .*truth\.csv, if it holds their labels"):
        found(tmp_path, tmp_path / "scratch")


@pytest.mark.parametrize("form", ["a table", "labels"])
def test_a_table_in_a_compressed_file_of_its_own(tmp_path: Path, form: str) -> None:
    (tmp_path / "images").mkdir()
    for number in range(2):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded(number))
    text = b"id,label\n0,cat\n1,dog\n"
    (tmp_path / "labels.csv.gz").write_bytes(gzip.compress(text))
    with zipfile.ZipFile(tmp_path / "labels.csv.zip", "w") as archive:
        archive.writestr("labels.csv", text)

    def read(name: str) -> list[Listing]:
        if form == "labels":
            return found(tmp_path / "images", tmp_path / "scratch", labels=tmp_path / name)
        return found(tmp_path / name, tmp_path / "scratch", root=tmp_path / "images" if name.endswith("gz") else None)

    [listing] = read("labels.csv.gz")
    assert (listing.classes, listing.labels.tolist()) == (("cat", "dog"), [0, 1])
    with pytest.raises(DataError, match=r"labels\.csv\.zip holds .*unpack it, and give the file"):
        read("labels.csv.zip")


def test_a_workbook_is_named_with_the_way_to_a_table(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    with zipfile.ZipFile(tmp_path / "labels.xlsx", "w") as book:
        book.writestr("[Content_Types].xml", "<Types/>")
        book.writestr("xl/workbook.xml", "<workbook/>")
    (tmp_path / "labels.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504))
    for name in ("labels.xlsx", "labels.xls"):
        for source, labels in ((folder, tmp_path / name), (tmp_path / name, None)):
            with pytest.raises(DataError, match=rf"{name} is an Office document .*: save its table as CSV, and give"):
                found(source, tmp_path / "scratch", labels=labels)
