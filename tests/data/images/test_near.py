"""Images that look alike: copies of photographs are found, other photographs are not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from steadytrain.cli import main
from steadytrain.data.checking.records import examine_records
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.images.near import MOST_BITS, Hashes, find_alike, perceptual_hash
from steadytrain.data.packing.pack import pack


def _hashes(images: list[Image.Image]) -> Hashes:
    return np.frombuffer(b"".join(map(perceptual_hash, images)), np.uint64).reshape(-1, 2)


def _copy(image: Image.Image, *, side: int, quality: int, mirrored: bool = False) -> Image.Image:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image
    image = image.resize(
        (max(1, image.width * side // min(image.size)), max(1, image.height * side // min(image.size)))
    )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def test_copies_of_photographs_are_found_and_other_photographs_are_not(extracted: Callable[[str], Path]) -> None:
    photos = [Image.open(path).convert("RGB") for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))]
    originals = _hashes(photos)
    assert len(photos) == 200 and find_alike(originals) == []
    photos = photos[::5]
    for side, quality, mirrored in ((256, 85, False), (100, 50, False), (256, 75, True)):
        copies = _hashes([_copy(photo, side=side, quality=quality, mirrored=mirrored) for photo in photos])
        assert find_alike(copies, originals) == [(row, 5 * row, mirrored) for row in range(40)]
    assert perceptual_hash(Image.new("RGB", (80, 60), "white")) == bytes(16), "what is flat looks like nothing"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_search_finds_what_comparing_all_pairs_finds(seed: int, inside: bool) -> None:
    random = np.random.default_rng(seed)
    hashes = random.integers(0, 2**64, (60, 2), np.uint64)
    for row in random.integers(1, 60, 30).tolist():  # a few bits from an earlier one, or from the mirrored one
        flips = np.uint64(sum(1 << int(bit) for bit in random.choice(64, random.integers(0, 10), replace=False)))
        hashes[row, random.integers(2)] = hashes[random.integers(row), 0] ^ flips
    ours, theirs = (hashes, hashes) if inside else (hashes[30:], hashes[:30])
    wanted = []
    for row in range(len(ours)):
        apart = [
            (int(ours[row, mirrored] ^ theirs[like, 0]).bit_count(), mirrored, like)
            for mirrored in (0, 1)
            for like in range(row if inside else len(theirs))
        ]
        if apart and min(apart)[0] <= MOST_BITS:
            wanted.append((row, min(apart)[2], bool(min(apart)[1])))
    assert find_alike(ours, None if inside else theirs) == wanted


def test_near_names_leaks_conflicts_and_duplicates_of_sources_and_records(
    tmp_path: Path, extracted: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, photos = tmp_path / "data", sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))
    places = [("train/cat", 0), ("train/cat", 1), ("train/cat", 2), ("train/dog", 3), ("val/cat", 4), ("val/dog", 5)]
    for name, number in places:
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.open(photos[number]).convert("RGB").save(folder / name / f"{number}.png")
    for number, side, mirrored, path in (
        (0, 90, True, "val/cat/leak.jpg"),
        (1, 150, False, "train/cat/again.jpg"),
        (2, 150, False, "train/dog/other.jpg"),
    ):
        photo = Image.open(photos[number]).convert("RGB")
        _copy(photo, side=side, quality=80, mirrored=mirrored).save(folder / path, quality=80)
    report = examine_source(folder, near=True, workers=0)
    assert {
        kind: [(finding.name, finding.detail) for finding in kept]
        for kind, _, kept in report.findings.by_kind()
        if "near" in kind
    } == {
        "near-conflict": [("train/dog/other.jpg", "dog, like train/cat/2.png of cat")],
        "near-leak": [("val/cat/leak.jpg", "like train/cat/0.png, mirrored")],
        "near-duplicate": [("train/cat/again.jpg", "like train/cat/1.png")],
    }
    assert [do for do, _ in report.remedies if "look at the pairs" in do] == [
        "look at the pairs, and give all copies of an image one class",
        "look at the pairs, and keep all copies of an image in one split",
        "look at the pairs, and remove copies that add nothing",
    ]
    assert not {"near-leak", "near-duplicate"} & set(examine_source(folder, workers=0).findings.counts)
    packed = pack(folder, tmp_path / "out", workers=1)
    findings = examine_records(packed[0].path, others=[packed[1].path], near=True, workers=0).report.findings
    assert [findings.counts[kind] for kind in ("near-conflict", "near-leak", "near-duplicate")] == [1, 1, 1]
    assert findings.of("near-leak")[0].detail.endswith("of out-val.rec (val/cat/leak.jpg), mirrored")
    assert main(["check", str(tmp_path), "--near", "--no-decode"]) == 2
    assert "--near compares images" in capsys.readouterr().err
