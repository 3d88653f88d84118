"""Parts of listings: every image keeps its label's name, its bytes and its id, wherever it goes."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import content, encoded, found, told, write_tar

from steadytrain.data.sources.find import find
from steadytrain.data.sources.folder import list_folder
from steadytrain.data.sources.groups import say_whole_classes
from steadytrain.data.sources.listing import Listing, Pieces, PixelShape
from steadytrain.data.sources.select import (
    Identical,
    Selection,
    choose,
    hold_out,
    merge,
    merge_sources,
    remark,
    shard,
    take,
)
from steadytrain.errors import DataError


def _listing(labels: Sequence[int], classes: Sequence[str] = "abcdefgh", ids: Sequence[int] | None = None) -> Listing:
    count = len(labels)
    return Listing(
        split="",
        root=Path("/data"),
        classes=tuple(classes),
        names=[f"{number}.jpg" for number in range(count)],
        labels=np.array(labels, np.int64),
        sizes=np.arange(count) + 100,
        times=np.arange(count) + 1000,
        ids=None if ids is None else np.array(ids),
        passed_over=["README"],
    )


def _classes(listing: Listing) -> dict[str, str]:
    """The class name of each image."""
    return {name: listing.classes[label] for name, label in zip(listing.names, listing.labels.tolist(), strict=True)}


LABELS = st.lists(st.integers(0, 7), min_size=1, max_size=60)


def test_all_columns_go_with_an_image() -> None:
    part = take(_listing([0, 1, 2], ids=[7, 8, 9]), np.array([2, 0]))
    assert part.ids is not None
    assert (part.names, part.labels.tolist(), part.ids.tolist()) == (["2.jpg", "0.jpg"], [2, 0], [9, 7])
    assert (part.sizes.tolist(), part.times.tolist()) == ([102, 100], [1002, 1000])


@given(LABELS, st.sets(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefgh")))
def test_chosen_classes_keep_their_images_names_and_order(labels: list[int], only: set[str], exclude: set[str]) -> None:
    kept = [name for name in "abcdefgh" if (not only or name in only) and name not in exclude]
    listing = _listing(labels)
    if len(kept) < 2:
        with pytest.raises(DataError, match=r"of 8 classes would be left: a classifier needs at least two"):
            choose([listing], only=sorted(only), exclude=sorted(exclude))
        return
    [part] = choose([listing], only=sorted(only), exclude=sorted(exclude))
    assert part.classes == tuple(kept)
    assert _classes(part) == {name: class_name for name, class_name in _classes(listing).items() if class_name in kept}


def test_an_unknown_class_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"there is no class dgo\. Did you mean dog\? The classes: cat, dog"):
        choose([_listing([0], ["cat", "dog"])], exclude=["dgo"])
    with pytest.raises(DataError, match="labels are vectors, so classes cannot be chosen"):
        choose([_listing([0], [])], only=["cat"])


@given(LABELS, st.integers(0, 5))
def test_images_of_each_class_are_held_out_by_number(labels: list[int], seed: int) -> None:
    listing = _listing(labels)
    counts = np.bincount(labels)
    least = int(counts[counts > 0].min())
    if np.all(counts[counts > 0] == least):
        with pytest.raises(DataError, match="would be left for validation"):
            hold_out(listing, per_class=least, seed=seed)
        return
    train, val = hold_out(listing, per_class=least, seed=seed)
    assert (train.split, val.split, val.passed_over) == ("train", "val", [])
    assert {*_classes(train).items(), *_classes(val).items()} == set(_classes(listing).items())
    assert set(train.counts()) <= {0, least}
    assert train.names == hold_out(listing, per_class=least, seed=seed)[0].names
    with pytest.raises(DataError, match=rf"fewer than {least + 1} images \([a-h] \({least}\)"):
        hold_out(listing, per_class=least + 1, seed=seed)


def test_a_share_of_each_class_is_held_out() -> None:
    train, val = hold_out(_listing([0] * 10 + [1] * 20), fraction=0.2)
    assert (train.counts()[:2], val.counts()[:2]) == ((8, 16), (2, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.0}, "hold out is 1.0; it must be above 0 and below 1"),
        ({"per_class": 0}, "it must be 1 or more"),
        ({}, "hold out is None; it must be above 0 and below 1"),
        ({"fraction": 0.1, "per_class": 3}, "both split the source: use one of them"),
    ],
)
def test_what_cannot_be_held_out_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        hold_out(_listing([0, 0, 1, 1]), **options)  # type: ignore[arg-type]


def test_source_with_splits_is_not_split_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 2, "dog": 2})
    write_folder(tmp_path / "val", {"cat": 1})
    for listings in (list_folder(tmp_path), list_folder(tmp_path)[:1]):
        with pytest.raises(DataError, match=r"the source already has splits \(train.*\): drop --val-fraction"):
            Selection(val_fraction=0.5).of(listings, lambda _: None)


def test_caltech_s_recipe_and_its_clutter(tmp_path: Path) -> None:
    [listing] = list_folder(write_folder(tmp_path, {"001.ak47": 5, "002.flag": 4, "257.clutter": 9}))
    messages: list[str] = []
    train, val = hold_out(choose([listing], exclude=["257.clutter"])[0], per_class=3)
    assert (train.counts(), val.counts()) == ((3, 3), (2, 1))
    remark([train, val], messages.append)
    assert messages == []


ODD_CLASSES: dict[tuple[str, ...], str] = {
    ("Cat", "cat", "dog"): "'Cat' and 'cat' are two classes that differ only in case or spaces",
    ("cat", "cat ", "dog"): "'cat' and 'cat ' are two classes",
    ("cat", "dog", "nan"): "'nan' is a class here: leave it out with --exclude nan if it stands for images without",
    ("0", "1", "cat"): r"some class names are numbers \(0, 1\) and some are words \(cat\)",
}


@pytest.mark.parametrize("classes", ODD_CLASSES)
def test_classes_that_may_be_a_mistake_are_reported(classes: tuple[str, ...]) -> None:
    messages: list[str] = []
    remark([_listing([0, 1, 2], classes)], messages.append)
    assert len(messages) == 1
    assert re.match(ODD_CLASSES[classes], messages[0])


def test_labels_that_are_no_class_numbers_are_reported() -> None:
    messages: list[str] = []
    values = replace(_listing([0, 1, 2], []), labels=np.array([[-1], [0], [1]], np.float32))
    remark([values], messages.append)
    assert messages == [
        "labels are not class numbers, such as -1, and are stored unchanged: training needs 0, 1, 2 and so on"
    ]


def _sides(parts: Sequence[Listing]) -> dict[str, set[str]]:
    """In which splits the images are whose names begin alike."""
    sides: dict[str, set[str]] = {}
    for part in parts:
        for name in part.names:
            sides.setdefault(Path(name).name[:4], set()).add(part.split)
    return sides


@pytest.mark.parametrize("identical", get_args(Identical))
def test_images_that_are_the_same_are_not_parted(tmp_path: Path, identical: Identical) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 20, "dog": 20})
    for path in sorted(folder.glob("*/*"))[::2]:
        data = path.read_bytes()
        path.with_stem(f"{path.stem}-again").write_bytes(data + b"xx" * (identical != "bytes"))
    messages: list[str] = []
    parts = Selection(val_fraction=0.3, identical=identical).of(list_folder(folder), messages.append)
    assert messages[-1].startswith("60 images are 40 groups of copies and near copies; each group stays together.")
    assert all(len(splits) == 1 for splits in _sides(parts).values())
    assert [part.counts() for part in parts] == [(21, 21), (9, 9)]
    write_tar(tmp_path / "a.tar", {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")})
    with_zip = tmp_path / "a.zip"
    with zipfile.ZipFile(with_zip, "w", zipfile.ZIP_DEFLATED) as file:
        for path in folder.glob("*/*"):
            file.write(path, path.relative_to(folder))
    for source in (tmp_path / "a.tar", with_zip):
        listed = find(str(source), scratch=tmp_path / "scratch", say=lambda _: None)
        parts = Selection(val_fraction=0.3, identical=identical).of(listed, lambda _: None)
        assert all(len(splits) == 1 for splits in _sides(parts).values())


def test_without_equal_images_the_same_ones_are_held_out_as_ever(tmp_path: Path) -> None:
    [listing] = list_folder(write_folder(tmp_path / "data", {"cat": 20, "dog": 20}))
    for identical in get_args(Identical):
        parts = Selection(val_fraction=0.1, identical=identical).of([listing], lambda _: None)
        assert [list(part.names) for part in parts] == [list(part.names) for part in hold_out(listing, fraction=0.1)]


def test_a_line_that_repeats_an_image_stays_beside_it(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 4, "dog": 4})
    lines = [f"{n}\t{n % 8 // 4}\t{('cat', 'dog')[n % 8 // 4]}/{n % 8:04d}.png\n" for n in range(16)]
    (tmp_path / "a.lst").write_text("".join(lines))
    messages: list[str] = []
    listed = find(str(tmp_path / "a.lst"), scratch=tmp_path / "scratch", say=messages.append)
    train, val = Selection(val_fraction=0.5).of(listed, messages.append)
    assert not set(train.names) & set(val.names)
    assert (train.counts(), val.counts(), messages[-1][:26]) == ((4, 4), (4, 4), "16 images are 8 groups of ")


def test_members_of_a_table_s_group_are_not_parted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 20, "dog": 20})
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
    rows = [f"{name},{name[:3]},{number % 10}" for number, name in enumerate(names)]
    (folder / "a.csv").write_text("\n".join(["path,label,Patient ID", *rows]))
    messages: list[str] = []
    listed = find(str(folder / "a.csv"), group="patient id", scratch=tmp_path / "scratch", say=messages.append)
    train, val = Selection(val_fraction=0.2).of(listed, messages.append)
    assert train.groups is not None and val.groups is not None
    assert not set(train.groups) & set(val.groups)
    assert (train.counts(), val.counts()) == ((16, 16), (4, 4))
    said = "40 images are 10 groups of copies and near copies, and of --group-by; each group stays together"
    assert messages[-1] == said, "nothing is recommended that is there"
    for group, source, message in (
        (
            "patients",
            "a.csv",
            r"--group-by is 'patients', and there is no such column \(the columns: path, label,",
        ),
        (
            "patient",
            "",
            r"--group-by patient names a column of a table \(CSV, TSV\), and the labels of .* do not come from one",
        ),
    ):
        with pytest.raises(DataError, match=message):
            find(str(folder / source), group=group, scratch=tmp_path / "scratch", say=messages.append)
    (folder / "a.csv").write_text("\n".join(["path,label,patient", f"{names[0]},cat,1", f"{names[1]},cat, "]))
    with pytest.raises(DataError, match=r"line 3: the group \(patient\) is empty"):
        find(str(folder / "a.csv"), group="patient", scratch=tmp_path / "scratch", say=messages.append)


def test_near_copies_are_not_parted_and_folders_and_names_neither(tmp_path: Path) -> None:
    for number in range(24):
        place = tmp_path / ("cat", "dog")[number % 2] / f"series-{number % 2}{number // 4}"
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8))
        image = image.resize((96, 96), Image.Resampling.BICUBIC)
        image.save(place / f"{number:02}a.png")
        image.resize((64, 64)).save(place / f"{number:02}b.jpg", quality=70)
    for group_by, begins in ((None, 2), ("folder", 8), (r"(series-\d+)/", 8)):
        selection = Selection(val_fraction=0.2, group_by=group_by)
        train, val = selection.of(list_folder(tmp_path), lambda _: None)
        keys = [
            {Path(name).name[:2] if begins == 2 else Path(name).parent.name for name in part.names}
            for part in (train, val)
        ]
        assert len(val) and not keys[0] & keys[1], group_by


def test_a_wished_number_of_training_images_is_exact_though_groups_do_not_fit() -> None:
    labels = np.repeat([0, 1], [20, 21])
    sets = np.concatenate([np.arange(20) // 4, 20 + np.arange(21) // 3])
    for per_class in (1, 5, 7, 16):
        train, val = hold_out(_listing(labels.tolist()), per_class=per_class, sets=sets)
        assert train.counts()[:2] == (per_class, per_class)
        split_of = {int(Path(name).stem): part.split for part in (train, val) for name in part.names}
        assert all(
            len({split_of.get(int(row)) for row in np.flatnonzero(sets == one)} - {None}) == 1 for one in set(sets)
        )
        assert len(train) + len(val) >= 41 - 3 - 2


def test_a_class_that_is_one_group_is_named() -> None:
    said: list[str] = []
    say_whole_classes(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 2, 3, 4]), ("ape", "bee", "cat"), said.append)
    assert said == ["ape is one group of images that belong together: none of them can be held out"]


def test_images_beside_the_class_folders_are_skipped_and_reported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 2, "dog": 2})
    for name in ("loose.jpg", "README"):
        (folder / name).write_bytes(b"x")
    messages: list[str] = []
    [chosen] = Selection().of(list_folder(folder), messages.append)
    assert messages == ["1 image without a class is skipped (loose.jpg)"]
    assert list(chosen.passed_over) == ["README"]


@given(LABELS, st.integers(1, 60))
def test_shards_are_even_contiguous_and_whole(labels: list[int], count: int) -> None:
    listing = _listing(labels)
    if count > len(labels):
        with pytest.raises(DataError, match=f"it must be from 1 to {len(labels)}"):
            shard(listing, count)
        return
    parts = shard(listing, count)
    assert [name for part in parts for name in part.names] == listing.names
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    if count > 1:
        assert np.concatenate([part.ids for part in parts if part.ids is not None]).tolist() == list(range(len(labels)))


def test_folders_are_merged_and_their_files_found(tmp_path: Path) -> None:
    first = list_folder(write_folder(tmp_path / "x" / "first", {"cat": 2, "dog": 1}))
    second = list_folder(write_folder(tmp_path / "second", {"ant": 1, "cat": 1}))
    [merged] = merge_sources([first, second])
    assert merged.classes == ("ant", "cat", "dog")
    assert merged.labels.tolist() == [1, 1, 2, 0, 1]
    assert [content(merged, n) for n in range(5)] == [
        content(listing, n) for [listing] in (first, second) for n in range(len(listing))
    ]
    assert merged.ids is not None and merged.ids.tolist() == [0, 1, 2, 3, 4]


def test_archives_and_folders_are_merged(tmp_path: Path) -> None:
    [folder] = list_folder(write_folder(tmp_path / "data", {"cat": 2, "dog": 1}))
    [archive] = found(write_tar(tmp_path / "a.tar", {f"{name}/1.png": encoded(9) for name in ("cat", "dog")}), tmp_path)
    (tmp_path / "data" / folder.names[1]).unlink()
    merged = merge([folder, archive])
    assert merged.labels.tolist() == [0, 0, 1, 0, 1]
    assert content(merged, 2) == content(folder, 2)
    assert content(merged, 4) == encoded(9)
    with pytest.raises(FileNotFoundError):
        content(merged, 1)


def test_ids_are_kept_where_no_two_are_the_same() -> None:
    names = ["a", "b"]
    apart = merge([_listing([0, 1], names, ids=[5, 6]), _listing([1], names, ids=[9])])
    assert apart.ids is not None and apart.ids.tolist() == [5, 6, 9]
    clash = merge([_listing([0, 1], names, ids=[5, 6]), _listing([1], names, ids=[6])])
    assert clash.ids is not None and clash.ids.tolist() == [0, 1, 2]


def test_what_cannot_be_merged_is_refused() -> None:
    vectors = _listing([0, 1], [])
    object.__setattr__(vectors, "labels", np.zeros((2, 3), np.float32))
    with pytest.raises(DataError, match="label vectors of another length, or classes"):
        merge([_listing([0, 1], "ab"), vectors])
    with pytest.raises(DataError, match=r"those of one are only numbers \(0, 1\)"):
        merge([_listing([0, 1], "ab"), _listing([0, 1], "01")])
    with pytest.raises(DataError, match="split differently"):
        merge_sources([[_listing([0, 1])], [_listing([0]), _listing([1])]])
    bare = Pieces(
        ("x",), np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int64), pixels=PixelShape(1, 1, 1)
    )
    pixels = _listing([0], "ab")
    object.__setattr__(pixels, "pieces", bare)
    with pytest.raises(DataError, match="bare pixels of one shape cannot be merged"):
        merge([_listing([0], "ab"), pixels])


def _vectors(names: str, values: Sequence[Sequence[float]]) -> Listing:
    return replace(_listing(range(len(values)), []), labels=np.array(values, np.float32), label_names=tuple(names))


def test_columns_of_label_vectors_are_merged_by_their_names() -> None:
    merged = merge([_vectors("xyz", [[1, 2, 3]]), _vectors("zxy", [[3, 1, 2], [6, 4, 5]])])
    assert merged.label_names == ("x", "y", "z")
    assert merged.labels.tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("other", ["xyw", "", "xy"])
def test_label_vectors_of_other_columns_are_not_merged(other: str) -> None:
    with pytest.raises(DataError, match=r"different labels in their vectors \(not in all of them: .*\): give them as"):
        merge([_vectors("xyz", [[1, 2, 3]]), _vectors(other, [[1, 2, 3]])])


def test_nothing_asked_for_changes_nothing() -> None:
    listing = _listing([0, 1])
    assert told(choose([listing])[0]) == told(listing)
    assert told(shard(listing, 1)[0]) == told(listing)
    assert told(merge([listing]))["labels"] == [0, 1]


def test_the_label_column_that_all_tables_share_is_kept() -> None:
    """A table that validates is read by it."""
    one, other = (replace(_listing([0, 1], "ab"), label_column=name) for name in ("breed", "animal"))
    assert [merge(parts).label_column for parts in ([one, one], [one, other])] == ["breed", ""]
