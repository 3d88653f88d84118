"""Shards of samples: their order, the kinds of label, and samples that lack something."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.data.sources.samples import content, encoded, found, write_tar

from steadytrain.errors import DataError

Sample = Mapping[str, object]


def _shard(path: Path, samples: Sequence[Sample], first: int = 0) -> Path:
    """A tar as WebDataset's writer makes it: each sample's members side by side, named by its number."""
    files = []
    for number, sample in enumerate(samples, first):
        for suffix, value in sample.items():
            data = value if isinstance(value, bytes) else json.dumps(value) if isinstance(value, dict) else str(value)
            files.append((f"{number:06d}.{suffix}", data if isinstance(data, bytes) else data.encode()))
    return write_tar(path, files)


def _samples(count: int, suffix: str, labels: Sequence[object]) -> list[Sample]:
    return [{"png": encoded(number), suffix: labels[number % len(labels)]} for number in range(count)]


def test_shards_and_samples_keep_their_order(tmp_path: Path) -> None:
    for shard in range(12):
        _shard(
            tmp_path / f"s-{shard:03d}.tar", [{"cls": (shard + n) % 3, "png": encoded(shard * 4 + n)} for n in range(4)]
        )
    [listing] = found(tmp_path / "s-{000..011}.tar", tmp_path)
    assert [content(listing, number) for number in range(48)] == [encoded(number) for number in range(48)]
    assert listing.labels.tolist() == [(shard + n) % 3 for shard in range(12) for n in range(4)]
    assert listing.classes == ("0", "1", "2")
    assert listing.names[:2] == ["s-000.tar/000000.png", "s-000.tar/000001.png"]
    assert listing.ids is not None and listing.ids.tolist() == list(range(48))
    for other in ("s-*.tar", ""):
        assert found(tmp_path / other, tmp_path)[0].names == listing.names
    assert found(tmp_path / "s-003.tar", tmp_path)[0].names[0] == "000000.png"


@pytest.mark.parametrize(
    ("suffix", "labels", "classes"),
    [
        ("cls", [2, 0], ("0", "1", "2")),
        ("cls", ["dog\n", "cat\n"], ("cat", "dog")),
        ("json", [{"label": 1}, {"label": 0}], ("0", "1")),
        ("json", [{"label": 1, "class_name": "dog"}, {"label": 0, "class_name": "cat"}], ("cat", "dog")),
        ("json", [{"caption": "a dog", "category": "dog"}, {"category": "cat"}], ("cat", "dog")),
        ("json", [{"class": "dog"}, {"class": "cat"}], ("cat", "dog")),
        ("txt", ["dog", "cat"], ("cat", "dog")),
    ],
)
def test_labels_and_class_names_from_every_kind_of_member(
    tmp_path: Path, suffix: str, labels: Sequence[object], classes: tuple[str, ...]
) -> None:
    [listing] = found(_shard(tmp_path / "a.tar", _samples(6, suffix, labels)), tmp_path)
    assert listing.classes == classes
    assert listing.labels.tolist() == [len(classes) - 1, 0] * 3


def test_json_of_the_samples_names_the_classes(tmp_path: Path) -> None:
    samples: list[dict[str, object]] = [
        {"jpg": encoded(n, "JPEG"), "cls": n % 2, "json": {"class_name": "cd"[n % 2]}} for n in range(4)
    ]
    [listing] = found(_shard(tmp_path / "a.tar", samples), tmp_path)
    assert (listing.classes, listing.labels.tolist()) == (("c", "d"), [0, 1, 0, 1])
    samples[3]["json"] = {"class_name": "c"}  # two numbers of one name: the numbers count
    samples[1]["json"] = {}
    [listing] = found(_shard(tmp_path / "a.tar", samples), tmp_path)
    assert listing.classes == ("0", "1")


def test_shards_named_for_splits_are_splits(tmp_path: Path) -> None:
    for name, labels in {"train-000": [0, 1], "train-001": [1, 2], "val-000": [2]}.items():
        _shard(tmp_path / f"{name}.tar", _samples(4, "cls", labels))
    train, val = found(tmp_path, tmp_path / "scratch")
    assert (train.split, len(train), train.classes) == ("train", 8, ("0", "1", "2"))
    assert (val.split, len(val), val.classes) == ("val", 4, ("0", "1", "2"))


def test_keys_may_have_folders_and_images_any_suffix(tmp_path: Path) -> None:
    files = {"a/1.JPG": encoded(1, "JPEG"), "a/1.cls": b"0", "b/1.x.jpg": b"not it", "b/1.webp": b"it", "b/1.cls": b"1"}
    [listing] = found(write_tar(tmp_path / "a.tar", files), tmp_path)
    assert (listing.names, listing.labels.tolist()) == (["a/1.JPG", "b/1.webp"], [0, 1])


def test_incomplete_samples_are_reported(tmp_path: Path) -> None:
    samples = [*_samples(4, "cls", [0, 1]), {"png": encoded(9)}, {"cls": 1}, {"cls": 0}]
    messages: list[str] = []
    [listing] = found(_shard(tmp_path / "a.tar", samples), tmp_path, messages)
    assert len(listing) == 4
    assert messages == [
        "2 samples without an image skipped (000005, 000006)",
        "1 sample without a label skipped (000004)",
    ]


def test_folders_of_classes_with_texts_beside_the_images_are_no_samples(tmp_path: Path) -> None:
    files = {f"{name}/{n}.{end}": b"x" for name in ("cat", "dog") for n in range(2) for end in ("jpg", "txt")}
    [listing] = found(write_tar(tmp_path / "a.tar", files), tmp_path)
    assert (listing.classes, len(listing), len(listing.passed_over)) == (("cat", "dog"), 4, 4)


REFUSED: dict[str, tuple[list[Sample], str]] = {
    "two images": (
        [{"jpg": b"1", "png": b"2", "cls": 0}],
        r"the sample 000000 has two images, 000000\.jpg and 000000\.png",
    ),
    "captions": (_samples(6, "txt", [f"a photo of number {n}" for n in range(6)]), "look like captions"),
    "no field": (_samples(4, "json", [{"caption": "x"}]), r"no label field \(label, .*it has caption\)"),
    "a list": (_samples(4, "json", [{"label": [1, 2]}]), "the field 'label' of sample 000000 is a list"),
    "no object": (_samples(4, "json", ["[1]"]), "is not a JSON object"),
    "endless json": (_samples(4, "json", ["[" * 100_000]), "is not a JSON object"),
    "empty label": (_samples(4, "cls", ["0", " "]), r"the \.cls of sample 000001 is empty"),
    "long label": (_samples(4, "cls", ["x" * 5000]), r"the \.cls of sample 000000 has 5,000 bytes, more than 4,096"),
    "no text": (_samples(4, "cls", [b"\xff\xfe"]), "is not UTF-8 text"),
    "too large": (_samples(4, "cls", [0, 10**9]), "has label 1,000,000,000; class numbers are 0 to 999,999"),
    "one class": (_samples(4, "cls", [0]), "has only one class"),
    "never both": ([{"png": encoded(1)}, {"cls": 1}], "no sample has an image and a label; 1 have no image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    samples, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        found(_shard(tmp_path / "a.tar", samples), tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    files = [("1.jpg", b"x"), ("1.cls", b"0"), ("1.cls", b"1")]
    with pytest.raises(DataError, match=r"the sample 1 has two members \.cls"):
        found(write_tar(tmp_path / "a.tar", files), tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    _shard(tmp_path / "s-0.tar", _samples(4, "cls", [0, 1]))
    with pytest.raises(DataError, match=r"no file for 2 of its names \(.*s-1\.tar, .*s-2\.tar\)"):
        found(tmp_path / "s-{0..2}.tar", tmp_path)


def _named(field: str, *pairs: tuple[int, str]) -> list[Sample]:
    return [{"png": encoded(n), "json": {"label": label, field: name}} for n, (label, name) in enumerate(pairs)]


def test_shards_that_number_classes_differently_are_refused(tmp_path: Path) -> None:
    _shard(tmp_path / "s-0.tar", _named("class_name", (0, "cat"), (1, "dog")))
    _shard(tmp_path / "s-1.tar", _named("class_name", (0, "dog"), (1, "cat")))
    with pytest.raises(DataError, match=r"label 0 is called cat and dog .*, and dog is also label 1: number"):
        found(tmp_path / "s-*.tar", tmp_path)


def test_names_that_do_not_name_classes_are_not_taken_for_them(tmp_path: Path) -> None:
    messages: list[str] = []
    shard = _shard(tmp_path / "s.tar", _named("name", (0, "IMG_1"), (1, "IMG_2"), (0, "IMG_3")))
    [listing] = found(shard, tmp_path, messages)
    assert (listing.classes, listing.labels.tolist(), messages) == (("0", "1"), [0, 1, 0], [])
    files = _shard(tmp_path / "f.tar", _named("name", (0, "1.jpg"), (1, "2.jpg")))
    assert found(files, tmp_path)[0].classes == ("0", "1")
    alone = [{"png": encoded(n), "json": {"name": f"IMG_{n}"}} for n in range(3)]
    with pytest.raises(DataError, match="has no label field"):
        found(_shard(tmp_path / "n.tar", alone), tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_class(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "s.tar", _samples(4, "cls", ["\ufeffdog\r\n", "cat"]))
    assert found(shard, tmp_path)[0].classes == ("cat", "dog")


def test_capital_suffixes_are_samples_as_well(tmp_path: Path) -> None:
    files = [(f"{n}.{kind}", data) for n in range(2) for kind, data in (("PNG", encoded(n)), ("CLS", str(n).encode()))]
    assert found(write_tar(tmp_path / "s.tar", files), tmp_path)[0].labels.tolist() == [0, 1]


MISNAMED = {
    "a key ends at the first dot, and a.0.png has several": ["a.0.png", "a.0.cls", "a.1.png", "a.1.cls"],
    r"are not next to each other: .*tar --sort=name": ["0.png", "1.png", "0.cls", "1.cls"],
    r"have no image \(0, 1\)": ["0.x.png", "0.cls", "1.x.png", "1.cls"],
}


@pytest.mark.parametrize("message", MISNAMED)
def test_members_that_form_no_samples_are_refused_with_the_reason(tmp_path: Path, message: str) -> None:
    files = [(name, b"1" if name.endswith("cls") else encoded(n)) for n, name in enumerate(MISNAMED[message])]
    with pytest.raises(DataError, match=message):
        found(write_tar(tmp_path / "s.tar", files), tmp_path)


def test_half_a_character_is_no_label(tmp_path: Path) -> None:
    path = _shard(tmp_path / "a.tar", _samples(4, "json", [b'{"label": "\\ud83d"}', b'{"label": "dog"}']))
    with pytest.raises(DataError, match=r"the \.json of sample 000000 is not a JSON object .*surrogates not allowed"):
        found(path, tmp_path / "scratch")


def test_what_a_mac_puts_into_a_zip_is_no_folder_of_samples(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number, label in enumerate(["cat", "dog"] * 4):
            for suffix, data in (("png", encoded(number)), ("txt", label.encode())):
                archive.writestr(f"set/{number}.{suffix}", data)
                archive.writestr(f"__MACOSX/set/._{number}.{suffix}", b"\0\5\x16\7")
    [listing] = found(tmp_path / "a.zip", tmp_path / "scratch")
    assert (listing.classes, len(listing)) == (("cat", "dog"), 8)


def test_urls_in_the_json_of_samples_are_no_labels_of_a_table(tmp_path: Path) -> None:
    fields = [{"url": "http://x.org/a.jpg", "caption": "a dog"}]
    path = _shard(tmp_path / "a.tar", _samples(30, "json", fields))
    with pytest.raises(DataError, match=r"the \.json of sample 000000 has no label field"):
        found(path, tmp_path / "scratch")
