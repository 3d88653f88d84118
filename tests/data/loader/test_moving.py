"""A feed that moves while it is read gives what one that stays gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.loader.pictures import Pictures, encode, scene, small_pngs, write_records

from steadytrain.data.loader import Batch, Choice, Crop, ImageLoader, choice, moving
from steadytrain.data.loader.choice import Gauge
from steadytrain.data.recordio.reader import Records

SMALL = Crop(kind="pad-crop", size=16, flip=True)
STOP = 12_000 * 4


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    with write_records(tmp_path / "small.rec", small_pngs(30)) as records:
        yield records


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.machine.facts.cores", lambda: 2)  # with one, nothing is measured
    monkeypatch.setattr(moving, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(moving, "LONGEST_SECONDS", 1.0)
    monkeypatch.setattr(choice, "BATCHES", 8)


def always(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Let a process always be tried, and this be chosen then, whatever was measured."""
    monkeypatch.setattr(moving, "worth_trying", lambda threads, *, made_here: None)
    real = choice.judge

    def judge(threads: Gauge, process: Gauge) -> Choice:
        return replace(real(threads, process), place=place)  # type: ignore[arg-type]

    monkeypatch.setattr(moving, "judge", judge)


def loop(batches: Iterator[Batch], until: list[Choice], more: int = 50) -> Iterator[Batch]:
    """Batches until a choice was made, and some more, taken slowly enough for a process to start."""
    for batch in batches:
        yield batch
        if not until:
            time.sleep(0.5e-3)
        else:
            more -= 1
        if more == 0:
            return


@pytest.mark.parametrize(
    ("place", "threads"),
    [
        ("threads", 3),
        ("process", 1),
        pytest.param("threads", 1, marks=pytest.mark.slow),
        pytest.param("process", 3, marks=pytest.mark.slow),
    ],
)
def test_a_move_changes_no_byte(records: Records, place: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, place)
    told: list[Choice] = []
    stays = ImageLoader(records, SMALL, batch_size=4, start=400, stop=400 + STOP, seed=5, threads=2)
    moves = ImageLoader(
        records,
        SMALL,
        batch_size=4,
        start=400,
        stop=400 + STOP,
        seed=5,
        threads=threads,
        place="auto",
        on_choice=told.append,
    )
    with stays, moves:
        count = 0
        for one, other in zip(loop(iter(moves), told), stays, strict=False):
            assert np.array_equal(one.images, other.images) and np.array_equal(one.positions, other.positions)
            assert np.array_equal(one.ids, other.ids) and np.array_equal(one.labels, other.labels)
            count += 1
        assert [one.place for one in told] == [place] and told[0].process_cost is not None
        assert moves.place == place and moves.stats().images >= 4 * count


def test_shards_move_as_well(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "process")
    told: list[Choice] = []
    stays = ImageLoader(records, SMALL, batch_size=4, stop=2 * STOP, threads=2, shard=(1, 2))
    moves = ImageLoader(
        records, SMALL, batch_size=4, stop=2 * STOP, threads=2, shard=(1, 2), place="auto", on_choice=told.append
    )
    with stays, moves:
        for one, other in zip(loop(iter(moves), told), stays, strict=False):
            assert np.array_equal(one.images, other.images) and np.array_equal(one.positions, other.positions)
    assert told


def test_a_bad_image_is_told_once_wherever_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "process")
    images = [encode(scene(i, 20, 24), "JPEG") for i in range(20)]
    told, bad = list[Choice](), list[int]()
    with write_records(tmp_path / "bad.rec", Pictures([*images[:3], b"no image", *images[4:]])) as records:
        cut = Crop(kind="none", size=16)
        feed = ImageLoader(records, cut, batch_size=4, stop=STOP, place="auto", on_choice=told.append, keep_bytes=0)
        feed.on_bad = lambda met: bad.append(met.id)
        with feed:
            list(loop(iter(feed), told))
    assert told and bad == [3]


def test_threads_stay_where_a_process_cannot_have_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "process")
    told: list[Choice] = []
    source = small_pngs(30)
    source.cannot = lambda: None  # type: ignore[attr-defined]
    with ImageLoader(source, SMALL, batch_size=4, stop=STOP, place="auto", on_choice=told.append) as feed:
        assert [len(batch) for batch in loop(iter(feed), told)]
    assert told[0].place == "threads" and "cannot be pickled" in told[0].reason


def test_a_slow_loop_is_left_alone(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "SETTLE_BATCHES", 3)
    monkeypatch.setattr(moving, "LONGEST_SECONDS", 0.02)
    told: list[Choice] = []
    with ImageLoader(records, SMALL, batch_size=4, stop=STOP, place="auto", on_choice=told.append) as feed:
        for _, _ in zip(feed, range(5), strict=False):
            time.sleep(0.03)
    assert told[0].place == "threads" and told[0].threads_cost is None and "ms" in told[0].reason


def test_short_streams_and_evaluations_are_not_measured(records: Records) -> None:
    told: list[Choice] = []
    for short in (
        ImageLoader(records, SMALL, batch_size=4, stop=400, place="auto", on_choice=told.append),
        ImageLoader(records, SMALL, batch_size=4, train=False, place="auto", on_choice=told.append),
    ):
        with short:
            list(short)
    assert told == []


def test_closing_in_the_midst_of_measuring_ends_all(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, "process")
    for taken in (1, 70, 100, 140, 400):
        feed = ImageLoader(records, SMALL, batch_size=4, place="auto")
        for _, _ in zip(feed, range(taken), strict=False):
            pass
        feed.close()
