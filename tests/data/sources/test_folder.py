"""What is found in a folder, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from steadytrain.data.sources.folder import list_folder
from steadytrain.errors import DataError
from steadytrain.format import printable


def _touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * len(name))
    return root


def test_classes_and_files_are_sorted_as_imagefolder_does(tmp_path: Path) -> None:
    [listing] = list_folder(_touch(tmp_path, "b/2.jpg", "b/10.JPG", "B/x.png", "10/a.webp", "2/a b.jpeg"))
    assert listing.classes == ("10", "2", "B", "b")
    assert listing.names == ["10/a.webp", "2/a b.jpeg", "B/x.png", "b/10.JPG", "b/2.jpg"]
    assert listing.labels.tolist() == [0, 1, 2, 3, 3]
    assert listing.sizes.tolist() == [len(name) for name in listing.names]
    assert np.all(listing.times > 0)


def test_a_class_is_all_that_lies_below_its_folder(tmp_path: Path) -> None:
    [listing] = list_folder(_touch(tmp_path, "cat/z.jpg", "cat/day/1.jpg", "cat/day/deep/2.jpg", "dog/1.jpg"))
    assert listing.names == ["cat/z.jpg", "cat/day/1.jpg", "cat/day/deep/2.jpg", "dog/1.jpg"]
    assert listing.counts() == (3, 1)


def test_hidden_and_resource_files_are_as_good_as_absent(tmp_path: Path) -> None:
    names = [".DS_Store", "._1.jpg", "Thumbs.db", "desktop.ini", "@eaDir/1.jpg", "__MACOSX/2.jpg", ".cache/3.jpg"]
    _touch(tmp_path, "cat/1.jpg", "dog/1.jpg", "__MACOSX/cat/._1.jpg", ".git/x.png", *(f"cat/{name}" for name in names))
    [listing] = list_folder(tmp_path)
    assert listing.names == ["cat/1.jpg", "dog/1.jpg"]
    assert listing.passed_over == []


def test_other_files_are_skipped_and_reported(tmp_path: Path) -> None:
    [listing] = list_folder(_touch(tmp_path, "cat/1.jpg", "dog/1.jpg", "dog/notes.txt", "README", "loose.jpg"))
    assert sorted(listing.passed_over) == ["README", "dog/notes.txt", "loose.jpg"]


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train", "val"], ["train", "val"]),
        (["train", "validation", "test"], ["train", "val", "test"]),
        (["Train", "valid"], ["train", "val"]),
        (["train", "test", "annotations"], ["train", "test"]),
        (["training", "testing"], ["train", "test"]),
        (["train", "dev", "test"], ["train", "val", "test"]),
        (["train"], ["train"]),
    ],
)
def test_splits_are_recognised_and_share_the_training_classes(
    tmp_path: Path, folders: list[str], splits: list[str]
) -> None:
    for folder in folders:
        _touch(tmp_path / folder, "dog/1.jpg", *(["cat/2.jpg"] if folder.lower().startswith("train") else []))
    listings = list_folder(tmp_path)
    assert [listing.split for listing in listings] == splits
    assert all(listing.classes == ("cat", "dog") for listing in listings)
    assert [listing.labels.tolist() for listing in listings] == [[0, 1], [1], [1]][: len(splits)]
    assert listings[0].names == [f"{folders[0]}/cat/2.jpg", f"{folders[0]}/dog/1.jpg"]


@pytest.mark.parametrize(
    "names", [["train/1.jpg", "bus/1.jpg"], ["train/1.jpg", "test/1.jpg"], ["val/1.jpg", "x/1.jpg"]]
)
def test_classes_may_have_the_names_of_splits(tmp_path: Path, names: list[str]) -> None:
    [listing] = list_folder(_touch(tmp_path, *names))
    assert listing.split == ""
    assert listing.classes == tuple(sorted(name.split("/")[0] for name in names))


def test_links_are_followed_and_never_in_a_circle(tmp_path: Path) -> None:
    data = _touch(tmp_path / "data", "cat/1.jpg", "dog/1.jpg")
    far = _touch(tmp_path / "far", "2.jpg", "more/3.jpg")
    (data / "cat" / "linked").symlink_to(far)
    (data / "cat" / "again").symlink_to(far)
    (far / "back").symlink_to(data / "cat")
    (data / "dog" / "me").symlink_to("me")
    (data / "elk").symlink_to(far)
    (data / "elk" / "gone.jpg").symlink_to("nowhere")
    [listing] = list_folder(data)
    assert listing.classes == ("cat", "dog", "elk")
    assert listing.counts() == (4, 1, 4)
    assert listing.sizes[listing.names.index("elk/gone.jpg")] == -1


def test_links_that_lead_up_bring_in_no_other_class(tmp_path: Path) -> None:
    data = _touch(tmp_path / "data", "cat/1.jpg", "dog/2.jpg", "dog/in/3.jpg")
    for number, target in enumerate((tmp_path, data, data / "cat", data / "cat" / "deep")):
        (data / "cat" / "deep").mkdir(exist_ok=True)
        (data / "cat" / "deep" / f"up{number}").symlink_to(target)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "4.jpg").touch()
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    (data / "elk").symlink_to(tmp_path / "elsewhere")
    [listing] = list_folder(data)
    assert list(listing.names) == ["cat/1.jpg", "dog/2.jpg", "dog/in/3.jpg", "elk/4.jpg"]
    assert listing.labels.tolist() == [0, 1, 1, 2]


def test_names_in_any_script_and_in_none(tmp_path: Path) -> None:
    _touch(tmp_path, "caf\u0065\u0301/a.jpg", "日本/b c.jpg")
    (tmp_path / "日本" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"x")
    [listing] = list_folder(tmp_path)
    assert listing.classes == ("café", "日本")  # composed, however the disk spells it
    assert [printable(name) for name in listing.names][1:] == ["日本/b c.jpg", "日本/caf\\xe9.jpg"]


def test_a_class_list_fixes_the_order_and_may_hold_more(tmp_path: Path) -> None:
    [listing] = list_folder(_touch(tmp_path, "cat/1.jpg", "dog/1.jpg"), classes=("dog", "elk", "cat"))
    assert listing.classes == ("dog", "elk", "cat")
    assert listing.names == ["dog/1.jpg", "cat/1.jpg"]
    assert listing.labels.tolist() == [0, 2]


REFUSED = {
    "missing": ([], "there is no folder .*nothing$"),
    "empty": (["x/"], "holds no images: give a folder with one folder of images for each class"),
    "loose": (["1.jpg"], "have no classes: put the images of each class into a folder"),
    "empty class": (
        ["a/1.jpg", "b/1.jpg", "dog/"],
        r"1 class folder holds no image in .* \(dog\): add images or remove",
    ),
    "one class": (["cat/1.jpg"], "only one class, cat: a classifier needs at least two"),
    "one too high": (["images/cat/1.jpg", "images/dog/1.jpg"], r"did you mean .*images\? It holds cat, dog"),
    "one too high, beside a folder of texts": (
        ["images/cat/1.jpg", "images/dog/1.jpg", "meta/"],
        r"no image in .* \(meta\): .* \(did you mean .*images\? It holds cat, dog\)",
    ),
    "twice": (["train/a/1.jpg", "val/a/1.jpg", "valid/a/1.jpg"], "holds both val and valid: keep one"),
    "val alone knows": (["train/a/1.jpg", "train/b/1.jpg", "val/elk/1.jpg"], "the class list lacks: elk"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_remedy(tmp_path: Path, case: str) -> None:
    names, message = REFUSED[case]
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            _touch(tmp_path, name)
    with pytest.raises(DataError, match=message):
        list_folder(tmp_path if names else tmp_path / "nothing")


def test_a_class_that_the_list_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks: dgo\. Did you mean dog\?"):
        list_folder(_touch(tmp_path, "cat/1.jpg", "dgo/1.jpg"), classes=("cat", "dog"))


def test_folders_in_unnormalised_pairs_are_not_merged_in_silence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two folders that are both named café"):
        list_folder(_touch(tmp_path, "caf\u0065\u0301/a.jpg", "caf\u00e9/b.jpg"))


def test_recycle_bins_snapshots_and_caches_are_no_classes(tmp_path: Path) -> None:
    odd = ["#recycle", "#snapshot", "@Recycle", "__pycache__", "_thumbnails", "~snapshot", "@sharebin", "_vti_cnf"]
    names = [f"{name}/{n}.jpg" for name in ("cat", "dog") for n in range(3)]
    _touch(tmp_path, *names, *(f"{name}/0.jpg" for name in odd), "System Volume Information/0.jpg")
    [listing] = list_folder(tmp_path)
    assert listing.classes == ("cat", "dog") and listing.counts() == (3, 3)
    assert sorted(listing.passed_over) == sorted(f"{name}/" for name in odd)


def test_a_recycle_bin_with_many_images_is_none_either_nor_beside_one_class(tmp_path: Path) -> None:
    _touch(tmp_path, "cat/1.jpg", "dog/1.jpg", *(f"#recycle/{n}.jpg" for n in range(9)))
    assert list_folder(tmp_path)[0].classes == ("cat", "dog")
    with pytest.raises(DataError, match="only one class, cat"):
        list_folder(_touch(tmp_path / "one", "cat/1.jpg", "#recycle/1.jpg"))


@pytest.mark.parametrize(
    "names",
    [("#1", "#2"), ("@home", "office", "shop"), ("_background_noise_", "no", "yes"), ("#cat", "#dog", "#trash")],
)
def test_names_with_signs_that_are_classes_stay(tmp_path: Path, names: tuple[str, ...]) -> None:
    _touch(tmp_path, *(f"{name}/{n}.jpg" for name in names for n in range(3)))
    assert list_folder(tmp_path)[0].classes == names


def test_signs_that_are_classes_themselves_stay_however_few_they_are(tmp_path: Path) -> None:
    _touch(
        tmp_path,
        *(f"{name}/{n}.jpg" for name in "01ab" for n in range(8)),
        "#/1.jpg",
        "$/1.jpg",
        "+/1.jpg",
        "'Apapane/1.jpg",
        "<unk>/1.jpg",
        "{other}/1.jpg",
        "\u200fقطة/1.jpg",
    )
    [listing] = list_folder(tmp_path)
    assert listing.classes == ("#", "$", "'Apapane", "+", "0", "1", "<unk>", "a", "b", "{other}", "\u200fقطة")


def test_a_class_list_keeps_a_class_that_is_named_like_a_cache(tmp_path: Path) -> None:
    _touch(tmp_path, "_cached/1.jpg", "cat/1.jpg", "dog/1.jpg", "#recycle/1.jpg")
    [listing] = list_folder(tmp_path, classes=("_cached", "cat", "dog"))
    assert (listing.classes, listing.passed_over) == (("_cached", "cat", "dog"), ["#recycle/"])


def test_splits_are_found_beside_recycle_bins(tmp_path: Path) -> None:
    inside = [f"{name}/{split}/1.jpg" for name in ("cat", "dog") for split in ("train", "test")]
    assert [part.split for part in list_folder(_touch(tmp_path / "a", *inside, "@Recycle/1.jpg"))] == ["train", "test"]
    around = [f"{split}/{name}/1.jpg" for name in ("cat", "dog", "#recycle") for split in ("train", "val")]
    train, val = list_folder(_touch(tmp_path / "b", *around, "@Recycle/1.jpg"))
    assert train.classes == val.classes == ("cat", "dog")
    assert sorted(train.passed_over) == ["@Recycle/", "train/#recycle/"]


def test_what_is_a_class_in_one_split_is_one_in_all(tmp_path: Path) -> None:
    names = [f"{split}/{name}/{n}.jpg" for split in ("train", "val") for name in ("cat", "dog") for n in range(3)]
    _touch(tmp_path, *names, "train/_other/1.jpg", *(f"val/_other/{n}.jpg" for n in range(3)))
    _touch(tmp_path, "train/@sharebin/1.jpg", "val/@sharebin/1.jpg")
    train, val = list_folder(tmp_path)
    assert train.classes == val.classes == ("_other", "cat", "dog")
    assert (train.counts(), val.counts()) == ((1, 3, 3), (3, 3, 3))
    assert (list(train.passed_over), list(val.passed_over)) == (["train/@sharebin/"], ["val/@sharebin/"])
