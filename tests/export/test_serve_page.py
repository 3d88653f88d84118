"""The pages of a server of a run, as a visitor sees them: what it is, an example to try, and forms that send."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.cli.terminal import on_terminal, unstyled
from tests.reports.test_browser import browser, chromium

from steadytrain.cli import main
from steadytrain.export.serve import ServeSettings, Service
from steadytrain.reports.live import HOSTS
from steadytrain.reports.run_list import list_runs
from steadytrain.training import restore

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "chromium"]
TRAIN = ["--model", "digits", "--epochs", "1", "--set", "data.pad=1", "--holdout", "0.2", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    assert main(["train", str(digits), "--run", str(folder), *TRAIN]) == 0
    return folder


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "steadytrain", "serve", str(run), "--port", "0", "--max-batch", "1"]
    with subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield next(line.strip() for line in server.stdout if line.startswith("http://"))
        server.send_signal(signal.SIGINT)


def test_on_a_terminal_a_server_says_what_it_does_before_it_serves(run: Path) -> None:
    command = [sys.executable, "-m", "steadytrain", "serve", str(run), "--port", "0", "--device", "cpu"]
    code, sent = on_terminal(command, 80, until=b"Ctrl-C stops")
    places = [unstyled(sent).find(words) for words in ("loading ", "measuring batches", "Ctrl-C stops")]
    assert code == 0 and -1 not in places and places == sorted(places)


@pytest.mark.browser
def test_a_visitor_learns_what_it_is_and_tries_it_without_a_picture(browser: Browser, address: str, run: Path) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#example:not([hidden])")
    (row,) = list_runs(run)
    assert row.best is not None and row.low is not None
    assert page.locator("h1").inner_text() == page.title() == f"digits.rec: {100 * row.best:.1f} % top-1"
    assert f"95 % interval {100 * row.low:.1f} to" in page.locator("#facts").inner_text()
    assert "digits · 10 classes" in page.locator("#facts").inner_text()
    page.locator("#example button").click()
    page.wait_for_selector("#answers li[data-answered]")
    assert page.locator("#answers .class").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth") == 390 and complaints == []


@pytest.mark.browser
def test_what_of_a_picture_is_not_used_stands_beside_it(browser: Browser, address: str, tmp_path: Path) -> None:
    Image.new("I;16", (8, 8), 999).save(tmp_path / "deep.png")
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    page.locator("#files").set_input_files(tmp_path / "deep.png")
    page.wait_for_selector("#answers li[data-answered]")
    assert "16 bits a channel" in page.locator("#answers li").inner_text()


@pytest.mark.browser
def test_an_accuracy_is_rounded_as_in_the_report(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.route("**/model", lambda route: route.fulfill(json={**route.fetch().json(), "best": 53 / 80}))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    assert f"{100 * 53 / 80:.1f}" == "66.2" and "66.2 % top-1" in page.title()


@pytest.mark.browser
def test_the_forms_of_the_interface_send_and_show_the_answer(browser: Browser, address: str, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 128).save(tmp_path / "grey.png")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{address}docs")
    picture, json_form, *gets = page.locator("form[data-path]").all()
    picture.locator("input[type=file]").set_input_files(tmp_path / "grey.png")
    picture.get_by_role("button", name="Send").click()
    picture.get_by_text("200 OK").wait_for()
    assert '"image": "grey.png"' in picture.locator("pre").inner_text()
    page.locator("summary", has_text="JSON").click()
    json_form.get_by_role("button", name="Send").click()
    json_form.get_by_text("200 OK").wait_for()
    before = json_form.locator("textarea").input_value()
    json_form.locator("input[type=file]").set_input_files(tmp_path / "grey.png")
    page.wait_for_timeout(200)
    assert (filled := json_form.locator("textarea").input_value()) not in ("", before)
    json_form.locator("input[type=file]").set_input_files([])
    assert json_form.locator("textarea").input_value() == filled and complaints == [], "a file that is taken back"
    json_form.locator("textarea").fill('{"picture": 1}')
    json_form.get_by_role("button", name="Send").click()
    json_form.get_by_text("400 Bad Request").wait_for()
    assert "the request has no image" in json_form.locator("pre").inner_text()
    page.locator("summary", has_text="/health").click()
    health = next(form for form in gets if form.get_attribute("data-path") == "/health")
    health.get_by_role("button", name="Send").click()
    health.get_by_text('"alive"').wait_for()
    page.locator("summary", has_text="/example").click()
    example = next(form for form in gets if form.get_attribute("data-path") == "/example")
    example.get_by_role("button", name="Send").click()
    example.get_by_text("image/jpeg, ").wait_for()
    picture.locator("input[name=top]").fill("")
    assert not picture.evaluate("form => form.checkValidity()"), "an empty top is asked for by the browser"
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out"


def test_an_image_of_the_run_is_shown_on_this_machine_alone(run: Path) -> None:
    trained = restore(run, device="cpu")
    for hosts, is_shown in ((HOSTS, True), (None, False)):
        service = Service(lambda: trained, ServeSettings(threads=1), hosts=hosts)
        service._describe(trained)
        assert service._picture.startswith("data:image/jpeg") == is_shown
        assert service.description["data"] == "digits.rec" and service.description["metric"] == "top1"
        service.close()


def test_the_example_is_for_this_machine_and_not_behind_a_proxy(run: Path) -> None:
    trained = restore(run, device="cpu")
    service = Service(lambda: trained, ServeSettings(threads=1), hosts=HOSTS)
    client = TestClient(service.app, base_url="http://127.0.0.1")
    early = client.get("/example")
    assert early.status_code == 503 and "being loaded" in early.json()["error"]
    service._describe(trained)
    service._require_ready = lambda **_: None  # type: ignore[method-assign]
    assert client.get("/example").headers["content-type"] == "image/jpeg"
    for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):
        refused = client.get("/example", headers={name: "1"})
        assert refused.status_code == 404 and "there is no example" in refused.json()["error"]
    assert client.get("/exemplar").json()["error"] == "there is no such page: /docs lists them"
    service.close()


def test_last_weights_have_no_accuracy_of_the_best(run: Path) -> None:
    service = Service(lambda: trained, ServeSettings(threads=1), hosts=None)
    service._describe(trained := restore(run, which="last", device="cpu"))
    assert "best" not in service.description
    service.close()
