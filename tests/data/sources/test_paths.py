"""Where the paths of a table lead, however another system or machine wrote them; what may mean several is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tests.data.sources.samples import content, encoded, found

from steadytrain.errors import DataError

NAMES = ("data/Train/cat 0/0.png", "data/Train/cat 0/2.png", "data/Train/dög/1.png", "data/Train/dög/3.png")


def _images(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(number))
    return folder


def _zip(folder: Path, *names: str) -> Path:
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, encoded(number))
    return folder / "images.zip"


def _table(path: Path, paths: list[str]) -> Path:
    path.write_text("path,label\n" + "".join(f'"{name}",{"ab"[n % 2]}\n' for n, name in enumerate(paths)))
    return path


SPELLINGS = {
    "other case": [name.lower() for name in NAMES],
    "upper case": [name.upper() for name in NAMES],
    "percent signs": [name.replace(" ", "%20").replace("ö", "%C3%B6") for name in NAMES],
    "a query": [f"{name}?w=100&h=7" for name in NAMES],
    "another machine's": [f"/kaggle/input/set-1/{name}" for name in NAMES],
    "Windows's": ["C:\\Users\\me\\" + name.replace("/", "\\") for name in NAMES],
    "a home folder": [f"~/x/{name}" for name in NAMES],
    "a folder above": [f"../other/{name}" for name in NAMES],
    "one folder too many": [f"set/{name}" for name in NAMES],
    "another machine's, in another case and with percent signs": [
        f"/mnt/X/{n.lower().replace(' ', '%20')}" for n in NAMES
    ],
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_paths_are_found_as_another_machine_wrote_them(tmp_path: Path, case: str) -> None:
    table = _table(_images(tmp_path, *NAMES) / "labels.csv", SPELLINGS[case])
    messages: list[str] = []
    for listing in (
        *found(table, tmp_path / "scratch", messages),
        *found(_zip(tmp_path, *NAMES), tmp_path / "scratch", messages, labels=table),
    ):
        assert [content(listing, number) for number in range(4)] == [encoded(number) for number in range(4)]
        assert [listing.classes[label] for label in listing.labels] == ["a", "b", "a", "b"]
    lead = SPELLINGS[case][0].replace("\\", "/").casefold().partition("data/")[0]
    assert [message.casefold().endswith(f"without '{lead}'") for message in messages] == [True] * (2 * bool(lead))


def test_a_home_folder_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(_images(tmp_path / "home", "x/0.png", "x/1.png")))
    (tmp_path / "set").mkdir()
    [listing] = found(_table(tmp_path / "set" / "labels.csv", ["~/x/0.png", "~/x/1.png"]), tmp_path / "scratch")
    assert listing.sizes.min() > 0


def test_a_path_in_another_case_is_no_other_path_s_image(tmp_path: Path) -> None:
    """Of ``A.png`` and ``a.png`` one is missing: it is missing, and not the other one."""
    table = _table(_images(tmp_path, "b/a.png", "b/c.png") / "labels.csv", ["b/a.png", "b/c.png", "b/A.png", "B/C.png"])
    [listing] = found(table, tmp_path / "scratch")
    assert (listing.sizes > 0).tolist() == [True, True, False, False]


def test_images_of_one_split_are_not_looked_for_in_another_s_folder(tmp_path: Path) -> None:
    _images(tmp_path / "train", "1.png", "2.png")
    table = _table(tmp_path / "val.csv", ["/data/val/1.png", "/data/val/2.png"])
    with pytest.raises(
        DataError, match=r"none of the 2 paths .* exists .* nor an end of one: name the folder that holds"
    ):
        found(table, tmp_path / "scratch", root=tmp_path / "train")


def test_the_folder_to_start_from_is_named_for_another_machine_s_paths(tmp_path: Path) -> None:
    _images(tmp_path / "photos", "cat/1.png", "dog/2.png")
    table = _table(tmp_path / "labels.csv", ["/data/me/set/cat/1.png", "/data/me/set/dog/2.png"])
    with pytest.raises(DataError, match=r"give --root .*photos$"):
        found(table, tmp_path / "scratch")
    [listing] = found(table, tmp_path / "scratch", root=tmp_path / "photos")
    assert listing.names == ["cat/1.png", "dog/2.png"]


def test_the_folder_that_holds_the_images_is_enough_if_all_paths_name_one(tmp_path: Path) -> None:
    images = _images(tmp_path / "photos", "1.png", "2.png")
    table = _table(tmp_path / "labels.csv", ["upload/1.png", "upload/2.png"])
    [listing] = found(table, tmp_path / "scratch", root=images)
    assert listing.names == ["1.png", "2.png"]
    table = _table(tmp_path / "classes.csv", ["cat/1.png", "dog/2.png"])  # folders of classes are not left out
    with pytest.raises(DataError, match=r"none of the 2 paths"):
        found(table, tmp_path / "scratch", root=images)


@pytest.mark.parametrize("others", [("3.png", "3.jpg"), ("3.jpg", "3.JPG"), ("3.webp", "3.tiff")])
def test_an_id_that_may_be_one_of_two_files_is_refused(tmp_path: Path, others: tuple[str, str]) -> None:
    images = _images(tmp_path, "1.png", "2.png", *others)
    if len(list(images.iterdir())) < 4:
        pytest.skip("names in upper and lower case are one here")
    table = _table(images / "labels.csv", ["1", "2", "3"])
    with pytest.raises(DataError, match=r"names 1 image, .* several files in .* \(3: 3\.\w+ and 3\.\w+\)"):
        found(table, tmp_path / "scratch")
    table.write_text("index\n1\t0\t1\n2\t1\t2\n3\t0\t3\n".removeprefix("index\n"))
    with pytest.raises(DataError, match="one of several files"):
        found(table.rename(tmp_path / "labels.lst"), tmp_path / "scratch")
    [listing] = found(_table(tmp_path / "whole.csv", ["1", "2", others[1]]), tmp_path / "scratch")
    assert listing.names == ["1.png", "2.png", others[1]]


def test_ids_in_folders_of_other_formats_are_found(tmp_path: Path) -> None:
    images = _images(tmp_path, "a/1.png", "a/2.jpg", "b/1.JPEG", "b/2.tif")
    [listing] = found(_table(images / "labels.csv", ["a/1", "a/2", "b/1", "b/2"]), tmp_path / "scratch")
    assert listing.names == ["a/1.png", "a/2.jpg", "b/1.JPEG", "b/2.tif"]


@pytest.mark.parametrize("is_source", [False, True])
def test_all_folders_that_hold_the_names_are_named(tmp_path: Path, is_source: bool) -> None:
    _images(tmp_path, "s0/0.png", "s0/1.png", "s1/0.png", "s1/1.png", "other/x.png")
    table = _table(tmp_path / "t.csv", ["0.png", "1.png"])
    source = tmp_path if is_source else table
    with pytest.raises(
        DataError, match=r"2 folders hold such names \(.*s0, .*s1\): write the folder of each"
    ) as refused:
        found(source, tmp_path / "scratch", labels=table if is_source else None)
    assert ("--root" in str(refused.value)) != is_source


def test_folders_that_share_the_names_among_them_are_all_named(tmp_path: Path) -> None:
    _images(tmp_path, "cat/0.png", "dog/1.png")
    with pytest.raises(DataError, match=r"2 folders hold such names \(.*cat, .*dog\)"):
        found(_table(tmp_path / "t.csv", ["0.png", "1.png"]), tmp_path / "scratch")


def test_two_labels_for_one_member_of_an_archive_are_refused(tmp_path: Path) -> None:
    archive = _zip(tmp_path, "x/0.png", "x/1.png")
    table = tmp_path / "t.csv"
    table.write_text("path,label\nx/0.png,cat\n1.png,dog\n0,dog\n")
    with pytest.raises(DataError, match=r"x/0\.png has two labels, cat and dog: keep one"):
        found(archive, tmp_path / "scratch", labels=table)
