"""Braces as a shell writes them out, and wildcards."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from steadytrain.data.filenames import braces, expand, group_by_split, is_pattern, order_splits, split_of
from steadytrain.errors import DataError

WRITTEN = [
    "a-{000..011}.tar",
    "{a,b}/{1..3}",
    "x{9..7}y",
    "{08..10}",
    "no braces",
    "one {word} alone",
    "{a,b,}c",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_shell_writes_the_same(text: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    escaped = text.replace(" ", "\\ ")
    process = subprocess.run(["bash", "-c", f"printf '%s\\n' {escaped}"], capture_output=True, text=True, check=True)
    assert braces(text) == process.stdout.splitlines()


def test_too_many_names_are_refused_before_they_are_made() -> None:
    for text in ("{0..999999999}", "{0..999}{0..999}", "{1..9}" * 30):
        with pytest.raises(DataError, match="at most 100,000 are allowed"):
            braces(text)


@pytest.mark.parametrize("text", ["/*/../*/../*/../*", "a*/..", "[ab]/c/../*.rec"])
def test_a_way_back_behind_a_wildcard_is_refused_before_anything_is_listed(text: str) -> None:
    with pytest.raises(DataError, match=r"goes back \(\.\.\) behind a wildcard"):
        expand(text)


def test_wildcards_are_sorted_and_what_fits_nothing_is_named(tmp_path: Path) -> None:
    for name in ("s-2.tar", "s-10.tar", "s-1.tar"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in expand(f"{tmp_path}/s-*.tar")] == ["s-1.tar", "s-10.tar", "s-2.tar"]
    assert [path.name for path in expand(f"{tmp_path}/s-{{2,1,2}}.tar")] == ["s-2.tar", "s-1.tar"]
    with pytest.raises(DataError, match=r"no file for 1 of its names \(.*t-\*\.tar\)"):
        expand(f"{tmp_path}/t-*.tar")
    assert not is_pattern("plain {name}.tar")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.tar", "train"),
        ("train-0001.tar", "train"),
        ("imagenet-val-000123.tar", "val"),
        ("cifar10-test.rec", "test"),
        ("Validation_00.tar.gz", "val"),
        ("trains.tar", ""),
        ("train-val.tar", ""),
        ("0001.tar", ""),
        ("", ""),
    ],
)
def test_the_split_that_a_file_is_named_for(name: str, split: str) -> None:
    assert split_of(name) == split


def test_files_are_put_together_by_split() -> None:
    names = ["val-0.tar", "train-0.tar", "train-1.tar"]
    assert group_by_split(names, names, "here") == {"val": ["val-0.tar"], "train": ["train-0.tar", "train-1.tar"]}
    assert list(order_splits(group_by_split(names, names, "here"))) == ["train", "val"]
    assert group_by_split(names[1:], names[1:], "here") == {"": ["train-0.tar", "train-1.tar"]}
    assert group_by_split(["test-0"], ["test-0"], "here") == {"": ["test-0"]}
    with pytest.raises(DataError, match=r"some file names name a split and some do not \(x\.tar\)"):
        group_by_split([*names, "x.tar"], [*names, "x.tar"], "here")


def test_a_wildcard_finds_all_of_files_that_tell_how_many_they_are(tmp_path: Path) -> None:
    for name in ("a-00000-of-00003.rec", "a-00002-of-00003.rec", "b-0-of-2.rec", "b-1-of-2.rec", "c.rec"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"no file for 1 of its names \(.*a-00001-of-00003\.rec\)"):
        expand(f"{tmp_path}/*.rec")
    assert [path.name for path in expand(f"{tmp_path}/b-*.rec")] == ["b-0-of-2.rec", "b-1-of-2.rec"]
    assert [path.name for path in expand(f"{tmp_path}/a-0000{{0,2}}-of-00003.rec")] == [
        "a-00000-of-00003.rec",
        "a-00002-of-00003.rec",
    ]
