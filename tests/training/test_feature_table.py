"""The table of features: computed once, by one process, and the same whoever computed it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadytrain as st
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.reader import Records
from steadytrain.machine.facts import resident_bytes
from steadytrain.training.features import table as tables
from steadytrain.training.features.table import FeatureTable, TableWriter, feature_table, open_table, table_folder
from steadytrain.training.inference.classifier import classifier_of
from steadytrain.training.inference.trained import Trained


def _network(folder: Path, name: str = "test_resnet", **options: Any) -> Trained:
    """A network whose weights, but for its classifier, are the same each time."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = timm.create_model(name).state_dict()
    torch.save(weights, folder / f"{name}.pth")
    return st.restore(folder / f"{name}.pth", model=f"timm/{name}", device="cpu", **options)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seventy images in two classes: two batches and a part of one."""
    noise = np.random.default_rng(0)
    for number in range(70):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f"{number:02}.png")
    return tmp_path / "photos"


@pytest.fixture
def records(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    with Records.open(prepare(photos).train) as opened:
        yield opened


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_row_is_what_features_gives_for_the_image(records: Records, tmp_path: Path, name: str) -> None:
    trained = _network(tmp_path, name)
    table = feature_table(trained, records)
    assert table.values.dtype == np.float32 and not table.values.flags.writeable and table.num_computed == 70
    expected = st.features(trained, [bytes(records.image(number)) for number in range(70)])
    np.testing.assert_allclose(table.values, expected, rtol=1e-4, atol=1e-5)


def test_a_second_call_computes_nothing_and_says_so(records: Records, tmp_path: Path) -> None:
    trained, said = _network(tmp_path), list[str]()
    first = feature_table(trained, records, say=said.append)
    assert not said
    again = feature_table(_network(tmp_path), records, say=said.append)
    assert again.num_computed == 0 and np.array_equal(again.values, first.values)
    assert len(said) == 1 and "70 images" in said[0] and str(again.path) in said[0]


def test_a_pass_that_was_killed_goes_on_where_it_was(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = _network(tmp_path)
    whole = np.array(feature_table(trained, records).values)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(tables, "_FLUSH_SECONDS", 0.0)

    def kill(done: int, total: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feature_table(trained, records, progress=kill)
    seen, said = list[tuple[int, int]](), list[str]()
    table = feature_table(trained, records, progress=lambda *done: seen.append(done), say=said.append)
    assert table.num_computed == 38 and seen[-1] == (70, 70) and "32 of 70" in said[0]
    assert np.array_equal(table.values, whole)


def test_rows_that_are_not_known_to_be_written_are_computed_again(records: Records, tmp_path: Path) -> None:
    trained = _network(tmp_path)
    table = feature_table(trained, records)
    whole = np.array(table.values)
    (table.path / "done.u8").unlink()  # as after a loss of power
    assert np.array_equal(feature_table(trained, records).values, whole)
    with (table.path / "values.f32").open("r+b") as file:
        file.truncate(100)
    assert np.array_equal(feature_table(trained, records).values, whole)


def test_rows_have_the_same_bits_in_whatever_order_they_are_computed(records: Records, tmp_path: Path) -> None:
    trained = _network(tmp_path)
    whole = np.array(feature_table(trained, records).values)
    folder = table_folder(trained, records, classifier_of(trained))
    (folder / "done.u8").unlink()
    order = np.random.default_rng(0).permutation(70)
    for part in (order[:33], order[33:]):
        feature_table(trained, records, ids=part, say=lambda line: None)
    assert np.array_equal(feature_table(trained, records).values, whole)


def test_the_name_follows_all_that_the_values_depend_on_and_not_the_classifier(
    records: Records, tmp_path: Path
) -> None:
    trained = _network(tmp_path)
    name = table_folder(trained, records, classifier_of(trained))
    with torch.no_grad():
        list(trained.module.parameters())[-1].add_(2)
    assert table_folder(trained, records, classifier_of(trained)) == name
    changed = [
        replace(trained, input=replace(trained.input, size=96)),
        replace(trained, input=replace(trained.input, crop=0.5)),
        replace(trained, input=replace(trained.input, mean=(0.1, 0.2, 0.3))),
        replace(trained, input=replace(trained.input, interpolation="bicubic")),
        _network(tmp_path, precision="bf16"),
        _network(tmp_path, "test_vit"),
    ]
    names = {table_folder(other, records, classifier_of(other)) for other in changed}
    with torch.no_grad():
        next(trained.module.parameters()).mul_(2)
    names.add(table_folder(trained, records, classifier_of(trained)))
    assert name not in names and len(names) == 7


def test_two_processes_compute_a_table_once(records: Records, tmp_path: Path) -> None:
    trained, said, found = _network(tmp_path), list[str](), list[FeatureTable]()
    folder = table_folder(trained, records, classifier_of(trained))
    values = np.ones((70, 96), np.float32)
    with TableWriter.open(folder, 70, 96) as writer:
        other = threading.Thread(target=lambda: found.append(feature_table(trained, records, say=said.append)))
        other.start()
        while not said:
            time.sleep(0.01)
        writer.write(np.arange(70), values)
    other.join()
    assert "waiting" in said[0] and found[0].num_computed == 0 and np.array_equal(found[0].values, values)


def test_memory_does_not_grow_with_the_rows_that_are_written(tmp_path: Path) -> None:
    rows, columns = 40_000, 640  # 102 MB
    block = np.ones((1000, columns), np.float32)
    with TableWriter.open(tmp_path / "features" / "x", rows, columns) as writer:
        writer.write(np.arange(1000), block)
        before = resident_bytes()
        for first in range(1000, rows, 1000):
            writer.write(np.arange(first, first + 1000), block)
        assert resident_bytes() - before < 20e6
    table = open_table(tmp_path / "features" / "x", rows, np.arange(rows))
    assert table is not None and table.values.shape == (rows, columns) and bool(table.values[-1].all())


def test_tables_that_nobody_uses_are_removed_when_another_is_made(records: Records, tmp_path: Path) -> None:
    trained = _network(tmp_path)
    networks = [replace(trained, input=replace(trained.input, crop=crop)) for crop in (0.5, 0.6, 0.7)]
    old, recent = (feature_table(network, records).path for network in networks[:2])
    os.utime(old, (0, 0))
    feature_table(networks[2], records)
    assert not old.exists() and recent.exists()
    assert open_table(recent, 70, np.arange(70)) is not None
