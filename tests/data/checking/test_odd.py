"""Every odd file is handled by the rule that the page states, or named by the reason that it gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.data.packing.odd import GROUPS, KEPT, PAGE, REAL, TOO_LONG, Odd, outcome, page
from tests.data.packing.pictures import write_folder

from steadytrain.data.images.decode import decode
from steadytrain.data.images.encode import PackedImage, PackSettings
from steadytrain.data.images.look import look_at
from steadytrain.data.packing.portions import pack_file
from steadytrain.data.recordio.reader import Records

ROWS = [(group, odd) for group, rows in GROUPS.items() for odd in rows]
NAMES = [f"{group}: {odd.what}" for group, odd in ROWS]
# Pillow's, about strangers' files; packing itself keeps them to itself.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.data.packing.odd writes it"


@pytest.mark.parametrize(("group", "odd"), ROWS, ids=NAMES)
def test_each_becomes_what_the_page_says(tmp_path: Path, group: str, odd: Odd) -> None:
    path = tmp_path / "a.jpg"
    odd.make(path)
    result = pack_file(str(path), PackSettings())
    assert outcome(result) == odd.becomes
    if isinstance(result, PackedImage):
        stored = decode(result.data)
        assert stored.mode == ("RGB" if result.channels == 3 else "L")
        assert odd.becomes == KEPT or stored.size == (result.width, result.height)


@pytest.mark.parametrize(("group", "odd"), ROWS, ids=NAMES)
def test_checking_refuses_what_packing_refuses(tmp_path: Path, group: str, odd: Odd) -> None:
    path = tmp_path / "a.jpg"
    odd.make(path)
    if path.is_file() and TOO_LONG not in odd.becomes:  # nothing is wrong with that one but the format asked for
        assert bool(look_at(path.read_bytes()).fault) is odd.becomes.startswith("left out")


def test_a_folder_of_all_of_them_is_packed_and_every_reason_given(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"plain": 80, "odd": 0})
    for number, (_, odd) in enumerate(ROWS):
        odd.make(photos / "odd" / f"{number:03d}.jpg")
    command = [sys.executable, "-m", "steadytrain", "pack", "photos", "set", "--json", "--max-bad", "999"]
    done = subprocess.run([*command, "--workers", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (card,) = json.loads(done.stdout)
    listed = [(number, odd) for number, (_, odd) in enumerate(ROWS) if odd.what != "a folder"]
    refused = {f"odd/{n:03d}.jpg": odd.becomes for n, odd in listed if odd.becomes.startswith("left out")}
    assert {rejected["name"]: f"left out: {rejected['reason']}" for rejected in card["rejected"]} == refused
    assert card["counts"] == [len(listed) - len(refused), 80]
    with Records.open(tmp_path / "set.rec") as records:
        for number in range(len(records)):
            assert decode(records.image(number)).mode in ("L", "RGB")


@pytest.mark.parametrize("name", REAL)
def test_other_projects_test_files_become_what_the_page_says(data_folder: Path, name: str) -> None:
    counts = Counter(
        re.sub(r" of \d+ x \d+$", "", outcome(pack_file(str(path), PackSettings())))
        for path in (data_folder / "odd-images" / name).iterdir()
        if path.is_file()
    )
    assert counts == REAL[name]


def test_no_real_file_is_left_out_of_the_page(data_folder: Path) -> None:
    files = [path for path in (data_folder / "odd-images").rglob("*") if path.is_file()]
    assert len(files) == sum(sum(value.values()) for value in REAL.values())
