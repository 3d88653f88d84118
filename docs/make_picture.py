"""Draw docs/watch.png, the page of ``steady watch --web``, or docs/mistakes.png, a part of a report, by Chromium.

Needs a Chromium and playwright (``pip install -e ".[test,demo]"``). Without RUN it first trains for some minutes on the
digits of ``steady demo``; that needs no network and no data.

usage: python docs/make_picture.py [RUN] [--report] [-o docs/watch.png]
"""

from __future__ import annotations

import argparse
import io
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

STEADY = [sys.executable, "-m", "steadytrain"]
TRAIN = ["--model", "resnet20", "--size", "32", "--epochs", "12", "--batch-size", "64", "--set", "data.holdout=0.2"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
WIDTH, SCALE = 1120, 1.75  # CSS pixels; device pixels for each of them
MISTAKES = "#mistakes"  # the section of classes and mistakes in a report
LAST_SECTION = "section:has(#chart-ledger)"  # where the picture ends: the chart of where the time goes


def train_on_digits(folder: Path) -> Path:
    """Train ResNet-20 on the digits of the demo; return the run's folder."""
    run = folder / "digits"
    subprocess.run([*STEADY, "demo", str(folder / "demo")], check=True)
    subprocess.run([*STEADY, "train", str(folder / "demo" / "digits.rec"), *TRAIN, "--run", str(run)], check=True)
    return run


@contextmanager
def serve(run: Path) -> Iterator[str]:
    """Serve the live page of a run; yield its address."""
    command = [*STEADY, "watch", str(run), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(line.strip() for line in server.stdout if line.startswith("http://"))
        finally:
            server.send_signal(signal.SIGINT)


@contextmanager
def written(run: Path) -> Iterator[str]:
    """Write the report of a run; yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([*STEADY, "report", str(run), "-o", str(page)], check=True, stdout=subprocess.DEVNULL)
        yield page.as_uri()


def take(address: str, of: str) -> bytes:
    """Return a PNG of the page from its top to the end of LAST_SECTION, or of the section ``of`` alone."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE, color_scheme="light"
        )
        page.goto(address)
        if of:
            return page.locator(of).screenshot()
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(1500)  # the curves are drawn after the first events
        box = page.locator(LAST_SECTION).bounding_box()
        assert box is not None
        height = box["y"] + box["height"] + 16
        picture = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        browser.close()
    return picture


def main() -> None:
    """Read the command line, take the picture and write it with a palette, which makes it a third of the size."""
    parser = argparse.ArgumentParser(description="Draw the page of steady watch --web, or a part of a report.")
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder; default: train one on the demo's digits")
    parser.add_argument("--report", action="store_true", help="draw the mistakes in its report instead")
    parser.add_argument("-o", "--output", type=Path, help="default: watch.png, or mistakes.png, beside this script")
    asked = parser.parse_args()
    output = asked.output or Path(__file__).with_name("mistakes.png" if asked.report else "watch.png")
    with tempfile.TemporaryDirectory() as folder:
        run = asked.run or train_on_digits(Path(folder))
        with (written if asked.report else serve)(run) as address:
            picture = Image.open(io.BytesIO(take(address, MISTAKES if asked.report else ""))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"drew {output}: {picture.width} x {picture.height} pixels, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
