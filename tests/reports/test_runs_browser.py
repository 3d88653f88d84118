"""The tables of runs as a reader sees them: sorted by a click, with their curves, on a wide screen and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.reports.runs import finished
from tests.reports.test_browser import browser, chromium
from tests.reports.test_browser import opened as opened_file
from tests.reports.test_live import serving
from tests.reports.test_live_browser import opened, until

from steadytrain.reports import report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser", "chromium"]
pytestmark = pytest.mark.browser

BEST = {"good": 0.92, "10-middle": 0.8, "9-poor": 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, best in BEST.items():
        finished(folder, name, best=best, lr=best)
    return folder


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with serving(folder) as port:
        yield port


def names(page: Page) -> list[str]:
    return page.locator(".runs tbody th .run").all_inner_texts()


def test_the_best_run_comes_first_and_a_click_on_a_head_sorts(browser: Browser, port: int) -> None:
    page, complaints = opened(browser, port)
    assert names(page) == ["good", "10-middle", "9-poor"]
    head = page.locator("thead th", has_text="run").get_by_role("button")
    head.click()
    assert names(page) == ["9-poor", "10-middle", "good"], "numbers in names count as such"
    assert page.locator("thead th[aria-sort=ascending]").inner_text() == "run"
    head.press("Enter")
    assert names(page) == ["good", "10-middle", "9-poor"]
    page.locator("thead th.best button").click()
    page.locator("thead th.best button").click()
    page.wait_for_timeout(2500)  # the page has read the runs again
    assert names(page) == ["9-poor", "10-middle", "good"] and complaints == []


def test_curves_lie_over_each_other_and_the_run_at_hand_stands_out(browser: Browser, port: int, folder: Path) -> None:
    page, complaints = opened(browser, port)
    assert page.locator("#chart-top1 .js-line").count() == 3
    page.locator("#rows tr").nth(1).hover()
    shown = "document.querySelector('#chart-top1').data.map((trace) => trace.opacity)"
    until(page, f"{shown}.join() === '0.12,1,0.12'")
    page.mouse.move(0, 0)
    until(page, f"{shown}.join() === '1,1,1'")
    page.locator("#legend button").first.click()
    assert page.locator("#chart-top1 .js-line").count() == 2
    late = finished(folder, "late", best=0.95, lr=0.3)
    until(page, "document.querySelectorAll('#rows tr').length === 4")
    assert names(page)[0] == "late" and page.locator("#legend button").first.inner_text() == "late"
    pressed = {b.inner_text(): b.get_attribute("aria-pressed") for b in page.locator("#legend button").all()}
    assert pressed == {"late": "true", "good": "false", "10-middle": "true", "9-poor": "true"}, "as it was"
    visible = "document.querySelector('#chart-top1').data.map((trace) => trace.visible)"
    assert page.evaluate(visible) == [True, False, True, True]
    page.locator("#legend button").nth(1).click()
    assert page.locator("#chart-top1 .js-line").count() == 4
    colours = page.locator(".swatch").evaluate_all("all => all.map((one) => one.style.borderTopColor)")
    assert len(set(colours)) == 4, "the legend and the rows have the colours of the curves"
    shutil.rmtree(late.directory)
    assert complaints == []


def test_on_a_phone_the_accuracy_is_in_sight_and_the_rest_below_the_name(browser: Browser, port: int) -> None:
    page, _ = opened(browser, port, width=390)
    row = page.locator("#rows tr").first
    box = row.locator("td.best").bounding_box()
    assert box is not None and box["x"] + box["width"] <= 390 and "90.7 %" in row.inner_text()
    assert "finished · resnet20 · cifar10-train.rec · 3 of 3 epochs" in row.locator("th").inner_text()
    assert page.locator("#rows td:visible").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_runs_are_listed_without_scripts(browser: Browser, port: int) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    assert names(page) == ["good", "10-middle", "9-poor"] and "3 finished" in page.inner_text("body")


def test_the_table_of_a_report_is_sorted_in_the_same_way(browser: Browser, folder: Path, tmp_path: Path) -> None:
    page, _ = opened_file(browser, report([folder / name for name in BEST], tmp_path / "report.html").as_uri())
    assert names(page) == ["good", "10-middle", "9-poor"]
    page.locator("thead th", has_text="best top-1").get_by_role("button").click()
    page.locator("thead th", has_text="best top-1").get_by_role("button").click()
    assert names(page) == ["9-poor", "10-middle", "good"]
