"""Record files in a store: the same images, order and weights as from a local file, and no credentials in a run."""

from __future__ import annotations

import json
import pickle
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.store import Bucket, FaultProxy

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.data.loader import Crop, ImageLoader, readahead
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio import reader
from steadytrain.data.recordio.reader import Records
from steadytrain.data.storage import object_cache, pages, remote_file
from steadytrain.data.storage.object_cache import open_object
from steadytrain.data.storage.remote_file import RemoteFile
from steadytrain.errors import DataError, StorageError
from steadytrain.run import Run
from steadytrain.training import train


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and requests so small that the digits take dozens."""
    monkeypatch.setattr(pages, "PAGE_BYTES", 4096)
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", 8192)
    monkeypatch.setattr(remote_file, "GAP_BYTES", 0)


@pytest.fixture
def uri(bucket: Bucket, digits: Path) -> str:
    return bucket.put_records(digits.parent, "digits")


def _remote_files(records: Records) -> list[RemoteFile]:
    return [file.view for file in records._files if isinstance(file.view, RemoteFile)]


def test_records_in_a_store_are_those_of_the_file(uri: str, digits: Path) -> None:
    with Records.open(digits) as local, Records.open(open_object(uri)) as remote:
        assert remote.name == uri and remote.digest == local.digest and remote.classes == local.classes
        assert np.array_equal(remote.labels, local.labels) and np.array_equal(remote.record_ids, local.record_ids)
        for number in np.random.default_rng(0).permutation(len(local)).tolist():
            assert bytes(remote.image(number)) == bytes(local.image(number))
        assert len(pickle.loads(pickle.dumps(remote))) == len(local)


@pytest.mark.parametrize("shards", [None, 3])
def test_labels_and_classes_are_known_without_the_images(
    shards: int | None, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MOST_COMPARED", 1)
    for number in range(120):
        place = tmp_path / "noise" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (100, 100, 3), np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    paths = [file.path for file in pack(tmp_path / "noise", tmp_path / "x", shards=shards)]
    for path in paths:
        bucket.put_records(tmp_path, path.stem)
    with Records.open(bucket.uri("x*.rec")) as remote:
        assert remote.labels.tolist() == [0] * 60 + [1] * 60 and remote.classes == ("a", "b")
        assert remote.record_ids.tolist() == list(range(120))
        fetched = remote.traffic()
        assert fetched is not None and fetched.bytes < sum(path.stat().st_size for path in paths) / 2


@pytest.mark.parametrize("is_right", [True, False])
def test_labels_that_are_not_sorted_follow_from_a_list_that_fits(
    is_right: bool, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MOST_COMPARED", 1)
    (tmp_path / "noise").mkdir()
    for number in range(120):
        noise = np.random.default_rng(number).integers(0, 256, (100, 100, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "noise" / f"{number}.png")
    lines = [f"{number + 5}\t{number * 7 % 3}\t{number}.png\n" for number in range(120)]
    (tmp_path / "noise.lst").write_text("".join(lines))
    paths = [file.path for file in pack(tmp_path / "noise.lst", tmp_path / "x", root=tmp_path / "noise", shards=2)]
    for path in paths:
        bucket.put_records(tmp_path, path.stem)
        listed = path.with_suffix(".lst").read_text().splitlines(keepends=True)
        bucket.put(f"{path.stem}.lst", "".join(listed if is_right else listed[::-1]).encode())
    with Records.open(bucket.uri("x*.rec")) as remote, Records.open(tmp_path / "x*.rec") as local:
        assert np.array_equal(remote.labels, local.labels) and np.array_equal(remote.record_ids, local.record_ids)
        fetched = remote.traffic()
        assert fetched is not None
        assert (fetched.bytes < sum(path.stat().st_size for path in paths) / 2) == is_right
        assert remote.places(np.array([3]))[0][0] == "3.png"


def test_many_objects_are_opened_by_few_requests(
    bucket: Bucket, fault_proxy: FaultProxy, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 256)
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", 256)
    packed = pack(digits_folder, tmp_path / "x", shards=12)
    for file in packed:
        bucket.put_records(tmp_path, file.path.stem)
    for is_cold in (True, False):
        fault_proxy.requests.clear()
        with Records.open(bucket.uri("x-*.rec")) as remote:
            assert remote.labels.tolist() == sorted(remote.labels.tolist()) and len(remote.classes) == 10
        counts = Counter(path for path, _ in fault_proxy.requests)
        # A listing; an index and a card of each; and four files of which blocks are compared with their cards.
        assert len(counts) == (1 + 2 * 12 + 4 if is_cold else 1)
        assert len(set(fault_proxy.requests)) == len(fault_proxy.requests)  # nothing is asked for twice


def test_batches_from_a_store_are_those_of_the_file(uri: str, digits: Path) -> None:
    def batches(path: Path) -> list[tuple[bytes, bytes, bytes]]:
        crop = Crop(kind="pad-crop", size=8, channels=1, pad=1)
        with Records.open(path) as records, ImageLoader(records, crop, batch_size=50, seed=3, stop=800) as loader:
            return [(b.images.tobytes(), b.labels.tobytes(), b.ids.tobytes()) for b in loader]

    assert batches(open_object(uri)) == batches(digits)


@pytest.mark.parametrize("passes", [0.1, 1.0])
def test_all_of_the_data_is_fetched_meanwhile_where_all_will_be_used(
    passes: float, uri: str, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 256)
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 4096)
    with Records.open(uri) as records:
        [remote] = _remote_files(records)
        remote.disk.drop(np.arange(len(remote.disk.present)))  # so small a file is read whole when it is opened
        crop, stop = Crop(kind="none", size=8), round(passes * len(records))
        with ImageLoader(records, crop, batch_size=8, stop=stop, threads=1, keep_bytes=0) as loader:
            batches = iter(loader)
            next(batches)
            until = time.monotonic() + (60.0 if passes == 1 else 1.0)
            while not remote.disk.present.all() and time.monotonic() < until:
                time.sleep(0.01)
            assert remote.disk.present.all() == (passes == 1)


def test_objects_that_do_not_fit_together_do_not_stay(
    bucket: Bucket, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [open_object(bucket.put_records(digits.parent, "digits"))]
    limit = 3 * files[0].stat().st_size
    monkeypatch.setattr(object_cache, "LEAST_LIMIT", 1000)
    monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", str(limit))
    for suffix in (".rec", ".idx", ".json"):
        bucket.put(f"other{suffix}", digits.with_suffix(suffix))
    with Records.open(files[0]) as file, Records.open(f"{bucket.uri('{digits,other}.rec')}") as both:
        assert file.stays and not both.stays


def test_an_object_of_another_size_than_its_card_says_is_refused(
    bucket: Bucket, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MOST_COMPARED", 1)
    for file in pack(digits_folder, tmp_path / "x", shards=3):
        bucket.put_records(tmp_path, file.path.stem)
    last = tmp_path / "x-00002-of-00003.rec"
    bucket.put(last.name, last.read_bytes() + bytes(4))
    with pytest.raises(DataError, match=r"x-00002-of-00003\.json does not describe x-00002-of-00003\.rec: it states"):
        Records.open(bucket.uri("x-*.rec"))


def test_many_small_objects_stay_below_the_limit_together(
    bucket: Bucket, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(digits_folder, tmp_path / "x", shards=70)
    for file in packed:
        bucket.put_records(tmp_path, file.path.stem)
    limit = sum(file.card.bytes for file in packed) // 2
    monkeypatch.setattr(object_cache, "LEAST_LIMIT", 1000)
    monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", str(limit))
    assert max(file.card.bytes for file in packed) < limit // 32
    with Records.open(bucket.uri("x-*.rec")) as records:
        for number in range(len(records)):
            records.image(number)
        files = _remote_files(records)
        fetched = sum(int(file.disk.present.sum()) * file.disk.page_bytes for file in files)
        assert fetched <= limit


def test_shards_are_opened_at_the_same_time(
    bucket: Bucket, fault_proxy: FaultProxy, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, _ in pack(digits_folder, tmp_path / "x", shards=6):
        bucket.put_records(path.parent, path.stem)
    fault_proxy.delay_seconds = 0.3
    monkeypatch.setattr(reader, "_MOST_COMPARED", 6)
    Records.open(bucket.uri("x-*.rec")).close()
    assert fault_proxy.most_at_once > 1  # not one after the other


def test_more_shards_are_read_than_a_process_may_have_files_open(
    bucket: Bucket, digits_folder: Path, tmp_path: Path
) -> None:
    for path, _ in pack(digits_folder, tmp_path / "x", shards=24):
        bucket.put_records(path.parent, path.stem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, hard))
    try:
        with Records.open(bucket.uri("x-*.rec")) as remote, Records.open(tmp_path / "x-*.rec") as local:
            assert all(bytes(remote.image(number)) == bytes(local.image(number)) for number in range(len(local)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("suffixes", [(".rec",), (".rec", ".idx")])
def test_a_record_file_without_card_or_index_is_read_as_a_local_one(
    suffixes: tuple[str, ...], bucket: Bucket, digits: Path
) -> None:
    for suffix in suffixes:
        bucket.put(f"bare{suffix}", digits.with_suffix(suffix))
    with Records.open(digits) as local, Records.open(open_object(bucket.uri("bare.rec"))) as remote:
        assert remote.card is None and np.array_equal(remote.labels, local.labels)
        assert all(bytes(remote.image(number)) == bytes(local.image(number)) for number in range(len(local)))


def test_an_index_of_another_file_is_told(bucket: Bucket, uri: str, digits: Path) -> None:
    lines = digits.with_suffix(".idx").read_text().splitlines()
    bucket.put("digits.idx", "\n".join(line + "7" for line in lines).encode())
    bucket.remove("digits.json")
    with pytest.raises(DataError, match=r"digits\.idx does not fit digits\.rec .*: upload both again"):
        Records.open(open_object(uri))


def test_a_new_card_is_fetched_and_one_that_went_is_not_kept(bucket: Bucket, uri: str, digits: Path) -> None:
    file = open_object(uri)
    card = json.loads(digits.with_suffix(".json").read_text())
    del card["checksum"]
    bucket.put("digits.json", json.dumps({**card, "source": "elsewhere"}).encode())
    with Records.open(open_object(uri)) as records:
        assert records.card is not None and records.card.source == "elsewhere"
    bucket.remove("digits.json")
    with Records.open(open_object(uri)) as records:
        assert records.card is None and records.path == file


def test_waiting_for_a_store_is_reading_in_the_figures_of_the_loader(
    uri: str, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Records.open(open_object(uri)) as records:
        [copy] = _remote_files(records)
        copy.disk.drop(np.arange(len(copy.disk.present)))
        fault_proxy.delay_seconds = 0.3
        crop = Crop(kind="pad-crop", size=8, channels=1, pad=1)
        with ImageLoader(records, crop, batch_size=100, stop=400, threads=1) as loader:
            began = time.perf_counter()
            assert len(list(loader)) == 4
            waited = time.perf_counter() - began
            assert 0.3 <= loader.stats().read_seconds <= waited


def test_an_object_that_changes_ends_a_loader_with_the_reason(
    bucket: Bucket, uri: str, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Records.open(open_object(uri)) as records:
        [copy] = _remote_files(records)
        copy.disk.drop(np.arange(len(copy.disk.present)))
        bucket.put("digits.rec", digits.read_bytes() + b"more")
        crop = Crop(kind="pad-crop", size=8, channels=1, pad=1)
        with (
            ImageLoader(records, crop, batch_size=100) as loader,
            pytest.raises(StorageError, match=r"digits\.rec has changed since it was opened"),
        ):
            next(iter(loader))


def test_training_from_a_store_gives_the_weights_of_local_training_through_faults(
    uri: str,
    recipe: Recipe,
    fault_proxy: FaultProxy,
    tmp_path: Path,
    weights: Callable[[Path], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(Run.create(tmp_path / "local", recipe))
    opened = open_object(uri)
    copy = RemoteFile(opened)
    copy.disk.drop(np.arange(len(copy.disk.present)))
    copy.close()
    fault_proxy.faults = [(503, "SlowDown"), "reset", "cut"]
    fault_proxy.matches = "digits.rec"
    run = Run.create(tmp_path / "remote", recipe.with_({"data.train": uri}))
    train(run)
    assert weights(tmp_path / "remote") == weights(tmp_path / "local") and not fault_proxy.faults
    for path in run.directory.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"not-to-be-shown" not in content and b"AKIAWHOREADSTHIS" not in content, path


@pytest.fixture
def split(bucket: Bucket, write_digits: Callable[[Path, int, int], Path], tmp_path: Path) -> Iterator[Bucket]:
    """``x-train.rec`` and ``x-val.rec`` in the bucket."""
    for name, count in (("train", 80), ("val", 40)):
        pack(write_digits(tmp_path / name, count, 2), tmp_path / "packed" / f"x-{name}")
        bucket.put_records(tmp_path / "packed", f"x-{name}")
    yield bucket


def test_feed_measures_an_object_by_its_uri(split: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["feed", split.uri("x-train.rec"), "--seconds", "0.1", "--batch-size", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == split.uri("x-train.rec") and document["n"] == 80
    assert document["store"]["requests"] > 0


def test_train_finds_the_validation_object_beside_the_training_one(
    split: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--model", "mlp", "--epochs", "1", "--batch-size", "16", "--device", "cpu", "--run", "run"]
    assert main(["train", split.uri("x-train.rec"), *quick]) == 0
    assert f"validation data: {split.uri('x-val.rec')}, found beside" in capsys.readouterr().err
    assert main(["train", split.uri("x-train.rec"), "--val", split.uri("none.rec"), *quick[:-1], "other"]) == 2
    assert f"there is no object {split.uri('none.rec')}" in capsys.readouterr().err
    assert Run.open("run").recipe.data.val == split.uri("x-val.rec")


def test_a_file_uri_is_a_local_file(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["feed", digits.as_uri(), "--seconds", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == digits.as_uri()
