"""Memory that one image takes: a bounded number of bytes a pixel; docs/odd-images.md states the figures."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from steadytrain.data.images.decode import BadImageError, read_header

SIDE = 5000
BYTES_A_PIXEL = 10
STRIPS = 110 << 20  # bytes of strips, tables and the encoder's output

# Prints the peak of memory before and after, and what became of the image.
CHILD = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from steadytrain.data.images.look import look_at
from steadytrain.data.loader.decode import Scratch, pixels, probe
from steadytrain.data.images.encode import PackSettings, pack_bytes

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

data, work = Path(sys.argv[1]).read_bytes(), sys.argv[2]
before = peak()
if work == "pack":
    size = pack_bytes(data, PackSettings()).width
elif work == "check":
    size = look_at(data).width
else:
    size = pixels(probe(data), 3, Scratch()).shape[1]
print(before, peak(), size)
"""


def write_png(path: Path, *, bits: int, colour: int, channels: int) -> None:
    """Zeros, deflated: a few hundred kB."""
    header = SIDE.to_bytes(4, "big") * 2 + bytes((bits, colour, 0, 0, 0))
    row = bytes(1 + SIDE * channels * bits // 8)
    packer = zlib.compressobj()
    pixels = b"".join(packer.compress(row) for _ in range(SIDE)) + packer.flush()
    data = b"\x89PNG\r\n\x1a\n"
    for body in (b"IHDR" + header, b"IDAT" + pixels, b"IEND"):
        data += (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``image("RGB")``: a file with a large image of that kind, made once."""
    folder = tmp_path_factory.mktemp("images")

    @cache
    def write(kind: str) -> Path:
        path = folder / kind
        if kind == "JPEG, turned":
            exif = Image.Exif()
            exif[0x0112] = 6
            Image.new("RGB", (SIDE, SIDE)).save(path, "JPEG", exif=exif)
        else:
            sorts = {"RGB": (8, 2, 3), "RGBA of 16 bits": (16, 6, 4), "grey of 16 bits": (16, 0, 1)}
            bits, colour, channels = sorts[kind]
            write_png(path, bits=bits, colour=colour, channels=channels)
        return path

    return write


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak of memory")
@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("RGBA of 16 bits", "pack"),
        ("JPEG, turned", "feed"),
        *(pytest.param(kind, "pack", marks=pytest.mark.slow) for kind in ("RGB", "grey of 16 bits", "JPEG, turned")),
        pytest.param("RGBA of 16 bits", "check", marks=pytest.mark.slow),
        *(pytest.param(kind, "check", marks=pytest.mark.slow) for kind in ("RGB", "grey of 16 bits", "JPEG, turned")),
        *(pytest.param(kind, "feed", marks=pytest.mark.slow) for kind in ("RGB", "RGBA of 16 bits", "grey of 16 bits")),
    ],
)
def test_an_image_takes_a_bounded_number_of_bytes_a_pixel(image: Callable[[str], Path], kind: str, work: str) -> None:
    path = image(kind)
    assert path.stat().st_size < 1 << 20
    done = subprocess.run([sys.executable, "-c", CHILD, path, work], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, width = map(int, done.stdout.split())
    assert width == SIDE
    assert after - before < BYTES_A_PIXEL * SIDE**2 + STRIPS


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("kind", "mode", "side", "words"),
    [
        ("WEBP", "RGB", 8200, "a WebP of 67,240,000 pixels, more than 67,108,864: scale it down"),
        ("JPEG", "CMYK", 9460, "a CMYK JPEG of 89,491,600 pixels, more than 89,478,485: scale it down"),
    ],
    ids=["WebP", "CMYK JPEG"],
)
def test_what_would_take_more_than_a_gibibyte_is_refused_by_its_header(
    tmp_path: Path, kind: str, mode: str, side: int, words: str
) -> None:
    for short in (0, 16):  # just too large, and just small enough
        width = side - short  # which a small one claims in its header: to compress as large a one takes seconds
        Image.new(mode, (16, 16)).save(tmp_path / str(short), kind, progressive=True, lossless=True)
        data = (tmp_path / str(short)).read_bytes()
        if kind == "JPEG":
            at, claimed = data.index(b"\xff\xc2") + 5, struct.pack(">HH", side, width)
        else:  # 14 bits for each of width and height, less one, in front of 4 others
            at = data.index(b"VP8L") + 9
            others = int.from_bytes(data[at : at + 4], "little") >> 28 << 28
            claimed = (others | side - 1 << 14 | width - 1).to_bytes(4, "little")
        (tmp_path / str(short)).write_bytes(data[:at] + claimed + data[at + 4 :])
    with pytest.raises(BadImageError, match=words):
        read_header((tmp_path / "0").read_bytes())
    assert read_header((tmp_path / "16").read_bytes()).size == (side - 16, side)
