"""A set in several files reads as one in one file does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.card import card_for, record_files
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """``one.rec``, and the same images in ``many-00000-of-00003.rec`` and so on."""
    photos = write_folder(tmp_path / "photos", {"cat": 7, "dog": 5, "elk": 4}, size=(20, 16))
    pack(photos, tmp_path / "one")
    pack(photos, tmp_path / "many", shards=3)
    return tmp_path


@pytest.mark.parametrize("name", ["many-{00000..00002}-of-00003.rec", "many-*.rec", "many-0000?-of-00003.rec"])
def test_shards_read_as_one_file(packed: Path, name: str) -> None:
    with Records.open(packed / "one.rec") as file, Records.open(packed / name) as many:
        assert len(many) == len(file) == 16
        assert [bytes(many.image(number)) for number in range(16)] == [bytes(file.image(n)) for n in range(16)]
        assert many.labels.tolist() == file.labels.tolist()
        assert many.record_ids.tolist() == file.record_ids.tolist() == list(range(16))
        assert many.classes == file.classes == ("cat", "dog", "elk")
        assert (many.channels, many.largest_side) == (file.channels, file.largest_side)
        assert file.card is not None and many.card is not None
        assert (many.card.counts, many.card.num_images, many.card.height) == ((7, 5, 4), 16, file.card.height)
        assert many.card.mean == pytest.approx(file.card.mean, abs=1e-9)
        assert many.card.std == pytest.approx(file.card.std, abs=1e-9)
        with pytest.raises(IndexError, match=r"record 16 of .* which has 16"):
            many.image(16)


def test_the_digest_is_that_of_all_files_in_their_order(packed: Path) -> None:
    first, second, third = record_files(packed / "many-*.rec")
    digests = []
    for files in ((first, second, third), (second, first, third), (first, second)):
        with Records.open("{" + ",".join(map(str, files)) + "}") as records:
            digests.append(records.digest)
    assert len(set(digests)) == 3


def test_ids_that_meet_give_way_to_the_images_numbers(packed: Path) -> None:
    with Records.open("{" + f"{packed / 'one.rec'},{packed / 'many-00000-of-00003.rec'}" + "}") as records:
        assert records.record_ids.tolist() == list(range(22))


def test_files_of_different_classes_are_refused_and_closed(packed: Path) -> None:
    pack(write_folder(packed / "other", {"cat": 3, "fox": 3}), packed / "many-x")
    for read in (Records.open, card_for):
        with pytest.raises(
            DataError, match=r"many-x\.rec has other classes \(without dog, elk; with fox\): pack it"
        ) as e:
            read(packed / "many-*.rec")
        assert f"--classes {packed / 'many-00000-of-00003.json'}, or both into one: steady pack" in str(e.value)


def test_a_shard_that_is_missing_is_named(packed: Path) -> None:
    (packed / "many-00001-of-00003.rec").unlink()
    with pytest.raises(DataError, match=r"no file for 1 of its names \(.*many-00001-of-00003\.rec\)"):
        Records.open(packed / "many-{00000..00002}-of-00003.rec")


def test_shards_are_data_to_train_on_as_they_are(packed: Path, tmp_path: Path) -> None:
    pattern = packed / "many-*.rec"
    assert prepare(pattern, cache=tmp_path / "cache").train == pattern
    pack(packed / "photos", packed / "both", val_fraction=0.3, shards=2)
    prepared = prepare(packed / "both-*.rec", cache=tmp_path / "cache")
    assert prepared.val is not None
    with Records.open(prepared.train) as train, Records.open(prepared.val) as val:
        assert len(train) + len(val) == 16
        assert len(val) == 5
    assert not (tmp_path / "cache").exists()


def test_names_of_label_columns_are_kept_and_must_agree(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"cat": 2}, size=(20, 16))
    names = sorted(path.relative_to(tmp_path) for path in (tmp_path / "photos").rglob("*.*"))
    for table, columns in (("a", "sun,sea"), ("b", "sea,sun")):
        (tmp_path / f"{table}.csv").write_text(f"path,{columns}\n{names[0]},1,0\n{names[1]},0,1\n")
        [packed] = pack(tmp_path / f"{table}.csv", tmp_path / table)
        assert packed.card.label_names == tuple(columns.split(","))
    with pytest.raises(DataError, match=r"b\.rec has other labels in its vectors than .*a\.rec"):
        card_for(tmp_path / "{a,b}.rec")
    [both] = pack([tmp_path / "a.rec", tmp_path / "b.rec"], tmp_path / "both")
    assert both.card.label_names == ("sun", "sea")
    with Records.open(both.path) as records:
        assert records.labels.tolist() == [[1, 0], [0, 1], [0, 1], [1, 0]]
