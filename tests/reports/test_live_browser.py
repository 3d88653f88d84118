"""The live page as a person sees it, in a real browser: of a run that is really training, and of runs that are over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.forked import start
from tests.reports.measured_runs import line, measured
from tests.reports.runs import BEGAN, logged, recipe, started
from tests.reports.test_browser import browser, chromium
from tests.reports.test_live import serving

from steadytrain.cli import main
from steadytrain.cost.prices import parse_price
from steadytrain.events import Noticed, Stalled
from steadytrain.reports.live import listening
from steadytrain.run import Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser", "chromium"]
pytestmark = pytest.mark.browser

NAME = "<img src=x onerror=bad()> <|script>"
EVIL = "<img src=x onerror=\"document.title='bad'\">"
SETTINGS = ["--model", "digits", "--epochs", "20000", "--batch-size", "32", "--lr", "0.02", "--device", "cpu"]
SETTINGS += ["--set", "parallel.compute_threads=1", "--set", "every.log_steps=20", "--set", "every.evaluate_epochs=5"]


@pytest.fixture
def training(digits: Path, tmp_path: Path) -> Iterator[tuple[Run, int]]:
    """A run that trains for as long as a test takes, in a process of its own; the process."""
    child = start(main, ["train", str(digits), "--run", str(tmp_path / "training"), *SETTINGS])
    assert child.pid is not None
    while not (tmp_path / "training" / "recipe.json").exists():
        assert child.is_alive()
        time.sleep(0.05)
    yield Run.open(tmp_path / "training"), child.pid
    if child.is_alive():
        os.kill(child.pid, signal.SIGINT)
    child.join(60)


def opened(browser: Browser, port: int, *, width: int = 1200, dark: bool = False) -> tuple[Page, list[str]]:
    """The page with the first figures on it, and what the browser complained of or asked others for."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.extend(_outside(request.url, port)))
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("body[data-ready]")
    return page, complaints


def _outside(url: str, port: int) -> list[str]:
    return [] if url.startswith((f"http://127.0.0.1:{port}/", "data:", "blob:")) else [f"asked for {url}"]


def points(page: Page, chart: str, trace: int = 0) -> int:
    """How many points a curve has."""
    return int(page.evaluate(f"document.querySelector('#chart-{chart}').data?.[{trace}]?.x.length ?? 0"))


def grows(page: Page, chart: str, beyond: int) -> int:
    """Wait until a curve has more points than that."""
    until(page, f"(document.querySelector('#chart-{chart}').data?.[0]?.x.length ?? 0) > {beyond}")
    return points(page, chart)


