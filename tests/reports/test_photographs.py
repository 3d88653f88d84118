"""The photographs of a report as a reader sees them: large by a click, a tap or a key, on a wide screen and a phone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from tests.reports.runs import Clock, course, recipe, started, write
from tests.reports.test_browser import browser, chromium

from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import HEAD
from steadytrain.reports import report
from steadytrain.run import Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser", "chromium"]
pytestmark = pytest.mark.browser

NAMES = ("cat", "dog")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of a run that takes every dog for a cat."""
    folder = tmp_path_factory.mktemp("photographs")
    colours = np.random.default_rng(0)
    for name in NAMES:
        (folder / "pets" / name).mkdir(parents=True)
        for k in range(4):
            pixels = colours.integers(0, 255, (6, 8, 3), np.uint8)
            Image.fromarray(pixels).resize((640, 480)).save(folder / "pets" / name / f"{name}-{k}.jpg")
    pack(folder / "pets", folder / "pets")
    run = Run.create(folder / "run", recipe())
    with Records.open(folder / "pets.rec") as records:
        labels = [records.classes[int(label)] for label in records.labels]
        data: dict[str, Any] = {
            "val": str(folder / "pets.rec"),
            "val_digest": records.digest,
            "classes": list(records.classes),
        }
    data |= {"train": data["val"], "train_digest": data["val_digest"], "num_val": 8}
    begun = started()
    write(run, [replace(begun, data={**begun.data, **data}), *course(0, 20, total=20)], Clock(), end=True)
    rows = [f"{label}-{i}.jpg,pets.rec,{i},{label},cat,0.{i + 1},0.93,{9 - i},2" for i, label in enumerate(labels)]
    run.predictions.write_text("\n".join([HEAD, *rows]) + "\n")
    neighbours = {str(i): [0, 1, 2] for i in range(8)}
    header = json.dumps({"__metadata__": {"steadytrain": json.dumps({"neighbours": neighbours})}}).encode()
    (run.directory / "best.limits.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return report(run, folder / "report.html").as_uri()


def opened(browser: Browser, address: str, width: int, *, touch: bool = False) -> tuple[Page, list[str]]:
    context = browser.new_context(viewport={"width": width, "height": 844}, has_touch=touch)
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    return page, complaints


def test_a_tap_on_a_phone_shows_a_photograph_with_all_that_is_known_of_it(browser: Browser, address: str) -> None:
    page, complaints = opened(browser, address, 390, touch=True)
    first = page.locator(".gallery .photo").first
    box = first.locator("button img").bounding_box()
    assert box is not None and box["width"] >= 160 and box["y"] < 844, "on the first screen"
    first.locator("button").tap()
    viewer = page.locator("#viewer")
    large = viewer.locator(".view > img").bounding_box()
    assert large is not None and large["width"] > 1.8 * box["width"]
    assert viewer.locator(".view > img").evaluate("image => image.naturalWidth") == 480
    words = " ".join(viewer.inner_text().split())
    for text in ("dog-4.jpg", "predicted cat 93 %", "label dog 50 %", "Nearest training images", "1 of 4"):
        assert text in words, words
    assert viewer.locator(".near img:visible").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"
    viewer.get_by_text("Close").tap()
    assert viewer.is_hidden() and complaints == []


def test_keys_open_a_photograph_go_through_all_and_close(browser: Browser, address: str) -> None:
    page, complaints = opened(browser, address, 1400)
    page.locator(".gallery .photo button").nth(1).focus()
    page.keyboard.press("Enter")
    place = page.locator("#viewer .place")
    assert place.inner_text() == "2 of 4"
    for key, expected in (("ArrowRight", "3"), ("ArrowRight", "4"), ("ArrowRight", "1"), ("ArrowLeft", "4")):
        page.keyboard.press(key)
        assert place.inner_text() == f"{expected} of 4"
    page.keyboard.press("Escape")
    assert page.locator("#viewer").is_hidden()
    page.wait_for_function("document.activeElement.closest('.photo')?.dataset.key === 'pets.rec:7'")
    page.locator(".confused .photo button").first.click()
    assert page.locator("#viewer .near img").count() == 3, "of one that is among the worst all is shown here as well"
    page.mouse.click(5, 5)
    assert page.locator("#viewer").is_hidden() and complaints == []


def test_mistakes_stand_before_curves_and_tables(browser: Browser, address: str) -> None:
    page, _ = opened(browser, address, 390)
    tops = page.evaluate(
        "['mistakes', 'learning', 'classes', 'spent'].map(id => document.getElementById(id).offsetTop)"
    )
    assert tops == sorted(tops) and tops[0] < 600
