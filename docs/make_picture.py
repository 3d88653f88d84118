"""Draw the pictures of the documents by Chromium, light and dark: pages of the commands, and sections of a report.

Needs a Chromium and playwright (``pip install -e ".[test-all]"``). Without RUN it first trains for some minutes
on the digits of ``steady demo``; that needs no network and no data.

The dark twin of docs/mistakes.png is docs/mistakes-dark.png; docs/conf.py shows each in its mode. Draw on a quiet
machine: the pages show what other processes took.

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
from typing import Literal

from PIL import Image, ImageColor, ImageOps
from playwright.sync_api import Page, sync_playwright

STEADY = [sys.executable, "-m", "steadytrain"]
TRAIN = ["--model", "resnet20", "--size", "32", "--epochs", "12", "--batch-size", "64", "--set", "data.holdout=0.2"]
OTHER = [
    "--model",
    "digits",
    "--epochs",
    "20",
    "--set",
    "data.pad=1",
    "--holdout",
    "0.2",
    "--lr",
    "0.02",
    "--precision",
    "fp32",
]
SWEEP = ["--model", "digits", "--epochs", "6", "--set", "data.pad=1", "--holdout", "0.2", "--over", "lr=0.02,0.1,0.5"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
PAGES = {"light": "#ffffff", "dark": "#131518"}  # page.css has these
NEAR = 6  # levels
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTH, SCALE = 1120, 1.75  # CSS pixels; device pixels for each of them
SMALLER = {"mistakes": 1.25, "serve": 1.25}  # pictures with photographs, which need more bytes
SHOWN_ROWS = "#mistakes { border: 0; margin: 0; padding: 0; } .gallery figure:nth-child(n+13) { display: none; }"
MARGIN = 32  # device pixels around a section
SECTIONS = {"mistakes": "#mistakes", "sweep": "#results", "compare": "#results"}  # the sections of a report, by picture
SERVERS = {"watch": ["watch", "{}", "--web"], "runs": ["report", "--serve", "{}"], "serve": ["serve", "{}"]}
LAST_SECTION = "section:has(#chart-ledger)"  # where the picture ends: the chart of where the time goes


def train_on_digits(folder: Path, part: str) -> Path:
    """Run the demo on its digits and train what a picture shows; return a run, or the folder of several."""

    def steady(*words: str) -> None:
        subprocess.run([*STEADY, *words], check=True, cwd=folder)  # pages show the paths as they are given here

    steady("demo", "demo")
    digits, runs = folder / "demo" / "runs" / "digits", folder / "demo" / "runs"
    if part == "watch":
        steady("train", "demo/digits.rec", *TRAIN, "--run", "digits")
        return folder / "digits"
    if part in ("sweep", "runs"):
        steady("sweep", "demo/digits.rec", *SWEEP, "--run", "demo/runs/rates")
        steady("runs", str(digits), "--tag", "baseline", "--note", "as the demo trains")
    if part == "compare":
        steady("train", "demo/digits.rec", *OTHER, "--run", "demo/runs/lower-rate")
    return {"sweep": runs / "rates", "runs": runs, "compare": runs}.get(part, digits)


@contextmanager
def serve(run: Path, part: str) -> Iterator[str]:
    """Start the server of a page in the folder that holds the run, as the page shows its path; yield its address."""
    command, pipe = [*STEADY, *(word.format(run.name) for word in SERVERS[part])], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=run.parent) as server:
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


def take(address: str, part: str, photographs: list[Path], scheme: Scheme) -> bytes:
    """Return a PNG of a section of a report, or of a server's page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": 900},
            device_scale_factor=SMALLER.get(part, SCALE),
            color_scheme=scheme,
        )
        page.goto(address)
        if part == "mistakes":
            page.add_style_tag(content=SHOWN_ROWS)
        if part == "serve":
            page.set_input_files("input[type=file]", photographs)
        page.wait_for_timeout(3000)  # the curves are drawn after the first events
        picture = whole_page(page) if part == "watch" else page.locator(SECTIONS.get(part, "main")).screenshot()
        browser.close()
    return picture


def whole_page(page: Page) -> bytes:
    """Return a PNG of the live page from its top to the end of LAST_SECTION."""
    page.wait_for_selector("body[data-ready]")
    box = page.locator(LAST_SECTION).bounding_box()
    assert box is not None
    height = box["y"] + box["height"] + 16
    return page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})


def around(picture: Image.Image, page: tuple[int, ...]) -> Image.Image:
    """Give the palette of a picture the page's colour in the place of its like, so that the page stays as it is."""
    values = picture.getpalette() or []
    colours = [tuple(values[i : i + 3]) for i in range(0, len(values), 3)]
    near = [max(abs(a - b) for a, b in zip(colour, page, strict=True)) <= NEAR for colour in colours]
    kept = [page if is_near else colour for colour, is_near in zip(colours, near, strict=True)]
    picture.putpalette([value for colour in [*kept, page] for value in colour])
    return picture


def main() -> None:
    """Read the command line, take the picture and write it with a palette, which makes it a third of the size."""
    parser = argparse.ArgumentParser(description="Draw a page of a command, or a section of a report.")
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder; default: train on the demo's digits")
    parser.add_argument("--part", choices=(*SERVERS, *SECTIONS), default="watch", help="the page, or the section")
    parser.add_argument("--photographs", nargs="*", type=Path, help="what --part serve of RUN drops on the page")
    parser.add_argument("-o", "--output", type=Path, help="default: PART.png beside this script")
    asked = parser.parse_args()
    output = asked.output or Path(__file__).with_name(f"{asked.part}.png")
    with tempfile.TemporaryDirectory() as folder:
        run = asked.run or train_on_digits(Path(folder), asked.part)
        photographs = asked.photographs or [Path(folder, f"demo/images/{digit}/000{digit}.png") for digit in "35"]
        with serve(run, asked.part) if asked.part in SERVERS else written(run) as address:
            for scheme in SCHEMES:
                place = output if scheme == "light" else output.with_stem(f"{output.stem}-dark")
                picture = Image.open(io.BytesIO(take(address, asked.part, photographs, scheme))).convert("RGB")
                picture = ImageOps.expand(picture, 0 if asked.part in SERVERS else MARGIN, PAGES[scheme])
                palette = around(picture.quantize(255), ImageColor.getrgb(PAGES[scheme]))
                dither = Image.Dither.FLOYDSTEINBERG if asked.part in SMALLER else Image.Dither.NONE
                picture.quantize(256, palette=palette, dither=dither).save(place, optimize=True)
                print(f"drew {place}: {picture.width} x {picture.height} pixels, {place.stat().st_size} bytes")


if __name__ == "__main__":
    main()