def until(page: Page, expression: str, seconds: float = 60.0) -> None:
    """Wait for something on the page; playwright's own waiting is code from a string, which the page's policy bars."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"it never came to be: {expression}"
        page.wait_for_timeout(100)


@pytest.mark.slow
def test_a_run_that_trains_is_seen_to_go_on_and_to_end(browser: Browser, training: tuple[Run, int]) -> None:
    run, pid = training
    with serving(run, price=parse_price("3.6")) as port:
        page, complaints = opened(browser, port)
        page.wait_for_selector("#standing.running", timeout=60_000)
        before = grows(page, "loss", 0)
        grows(page, "ledger", 1)
        assert grows(page, "loss", before) > before, "the curve goes on while one looks at it"
        assert page.locator("#standing-text").text_content() == f"running, process {pid}"
        page.wait_for_selector("#verdict:not([hidden])")
        assert len(page.locator("#sentence").text_content() or "") > 20
        areas = page.locator("#chart-ledger .js-fill").evaluate_all("all => all.map((one) => one.getBBox().height)")
        assert max(areas) > 100, "the time is a stack of areas"
        for text in ("Images per second, now", "Wall time", "Time left", "Cost so far"):
            assert page.get_by_text(text, exact=True).is_visible()
        until(page, "document.querySelector('#chart-top1').data?.length === 2")  # an evaluation came
        for chart in ("rate", "feed", "cores", "memory"):
            assert points(page, chart) > 0, chart
        os.kill(pid, signal.SIGINT)
        page.wait_for_selector("#standing.interrupted", timeout=30_000)
        assert "stopped by the user" in (page.locator("#alarms").text_content() or "")
        assert complaints == []


@pytest.fixture(scope="module")
def shown(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, list[str]]]:
    """One page of a run that is over, for all tests that leave it as they found it: to draw it takes seconds."""
    with serving(measured(tmp_path_factory.mktemp("shown"))) as port:
        yield opened(chromium, port)


@pytest.mark.parametrize(("width", "dark"), [(600, True), (1200, False)], ids=["600-dark", "1200-light"])
def test_whole_run_fits_on_the_page(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    with serving(measured(tmp_path, gpus=1)) as port:
        page, complaints = opened(browser, port, width=width, dark=dark)
        grows(page, "device-0", 0)
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
        lines = {name: page.locator(f"#chart-{name} .js-line").count() for name in ("loss", "top1", "rate", "feed")}
        assert lines == {"loss": 2, "top1": 2, "rate": 2, "feed": 2}
        assert page.locator("#chart-device-0 .js-line").count() == 5
        assert page.locator("#standing.finished").is_visible()
        shares = page.locator("#accounts td:nth-child(2)").all_text_contents()
        assert sum(float(share.split()[0]) for share in shares) == pytest.approx(100, abs=1)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(19, 21, 24)" if dark else "rgb(255, 255, 255)")
        assert complaints == []


def test_curves_can_be_seen_over_epochs_by_keyboard_alone(shown: tuple[Page, list[str]]) -> None:
    page, complaints = shown
    grows(page, "loss", 0)
    title = page.locator("#chart-loss .xtitle")
    assert title.text_content() == "wall time, minutes"
    page.locator("input[name=axis]").first.focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#chart-loss .xtitle').textContent === 'epoch'")
    assert page.locator("#chart-rate .js-line").count() == 2
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('#chart-loss .xtitle').textContent === 'wall time, minutes'")
    assert complaints == []


def test_hovering_over_the_ledger_tells_what_the_time_went_into(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    grows(page, "ledger", 0)
    page.locator("#chart-ledger").scroll_into_view_if_needed()
    page.locator("#chart-ledger .nsewdrag").hover()
    page.wait_for_selector("#chart-ledger .hoverlayer .legend")
    assert "backward pass" in (page.locator("#chart-ledger .hoverlayer").text_content() or "")


def test_a_day_is_said_once_and_the_time_agrees_with_the_ledger(shown: tuple[Page, list[str]]) -> None:
    page, _ = shown
    moments = page.locator("#happened td:first-child").all_text_contents()
    assert (
        len(moments) > 1 and moments[0].startswith("20") and not any(moment.startswith("20") for moment in moments[1:])
    )
    (wall,) = page.locator("#heroes div", has_text="Wall time").locator("dd").all_text_contents()
    total = (page.locator("#wall").text_content() or "").removesuffix(" in all")
    assert total and wall.startswith(total)


def test_no_name_and_no_message_is_ever_markup(browser: Browser, tmp_path: Path) -> None:
    run = Run.create(tmp_path / NAME, recipe())
    stalled = Stalled(step=20, what=EVIL, seconds=90.0, expected_seconds=0.2, culprit=EVIL, stacks="stacks.txt")
    starts = [started(), logged(20), stalled, Noticed(message=EVIL)]
    path = run.directory / "events.jsonl"
    path.write_text("".join(line(event, BEGAN + i) for i, event in enumerate(starts)), encoding="utf-8")
    with serving(run) as port:
        page, complaints = opened(browser, port)
        page.wait_for_selector("#happened tr")
        assert page.locator("h1").text_content() == NAME
        assert EVIL in (page.locator("#happened").text_content() or "")
        assert page.locator("main img").count() == 0
        assert NAME in page.title()
        assert complaints == []
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad = 1\">')")
        page.wait_for_timeout(200)
        assert page.evaluate("window.bad") is None, "and if it were, it could not run"


def test_a_server_that_comes_back_is_found_again(browser: Browser, tmp_path: Path) -> None:
    run = measured(tmp_path, steps=200)
    with listening(0) as reserved:
        port = reserved.getsockname()[1]
    with serving(run, port=port):
        page, _ = opened(browser, port)
        before = grows(page, "loss", 0)
        page.wait_for_timeout(300)
    page.wait_for_selector("#lost:not([hidden])")
    with serving(run, port=port):
        page.wait_for_selector("#lost", state="hidden", timeout=20_000)
        assert points(page, "loss") == before, "no point is drawn twice"


@pytest.mark.slow
def test_a_page_in_the_background_asks_for_nothing(browser: Browser, tmp_path: Path) -> None:
    with serving(measured(tmp_path, steps=200)) as port:
        page, _ = opened(browser, port)
        before = grows(page, "loss", 0)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        page.evaluate(hide % "true" + tell)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(1500)
        assert asked == []
        page.evaluate(hide % "false" + tell)
        page.wait_for_timeout(1500)
        assert len(asked) == 1
        assert "after=" in asked[0]
        assert points(page, "loss") == before


def test_page_without_scripts_shows_a_notice(browser: Browser, tmp_path: Path) -> None:
    with serving(measured(tmp_path, steps=100)) as port:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        assert "shows the same in a terminal" in page.inner_text("body")
