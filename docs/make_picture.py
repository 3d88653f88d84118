"""Draw the pictures of the documents by Chromium: the page of ``steady watch --web``, and parts of a report.

Needs a Chromium and playwright (``pip install -e ".[test,demo]"``). Without RUN it first trains for some minutes on the
digits of ``steady demo``; that needs no network and no data.

usage: python docs/make_picture.py [RUN] [--part mistakes] [-o docs/mistakes.png]
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
SECTIONS = {"mistakes": "#mistakes"}  # the sections of a report, by picture
LAST_SECTION = "section:has(#chart-ledger)"  # where the picture ends: the chart of where the time goes


def train_on_digits(folder: Path, part: str) -> Path:
    """Run the demo on its digits; return its run or, for the live page, one of ResNet-20 on the same images."""
    demo = folder / "demo"
    subprocess.run([*STEADY, "demo", str(demo)], check=True)
    if part != "watch":
        return demo / "runs" / "digits"
    run = folder / "digits"
    subprocess.run([*STEADY, "train", str(demo / "digits.rec"), *TRAIN, "--run", str(run)], check=True)
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
            page.wait_for_timeout(1500)  # the curves are drawn
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
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder; default: train on the demo's digits")
    parser.add_argument("--part", choices=("watch", *SECTIONS), default="watch", help="the live page, or a section")
    parser.add_argument("-o", "--output", type=Path, help="default: PART.png beside this script")
    asked = parser.parse_args()
    output = asked.output or Path(__file__).with_name(f"{asked.part}.png")
    with tempfile.TemporaryDirectory() as folder:
        run = asked.run or train_on_digits(Path(folder), asked.part)
        with (serve if asked.part == "watch" else written)(run) as address:
            picture = Image.open(io.BytesIO(take(address, SECTIONS.get(asked.part, "")))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"drew {output}: {picture.width} x {picture.height} pixels, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
