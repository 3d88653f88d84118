"""The page as a reader sees it: in a real browser, wide and narrow, light and dark, and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from tests.reports.runs import finished, restarted

from steadytrain.reports import report
from steadytrain.run import Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
NAME = "<script>alert(1)<|script>"
TICK = "getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill"
FIGURES = ["top1", "loss", "lr", "rate", "wait"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The same, without the pages of the test before."""
    before = list(chromium.contexts)
    yield chromium
    for context in chromium.contexts:
        if context not in before:
            context.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page that compares two runs."""
    folder = tmp_path_factory.mktemp("report")
    runs: list[Run | str | Path] = [finished(folder, NAME), restarted(folder)]
    return report(runs, folder / "report.html").as_uri()


def opened(browser: Browser, address: str, *, width: int = 1280, dark: bool = False) -> tuple[Page, list[str]]:
    """The page with its curves drawn, and what the browser complained of."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    return page, complaints


@pytest.fixture(scope="module")
def shown(chromium: Browser, address: str) -> tuple[Page, list[str]]:
    """One page for all tests that leave it as they found it: to draw its curves takes seconds."""
    return opened(chromium, address)


@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(400, False, id="400-light"), pytest.param(1280, True, id="1280-dark", marks=pytest.mark.slow)],
)
def test_every_curve_is_drawn_and_the_browser_complains_of_nothing(
    browser: Browser, address: str, width: int, dark: bool
) -> None:
    page, complaints = opened(browser, address, width=width, dark=dark)
    drawn = {name: page.locator(f"#chart-{name} .js-line").count() for name in FIGURES}
    assert drawn == {"top1": 4, "loss": 4, "lr": 2, "rate": 2, "wait": 2}
    assert page.locator("#chart-top1 .points path").count() >= 6, "an evaluation is a dot"
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    assert page.locator("#no-curves").is_hidden()


def test_dark_and_light_follow_the_system_while_the_page_is_open(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    colours = []
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(100)
        colours.append(
            (
                page.evaluate("getComputedStyle(document.body).backgroundColor"),
                page.evaluate(TICK),
            )
        )
    page.emulate_media(color_scheme="light")
    assert colours == [("rgb(255, 255, 255)", "rgb(95, 102, 113)"), ("rgb(19, 21, 24)", "rgb(152, 160, 171)")]


def test_curves_can_be_seen_over_wall_time_and_without_a_run(shown: tuple[Page, list[str]]) -> None:
    page, complaints = shown
    titles = page.locator("#chart-loss .xtitle")
    assert titles.text_content() == "epoch"
    page.locator("label", has_text="wall time").click()
    assert titles.text_content() == "wall time, minutes"
    page.get_by_role("button", name="restarted").click()
    assert page.locator("#chart-top1 .js-line").count() == 2
    page.get_by_role("button", name="restarted").click()
    assert page.locator("#chart-top1 .js-line").count() == 4
    page.locator("label", has_text="epoch").click()
    assert titles.text_content() == "epoch"
    assert complaints == []


def test_hovering_tells_the_run_the_value_and_its_interval(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    page.get_by_role("button", name="restarted").click()
    page.locator("#chart-top1").scroll_into_view_if_needed()
    dot = page.locator("#chart-top1 .points path").nth(1).bounding_box()
    assert dot is not None
    page.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    page.wait_for_selector("#chart-top1 .hovertext")
    text_content = page.locator("#chart-top1 .hovertext").first.text_content() or ""
    page.mouse.move(0, 0)
    page.get_by_role("button", name="restarted").click()
    assert NAME in text_content
    assert "95 %:" in text_content
    assert "step 704" in text_content


def test_nothing_but_the_pages_own_scripts_can_run(shown: tuple[Page, list[str]]) -> None:
    page, complaints = shown
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad = 1\">')")
    page.evaluate("document.head.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))")
    page.wait_for_timeout(200)
    assert page.evaluate("window.bad") is None
    assert any("Content Security Policy" in text for text in complaints)
    complaints.clear()


def test_nothing_offers_to_send_the_curves_away(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    buttons = page.locator("#chart-top1 .modebar-btn").evaluate_all("all => all.map((one) => one.dataset.title)")
    assert buttons
    assert not [title for title in buttons if "Share" in title or "loud" in title]


def test_page_without_scripts_shows_tables_and_a_notice(browser: Browser, address: str) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(address)
    assert page.locator(".runs").get_by_text("restarted").first.is_visible()
    page.get_by_text("All figures of each run").click()
    assert page.get_by_text("1 (96 steps repeated)").is_visible()
    assert page.locator("#no-curves").is_visible()


def test_on_paper_the_curves_fit_and_hidden_tables_are_open(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    page.emulate_media(color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    widths = page.locator(".chart .main-svg").evaluate_all("all => all.map((one) => one.clientWidth)")
    assert max(widths) <= 690, "A4 within its margins, in CSS pixels"
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate(TICK) == "rgb(95, 102, 113)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen", color_scheme="light")
    assert page.locator("details:not([open])").count() > 0


def test_the_bar_of_seconds_is_full_and_tells_what_a_restart_lost(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    page.set_viewport_size({"width": 600, "height": 900})
    bars = page.locator(".stack").all()
    assert len(bars) == 2
    for bar in bars:
        parts = [part.bounding_box() for part in bar.locator("span").all()]
        box = bar.bounding_box()
        assert box is not None
        assert sum(part["width"] for part in parts if part) == pytest.approx(box["width"], rel=0.01)
    assert "updates 88.9" in (bars[1].get_attribute("aria-label") or "")
    assert page.get_by_role("row", name="lost to restarts").get_by_text("8.2 %").is_visible()
    page.set_viewport_size({"width": 1280, "height": 900})
