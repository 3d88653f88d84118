"""Reading an image's bytes: what is the image's fault, and what is the machine's."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.data.images.decode import BadImageError
from steadytrain.data.sources.listing import Piece, read_file, read_piece
from steadytrain.errors import StorageError


@pytest.mark.parametrize(
    ("kind", "why"), [("missing", "no such file"), ("link", "a broken link"), ("folder", "a folder, not")]
)
def test_path_that_is_no_file_is_a_bad_image(kind: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    if kind == "link":
        path.symlink_to(tmp_path / "gone.jpg")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BadImageError, match=why):
        read_file(str(path))


@pytest.mark.parametrize("name", ["a\0.png", "\ud800.png"])
def test_name_that_no_file_can_have_is_a_bad_image(name: str) -> None:
    with pytest.raises(BadImageError, match="no file can have this name"):
        read_file(f"/photos/{name}")


def test_no_image_is_bad_because_too_many_files_are_open(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(b"some bytes")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    held: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(path, os.O_RDONLY))
        with pytest.raises(StorageError, match=r"image\.jpg cannot be opened: .*ulimit -n"):
            read_file(str(path))
        with pytest.raises(StorageError, match="ulimit -n"):
            read_piece(Piece(str(path), 0, 4))
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_file(str(path)) == b"some bytes" and read_piece(Piece(str(path), 5, 5)) == b"bytes"


def test_records_cut_short_while_they_are_read_end_with_a_word(tmp_path: Path) -> None:
    """A map of a file that has become shorter would end the process by a signal."""
    code = f"""
import os, time, numpy as np, steadytrain as st
from PIL import Image
for number in range(60):
    folder = {str(tmp_path)!r} + f"/photos/{{number % 2}}"
    os.makedirs(folder, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(f"{{folder}}/{{number}}.png")
path = st.pack({str(tmp_path / "photos")!r}, {str(tmp_path / "set.rec")!r})[0].path
feed = st.ImageLoader(st.Records.open(path), st.Crop(kind="pad-crop", size=64), batch_size=4, keep_bytes=0, threads=2)
for number, batch in enumerate(feed):
    if number == 2:
        looks = 0
        while looks < 10:  # until enough batches are ready: nothing is being copied
            time.sleep(0.05)
            looks = 0 if "working" in str(feed.doing()) else looks + 1
        os.truncate(path, 4096)
    if number == 200:
        raise SystemExit("nothing was noticed")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "StorageError" in ended.stderr and "was truncated while being read" in ended.stderr
