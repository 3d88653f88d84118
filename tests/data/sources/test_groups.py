"""Groups: copies, near copies and what a user keeps together; chains are cut, hashes belong to their records."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steadytrain.data.images.near import near_pairs
from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.hashes import HASHES, SUFFIX, ImageHashes, cached_path, find_shared
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources import groups
from steadytrain.data.sources.groups import group_images, group_keys, make_hashes
from steadytrain.errors import DataError


def scene(number: int, side: int = 160) -> Image.Image:
    """A picture like no other: soft blobs of colour."""
    small = np.random.default_rng(number).integers(0, 255, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


def write_copies(folder: Path, scenes: int = 6) -> Path:
    """Scenes of two classes, each as it is, encoded again, smaller, and mirrored."""
    for number in range(scenes):
        place = folder / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image = scene(number)
        image.save(place / f"{number}-a.jpg", quality=95)
        image.save(place / f"{number}-b.jpg", quality=40)
        image.resize((90, 90)).save(place / f"{number}-c.png")
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(place / f"{number}-d.jpg", quality=85)
    return folder


def hashes_of(near: list[int], stored: list[int] | None = None) -> ImageHashes:
    """Hashes of which the perceptual ones are given, and all digests are zeros, or given."""
    hashes = np.zeros(len(near), HASHES)
    hashes["near"][:, 0] = near
    hashes["near"][:, 1] = [2**63 + (value ^ 0xAAAAAAAAAAAAAAA) for value in near]  # far from all
    hashes["stored"][:, 0] = range(1, len(near) + 1) if stored is None else stored
    return hashes


def groups_of(
    hashes: ImageHashes, labels: list[int], keys: list[str | None] | None = None
) -> tuple[list[int], list[str]]:
    said: list[str] = []
    numbers = group_images(hashes, np.array(labels), keys=keys, name="image {}".format, say=said.append)
    return ([] if numbers is None else numbers.tolist()), said


def test_packing_hashes_images_so_that_copies_are_one_group(tmp_path: Path) -> None:
    pack(write_copies(tmp_path / "images"), tmp_path / "a")
    with Records.open(tmp_path / "a.rec") as records:
        assert records.hashes is not None
        said: list[str] = []
        numbers = group_images(records.hashes, records.labels, name=records.describe, say=said.append)
        scenes = [Path(name).name[0] for name in records.names()]
        assert numbers is not None and len({*zip(scenes, numbers.tolist(), strict=True)}) == 6 == len(set(scenes))
        assert said == [
            "24 images are 6 groups of copies and near copies; each group stays together. Other photographs of one"
            " scene are not recognised: name them with --group-by"
        ]


def test_records_without_hashes_get_them_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    pack(write_copies(tmp_path / "images"), tmp_path / "a")
    with Records.open(tmp_path / "a.rec") as records:
        assert records.hashes is not None
        by_pack = group_images(records.hashes, records.labels, name=str, say=lambda _: None)
    (tmp_path / "a.hashes").unlink()
    with Records.open(tmp_path / "a.rec") as records:
        assert records.hashes is None and make_hashes(records, most_bytes=10) is None
        made = make_hashes(records)
        assert made is not None and cached_path(records.digest).is_file()
        assert np.array_equal(group_images(made, records.labels, name=str, say=lambda _: None), by_pack)  # type: ignore[arg-type]
    with Records.open(tmp_path / "a.rec") as records:
        assert records.hashes is not None and np.array_equal(records.hashes, made)


def test_hashes_of_other_records_are_never_used(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(write_copies(tmp_path / name), tmp_path / f"{name}-packed", quality=90 + 5 * (name == "b"))
        (tmp_path / name / "cat" / "0-a.jpg").unlink()
    write_copies(tmp_path / "c", 8)
    pack(tmp_path / "c", tmp_path / "c-packed")
    shutil.copy(tmp_path / "c-packed.hashes", tmp_path / "a-packed.hashes")
    with Records.open(tmp_path / "a-packed.rec") as records:
        assert records.hashes is None
    path = tmp_path / "c-packed.hashes"
    path.write_bytes(path.read_bytes().replace(b"hashes.2", b"hashes.1"))  # an earlier version's, of other bits
    with Records.open(tmp_path / "c-packed.rec") as records:
        assert records.hashes is None
    pack(tmp_path / "a-packed.rec", tmp_path / "again")
    with Records.open(tmp_path / "again.rec") as records:
        assert records.hashes is not None and len(records.hashes) == len(records)


def test_shards_and_merged_records_have_the_hashes_of_their_images(tmp_path: Path) -> None:
    images = write_copies(tmp_path / "images")
    pack(images, tmp_path / "one")
    pack(images, tmp_path / "many", shards=3)
    with Records.open(tmp_path / "one.rec") as one, Records.open(tmp_path / "many-*.rec") as many:
        assert one.hashes is not None and many.hashes is not None
        assert np.array_equal(one.hashes, many.hashes)
        assert find_shared(many.hashes[3:5], one.hashes).tolist() == [0, 1]


def test_small_images_are_compared_by_their_bytes_alone(tmp_path: Path, digits_folder: Path) -> None:
    pack(digits_folder, tmp_path / "digits")
    with Records.open(tmp_path / "digits.rec") as records:
        assert records.hashes is not None and not records.hashes["near"].any()
        assert group_images(records.hashes, records.labels, name=str, say=lambda _: None) is None


def test_copies_have_one_group_however_they_are_known() -> None:
    numbers, said = groups_of(hashes_of([0xFF << 20, 0xFF << 40, 0xFF << 20, 0, 0], [1, 2, 3, 4, 4]), [0, 1, 0, 1, 0])
    assert numbers == [0, 1, 0, 3, 3]
    assert len(said) == 1 and said[0].startswith("5 images are 3 groups of copies and near copies; each group stays")


def test_two_images_that_look_like_a_third_are_in_its_group() -> None:
    far = [0xFF00FF, 0xFF00FF ^ 0b111111 << 30, 0xFF00FF ^ 0b111111 << 50]  # the last two differ in 12 bits
    assert groups_of(hashes_of([far[1], far[2], far[0]]), [0, 0, 0])[0] == [0, 0, 0]


def test_a_chain_of_near_copies_is_cut_at_its_weakest_link_and_named() -> None:
    chain, bit = [0xFFFF << 46], 0
    for number in range(1, 20):  # each differs from the one before in two bits; the tenth in six
        width = 6 if number == 10 else 2
        chain.append(chain[-1] ^ (((1 << width) - 1) << bit))
        bit += width
    numbers, said = groups_of(hashes_of(chain), [0] * 20)
    assert numbers == [0] * 10 + [10] * 10
    assert said[0] == (
        "20 images are near copies one of the next (image 0 and so on), more than a fifth of their class: the chain is"
        " cut at its weakest links into 2 parts"
    )
    several = np.ones((20, 2), np.float32)  # labels, of which an image may have several: there is no class
    group_images(hashes_of(chain), several, name=lambda number: f"image {number}", say=said.append)
    assert "more than a fifth of all: the chain is cut" in said[-2]


def test_many_copies_of_one_image_are_not_cut() -> None:
    alike = [0xFFFF ^ 0b11 << (20 + number) for number in range(40)]  # each two bits from the same image
    numbers, said = groups_of(hashes_of([0xFFFF, *alike]), [0] * 41)
    assert set(numbers) == {0} and len(said) == 1


def test_a_dense_cluster_is_one_group_and_not_all_its_pairs_are_compared() -> None:
    rng, n = np.random.default_rng(0), 4000
    near = np.full(n, 0xFFFF, np.uint64)
    for _ in range(3):  # each within three bits of one hash
        near ^= np.uint64(1) << rng.integers(0, 63, n).astype(np.uint64)
    hashes = hashes_of(near.tolist())
    numbers, said = groups_of(hashes, [row % 2 for row in range(n)])
    assert set(numbers) == {0} and len(said) == 1
    assert sum(map(len, near_pairs(np.ascontiguousarray(hashes["near"])))) < 1000 * n  # of 8 million, found many times


def test_what_a_user_keeps_together_is_never_cut() -> None:
    keys = [f"patient {number // 20}" for number in range(40)]
    numbers, said = groups_of(hashes_of([0] * 40), [0] * 40, list(keys))
    assert numbers == [0] * 20 + [20] * 20
    assert said == ["40 images are 2 groups of copies and near copies, and of --group-by; each group stays together"]


def test_folders_below_the_class_are_groups() -> None:
    names = ["cat/p1/a.png", "cat/p1/b.png", "dog/p1/a.png", "dog/x.png", "train/cat/p2/3/a.png"]
    keys = group_keys(names, np.array([0, 0, 1, 1, 0]), ("cat", "dog"), "folder")
    assert keys == ["p1", "p1", "p1", None, "p2/3"]
    with pytest.raises(DataError, match="no image lies in a folder below that of its class"):
        group_keys(["cat/a.png"], np.array([0]), ("cat", "dog"), "folder")


def test_the_first_group_of_an_expression_is_the_key_and_has_to_be_in_every_name() -> None:
    names, labels = ["cat/p12_1.png", "cat/p12_2.png", "dog/p3_1.png"], np.array([0, 0, 1])
    assert group_keys(names, labels, ("cat", "dog"), r"(p\d+)_") == ["p12", "p12", "p3"]
    with pytest.raises(DataError, match=r"does not match 1 image of 4 \(dog/x.png\)"):
        group_keys([*names, "dog/x.png"], np.array([0, 0, 1, 1]), ("cat", "dog"), r"(p\d+)_")
    with pytest.raises(DataError, match="--group-by is 'patient': it must be folder, a column of the table"):
        group_keys(names, labels, ("cat", "dog"), "patient")


def test_a_copy_in_the_cache_has_hashes(tmp_path: Path) -> None:
    prepared = prepare(write_copies(tmp_path / "images"), cache=tmp_path / "cache", say=lambda _: None)
    assert prepared.train.with_suffix(SUFFIX).is_file()


def test_pairs_are_joined_as_one_by_one_in_whatever_portions_they_come() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 60, (45, 2))
    expected = list(range(60))
    for one, other in pairs.tolist():
        ends = sorted({expected[one], expected[other]})
        expected = [ends[0] if number in ends else number for number in expected]
    for portion in (1, 7, 45):
        numbers = np.arange(60)
        for start in range(0, 45, portion):
            numbers = groups._join(numbers, pairs[start : start + portion])
        assert numbers.tolist() == expected
