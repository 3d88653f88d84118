"""An archive of class folders gives the listing that the unpacked folder would give."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.data.sources.samples import content, encoded, found, require_same, told, write_tar

from steadytrain.data.sources.folder import list_folder
from steadytrain.errors import DataError

TREES = {
    "classes": ["b/2.jpg", "b/10.JPG", "B/x.png", "10/a.webp", "2/a b.jpeg", "b/notes.txt", "README", "loose.jpg"],
    "deep": ["cat/z.jpg", "cat/day/1.jpg", "cat/day/deep/2.jpg", "cat/dax/3.jpg", "cat/day-2/4.jpg", "dog/1.jpg"],
    "hidden": ["cat/1.jpg", "dog/1.jpg", ".git/x.png", "cat/._1.jpg", "__MACOSX/cat/._1.jpg", "cat/.k/2.jpg", ".x"],
    "splits": ["train/cat/1.jpg", "train/dog/2.jpg", "val/dog/1.jpg", "val/x.txt", "test/cat/4.jpg", "LICENSE"],
    "test alone": ["train/cat/1.jpg", "train/dog/2.jpg", "test/cat/4.jpg"],
    "train is a class": ["train/1.jpg", "bus/1.jpg"],
    "accents": ["caf\u0065\u0301/a.jpg", "日本/b c.jpg"],
}


def _tree(root: Path, names: Iterable[str]) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"{number} {name}".encode())
    return root


def _tar(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=".")
    return path


def _zip(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.write(file, file.relative_to(folder))
    return path


@pytest.mark.parametrize("pack", [_tar, _zip])
@pytest.mark.parametrize("case", TREES)
def test_the_listing_is_that_of_the_folder(tmp_path: Path, case: str, pack: Callable[[Path, Path], Path]) -> None:
    folder = _tree(tmp_path / "data", TREES[case])
    archive = pack(folder, tmp_path / "archive")
    require_same(found(archive, tmp_path / "scratch"), list_folder(folder))


@pytest.mark.parametrize("form", ["tar", pytest.param("tar.zst", marks=pytest.mark.slow)])
def test_real_archives_are_listed_as_their_folders(
    data_folder: Path, extracted: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    name = {"tar": "clothing-10.tar", "tar.zst": "cifar10-png.tar.zst"}[form]
    require_same(found(data_folder / name, tmp_path), list_folder(extracted(name)), every=97)


@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "posix"])
def test_what_gnu_tar_writes(extracted: Callable[[str], Path], tmp_path: Path, form: str) -> None:
    if shutil.which("tar") is None:
        pytest.skip("there is no tar here")
    folder = extracted("clothing-10.tar")
    command = ["tar", f"--format={form}", "-cf", str(tmp_path / "a.tar"), "-C", str(folder.parent), folder.name]
    subprocess.run(command, check=True)
    require_same(found(tmp_path / "a.tar", tmp_path), list_folder(folder), every=50)


def test_folders_around_the_classes_are_stripped(tmp_path: Path) -> None:
    folder = _tree(tmp_path / "data", TREES["splits"])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(folder, arcname="release-1.0/images")
    write = write_tar(tmp_path / "b.tar", {f"./x//{name}": b"?" for name in TREES["deep"]})
    assert [told(listing) for listing in found(tmp_path / "a.tar", tmp_path)] == [
        told(listing) for listing in list_folder(folder)
    ]
    [listing] = found(write, tmp_path)
    assert listing.names == [
        "cat/z.jpg",
        "cat/dax/3.jpg",
        "cat/day/1.jpg",
        "cat/day/deep/2.jpg",
        "cat/day-2/4.jpg",
        "dog/1.jpg",
    ]


def test_later_of_two_members_with_one_name_counts(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a/1.jpg", b"old"), ("b/1.jpg", b"b"), ("a/1.jpg", b"newer")])
    [listing] = found(path, tmp_path)
    assert listing.names == ["a/1.jpg", "b/1.jpg"]
    assert listing.sizes.tolist() == [5, 1]


def test_links_among_members_are_followed_and_others_reported(tmp_path: Path) -> None:
    _tree(tmp_path / "data", ["a/1.jpg", "b/1.jpg", "c/d/3.jpg"])
    (tmp_path / "data" / "b" / "2.jpg").symlink_to("../a/1.jpg")
    (tmp_path / "data" / "b" / "3.jpg").symlink_to("2.jpg")
    (tmp_path / "data" / "c" / "hard.jpg").hardlink_to(tmp_path / "data" / "c" / "d" / "3.jpg")
    messages: list[str] = []
    listings = found(_tar(tmp_path / "data", tmp_path / "a.tar"), tmp_path, messages)
    require_same(listings, list_folder(tmp_path / "data"))
    assert messages == []
    (tmp_path / "data" / "b" / "4.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "data" / "b" / "5.jpg").symlink_to("5.jpg")
    [listing] = found(_tar(tmp_path / "data", tmp_path / "a.tar"), tmp_path, messages)
    assert len(listing) == 6
    assert messages == ["2 members skipped (./b/4.jpg, a link; ./b/5.jpg, a link)"]


def test_images_of_one_name_in_several_archives_are_several_images(tmp_path: Path) -> None:
    for part in range(3):
        write_tar(tmp_path / f"p{part}.tar", {"a/1.jpg": b"a%d" % part, "b/1.jpg": b"b%d" % part})
    [listing] = found(tmp_path / "p*.tar", tmp_path)
    assert [content(listing, number) for number in range(6)] == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]
    assert listing.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_two_archives_of_one_class_are_refused(tmp_path: Path) -> None:
    inner = {name: write_tar(tmp_path / "x.tar", {"1.jpg": name.encode()}).read_bytes() for name in ("a", "b", "c")}
    apart = {"x/a.tar": inner["a"], "._b.tar": b"no tar", "b.TAR": inner["b"], "read.me.txt": b"x"}
    [listing] = found(write_tar(tmp_path / "inner.tar", apart), tmp_path)
    assert (listing.classes, content(listing, 1)) == (("a", "b"), b"b")
    with pytest.raises(DataError, match=r"x/a\.tar and y/a\.tar in .* have one name, and each is a class of that name"):
        found(write_tar(tmp_path / "outer.tar", {**apart, "y/a.tar": inner["c"]}), tmp_path)
    for place in ("x", "y"):
        write_tar(tmp_path / place / "a.tar", {"1.jpg": b"x"})
    with pytest.raises(DataError, match="have one name"):
        found(tmp_path / "{x,y}" / "a.tar", tmp_path)


def test_archives_that_hold_nothing_but_compressed_ones_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds archives \(a\.tar\.gz, b\.zip\) and no images beside them: unpack it"):
        found(write_tar(tmp_path / "a.tar", {"a.tar.gz": b"x", "b.zip": b"x"}), tmp_path)


def test_names_that_lead_elsewhere_are_shown_and_not_followed(tmp_path: Path) -> None:
    names = ["a/../../../etc/x.jpg", "/b/1.jpg", "a/2.jpg"]
    messages: list[str] = []
    [listing] = found(write_tar(tmp_path / "a.tar", dict.fromkeys(names, b"x")), tmp_path, messages)
    assert listing.names == ["a/2.jpg", "b/1.jpg"]
    assert messages == ["1 member skipped (a/../../../etc/x.jpg, a path with ..)"]


def test_a_class_list_fixes_the_order(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"cat/1.jpg": b"1", "dog/1.jpg": b"2"})
    [listing] = found(path, tmp_path, classes=("dog", "elk", "cat"))
    assert listing.names == ["dog/1.jpg", "cat/1.jpg"]
    assert listing.labels.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"lacks: dog\. Did you mean dogs\?"):
        found(path, tmp_path, classes=("cat", "dogs"))


REFUSED = {
    "flat": (["1.jpg", "2.jpg"], r"have no classes: give their labels in a file with --labels"),
    "one class": (["cat/1.jpg", "cat/2.jpg"], "in no class|only one class, cat"),
    "no images": (["a/x.txt", "b/y.txt"], "holds no images"),
    "folders alone": (["a/.x"], "holds no images"),
    "twice": (["train/a/1.jpg", "val/a/1.jpg", "valid/a/1.jpg"], "holds both val and valid: keep one"),
    "val alone knows": (["train/a/1.jpg", "train/b/1.jpg", "val/elk/1.jpg"], "the class list lacks: elk"),
    "composed twice": (["caf\u0065\u0301/a.jpg", "caf\u00e9/b.jpg"], "two folders that are both named café"),
    "very deep": (["/".join(["a"] * 5000) + "/1.jpg"], "is 5,000 folders deep; at most 100 are read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_remedy(tmp_path: Path, case: str) -> None:
    names, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        found(write_tar(tmp_path / "a.tar", dict.fromkeys(names, b"x")), tmp_path)


def test_a_class_without_images_is_refused_as_in_a_folder(tmp_path: Path) -> None:
    folder = _tree(tmp_path / "data", ["a/1.jpg", "b/1.jpg"])
    (folder / "dog").mkdir()
    with pytest.raises(DataError, match=r"1 class folder holds no image in .*a\.tar \(dog\)"):
        found(_tar(folder, tmp_path / "a.tar"), tmp_path)


def test_one_archive_for_each_class_and_one_for_each_split(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_tar(tmp_path / "each" / f"{name}.tar", {"1.png": encoded(1), "2.png": encoded(2)})
    [listing] = found(tmp_path / "each", tmp_path / "scratch")
    assert (listing.classes, listing.names) == (("cat", "dog"), ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"])
    for split in ("train", "test"):
        write_tar(tmp_path / "splits" / f"{split}.tar", {"cat/1.png": b"x", "dog/2.png": b"y"})
    listings = found(tmp_path / "splits", tmp_path / "scratch")
    assert [(listing.split, listing.names) for listing in listings] == [
        ("train", ["cat/1.png", "dog/2.png"]),
        ("test", ["cat/1.png", "dog/2.png"]),
    ]


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_tiny_imagenet_goes_in_as_it_is_handed_out(tmp_path: Path, form: str) -> None:
    """A flat val/images, whose classes stand in val/val_annotations.txt; boxes; a test set without labels."""
    data = tmp_path / "tiny-imagenet-200"
    train = [f"train/{wnid}/images/{wnid}_{n}.JPEG" for wnid in ("n01443537", "n01629819") for n in range(3)]
    _tree(data, [*train, *(f"val/images/val_{n}.JPEG" for n in range(3)), "test/images/test_0.JPEG"])
    (data / "wnids.txt").write_text("n01629819\nn01443537\n")
    (data / "train" / "n01443537" / "n01443537_boxes.txt").write_text("n01443537_0.JPEG\t0\t10\t63\t58\n")
    lines = ["val_0.JPEG\tn01629819\t0\t32\t44\t62", "val_2.JPEG\tn01443537\t5\t0\t57\t6"]
    (data / "val" / "val_annotations.txt").write_text("\n".join(lines))
    source = data if form == "folder" else _tar(data.parent, tmp_path / "a.tar")
    train_listing, val = found(source, tmp_path / "scratch")
    assert (len(train_listing), train_listing.classes) == (6, ("n01443537", "n01629819"))
    assert [*zip(val.names, val.labels.tolist(), strict=True)] == [
        ("val/images/val_2.JPEG", 0),
        ("val/images/val_0.JPEG", 1),
    ]
    assert content(val, 1) == (data / "val" / "images" / "val_0.JPEG").read_bytes()
    passed_over = {"val/images/val_1.JPEG", "val/val_annotations.txt", "test/images/test_0.JPEG"}
    assert set(val.passed_over) == passed_over
    (data / "val" / "val_annotations.txt").write_text("val_0.JPEG n01629819\n")
    if form == "folder":
        with pytest.raises(
            DataError, match=r"line 1 of val/val_annotations\.txt is not an image name followed by its class"
        ):
            found(source, tmp_path / "scratch")
