"""Measuring a feed: counts and shares that add up."""

from __future__ import annotations

import pytest
from tests.data.loader.pictures import mixed_jpegs, small_pngs

from steadytrain.data.loader import Crop, ImageLoader, measure


def test_first_pass_is_measured_separately_where_images_are_cached() -> None:
    feed = ImageLoader(small_pngs(60), Crop(kind="pad-crop", size=16), batch_size=10, threads=2)
    measured = measure(feed, seconds=0.05)
    assert measured.first_pass is not None and measured.first_pass.images >= 60
    assert measured.first_pass.decode_share > 0
    assert measured.steady.seconds >= 0.05 and measured.steady.images > 0
    assert measured.steady.decode_share == measured.steady.bytes_per_second == 0


def test_first_pass_is_left_out_if_it_may_have_happened_before() -> None:
    feed = ImageLoader(small_pngs(50), Crop(kind="pad-crop", size=16), batch_size=10, threads=2)
    assert measure(feed, seconds=0.05).first_pass is None and feed.stats().kept_bytes > 0


def test_large_images_have_one_steady_state() -> None:
    feed = ImageLoader(mixed_jpegs(30), Crop(kind="resized-crop", size=32), batch_size=10, threads=1, keep_bytes=0)
    measured = measure(feed, seconds=0.1)
    steady = measured.steady
    assert measured.first_pass is None and measured.first_batch_seconds > 0
    assert steady.images_per_second == pytest.approx(steady.images / steady.seconds)
    assert steady.decode_share > 0 and steady.read_share > 0
    assert (
        steady.read_share + steady.decode_share + steady.augment_share + steady.batch_share + steady.blocked_share
        <= 1 + 1e-9
    )
    assert steady.bytes_per_second > 0


def test_large_images_that_fit_are_measured_before_and_after_they_are_kept() -> None:
    feed = ImageLoader(mixed_jpegs(30), Crop(kind="resized-crop", size=64), batch_size=5, threads=1)
    measured = measure(feed, seconds=1.0)
    assert measured.first_pass is not None and measured.first_pass.bytes_per_second > 0
    assert measured.steady.bytes_per_second == 0 and feed.stats().kept_bytes > 0


def test_an_evaluation_is_repeated_as_long_as_is_measured() -> None:
    feed = ImageLoader(small_pngs(7), Crop(kind="none", size=16), batch_size=4, train=False, threads=1)
    assert measure(feed, seconds=0.1).steady.images > 14
