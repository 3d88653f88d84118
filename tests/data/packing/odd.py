"""The table of odd files: what each is, and exactly what becomes of it. docs/odd-images.md is made of it::

    python -m tests.data.packing.odd

The tests hold packing to the table, and the page to the table.
"""

from __future__ import annotations

import stat
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.data.packing.odd_files import (
    Make,
    banded,
    bytes_of,
    deep_png,
    deep_tiff,
    encoded,
    frames,
    image,
    negative_tiff,
    node,
    of_bits,
    overwritten,
    patched_jpeg,
    png,
    profiled,
    tiff,
    turned,
    turned_by,
    webp_of,
    ycck,
)
from tests.data.packing.pictures import picture

from steadytrain.data.images.encode import PackedImage

PAGE = Path(__file__).parents[3] / "docs" / "odd-images.md"


class Odd(NamedTuple):
    """One kind of file, by the rule that is followed, and what becomes of it."""

    what: str
    make: Make
    rule: str
    becomes: str


KEPT = "stored byte for byte"
RGB, GREY = "RGB JPEG of 96 x 80", "grey JPEG of 96 x 80"
CONVERT = "which is not read here: convert it to JPEG or PNG"
TOO_LONG = "and a JPEG holds at most 65,500 a side"
BOMB = "left out: 400,000,000 pixels, more than 100,000,000"
SIXTEEN = Image.fromarray(np.asarray(picture(1, (96, 80), "L")).astype(np.uint16) * 257)
LAB = Image.merge("LAB", picture(1, (96, 80)).split())
PALETTE = picture(1, (96, 80)).quantize(9)
JPEG, PNG = encoded(), encoded(kind="PNG")
TEXT = PngInfo()
TEXT.add_text("Comment", "x" * 2_000_000, zip=True)
PNG_WITH_TEXT = encoded(kind="PNG", pnginfo=TEXT)

GROUPS: dict[str, list[Odd]] = {
    "Nothing has to change": [
        Odd("JPEG, RGB", image(), "", KEPT),
        Odd("JPEG, grey", image(mode="L"), "", KEPT),
        Odd("JPEG, progressive", image(progressive=True), "", KEPT),
        Odd("JPEG with restart markers", image(restart_marker_blocks=2), "", KEPT),
        Odd("JPEG with a colour profile (Adobe RGB)", profiled("JPEG"), "profiles are ignored", KEPT),
        Odd("JPEG with bytes after its end", bytes_of(JPEG + bytes(99)), "", KEPT),
        Odd(
            "JPEG with damaged EXIF",
            image(exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(20)),
            "treated as upright",
            KEPT,
        ),
        Odd("PNG of 64 x 64, RGB", image("PNG", size=(64, 64)), "", KEPT),
        Odd("PNG of 64 x 64, grey", image("PNG", "L", (64, 64)), "", KEPT),
    ],
    "Colours and depths": [
        Odd("JPEG, CMYK", image(mode="CMYK"), "profiles are ignored", RGB),
        Odd("JPEG, YCCK", bytes_of(ycck()), "profiles are ignored", RGB),
        Odd("TIFF, CMYK, with its ink set", image("TIFF", "CMYK", tiffinfo={332: 1}), "profiles are ignored", RGB),
        Odd(
            "TIFF, four bands stored as CMYK",
            image("TIFF", "CMYK"),
            "nothing says that they are inks",
            "left out: four bands stored as CMYK, which are not read here unless an ink set of CMYK (tag 332) or a"
            " profile says that they are inks: convert it to RGB",
        ),
        Odd("TIFF, RGB and a band that is not declared", bytes_of(banded(4)), "the fourth is dropped; noted", RGB),
        Odd("TIFF, RGB and two further bands", bytes_of(banded(5, 0, 0)), "both are dropped; noted", RGB),
        Odd("TIFF, RGB and transparency", bytes_of(banded(4, 2)), "composited over white", RGB),
        Odd(
            "TIFF of eight bands",
            bytes_of(banded(8, 0, 0, 0, 0, 0)),
            "",
            f"left out: a TIFF of a kind that is not read here, or damaged: {CONVERT.partition(': ')[2]}",
        ),
        Odd("TIFF, Lab", bytes_of(encoded(LAB, "TIFF")), "", RGB),
        Odd("TIFF, YCbCr", image("TIFF", "YCbCr"), "", RGB),
        Odd("PNG with a colour profile", profiled("PNG"), "profiles are ignored", RGB),
        Odd("PNG with 2 MB of text, deflated", bytes_of(PNG_WITH_TEXT), "texts are ignored", RGB),
        Odd("PNG, palette", bytes_of(encoded(PALETTE, "PNG")), "", RGB),
        Odd(
            "PNG, palette with transparency",
            bytes_of(encoded(PALETTE, "PNG", transparency=0)),
            "composited over white",
            RGB,
        ),
        Odd("PNG, RGB with transparency", image("PNG", "RGBA"), "composited over white", RGB),
        Odd("PNG, grey with transparency", image("PNG", "LA"), "composited over white", GREY),
        Odd("PNG, 1 bit", image("PNG", "1"), "0 or 255", GREY),
        Odd("TIFF, 1 bit", image("TIFF", "1", compression="group4"), "0 or 255", GREY),
        Odd("PNG, grey of 16 bits", bytes_of(encoded(SIXTEEN, "PNG")), "divided by 257; noted", GREY),
        Odd("TIFF, grey of 16 bits", bytes_of(encoded(SIXTEEN, "TIFF")), "divided by 257; noted", GREY),
        Odd("PNG of 16 bits that states 12", bytes_of(of_bits(12, states=True)), "scaled from 12 bits", GREY),
        Odd("PNG of 16 bits that holds 12", bytes_of(of_bits(12, states=False)), "divided by 257; noted", GREY),
        Odd("PNG, RGB of 16 bits", bytes_of(deep_png()), "the upper 8 bits; noted", RGB),
        Odd("TIFF, RGB of 16 bits", bytes_of(deep_tiff()), "the upper 8 bits; noted", RGB),
        Odd(
            "TIFF, grey of 32 bits", bytes_of(encoded(SIXTEEN.convert("I"), "TIFF")), "0 to 65535, divided by 257", GREY
        ),
        Odd(
            "TIFF, grey of 32 bits, below zero",
            bytes_of(negative_tiff()),
            "",
            "left out: grey values from -1 to -1: only 0 to 65535 can be used",
        ),
        Odd(
            "TIFF, float",
            bytes_of(encoded(Image.new("F", (96, 80), 0.5), "TIFF")),
            "",
            "left out: 32-bit float pixels: their range is not known",
        ),
        Odd(
            "TIFF, RGB of float",
            bytes_of(tiff({339: (3, [3, 3, 3])}, bits=32, pixels=bytes(96 * 80 * 12))),
            "",
            f"left out: a TIFF of a kind that is not read here, or damaged: {CONVERT.partition(': ')[2]}",
        ),
    ],
    "Kinds of JPEG": [
        Odd("arithmetic coding", bytes_of(patched_jpeg(kind=0xC9)), "encoded again", RGB),
        Odd(
            "lossless, more than 8 bits",
            bytes_of(patched_jpeg(kind=0xC3, bits=16, height=0)),
            "one of 8 bits is read",
            "left out: a lossless JPEG of 16 bits, which is not read here: convert it to PNG",
        ),
        Odd(
            "12 bits",
            bytes_of(patched_jpeg(kind=0xC1, bits=12)),
            "",
            "left out: a JPEG of 12 bits, which is not read here: convert it to 8 bits",
        ),
        Odd(
            "hierarchical",
            bytes_of(patched_jpeg(kind=0xC5, bits=9)),
            "",
            f"left out: a hierarchical JPEG, {CONVERT}",
        ),
        Odd("stray bytes before the end", bytes_of(JPEG[:-2] + bytes(40) + JPEG[-2:]), "encoded again", RGB),
        Odd("without the two bytes of its end", bytes_of(JPEG[:-2]), "encoded again", RGB),
        Odd("no height", bytes_of(patched_jpeg(height=0)), "", "left out: damaged header: 96 x 0 pixels"),
    ],
    "Orientation": [
        Odd("1", turned(1), "", KEPT),
        *(Odd(str(n), turned(n), "rotated upright", RGB) for n in (2, 3, 4)),
        *(Odd(str(n), turned(n), "rotated upright", "RGB JPEG of 80 x 96") for n in (5, 6, 7, 8)),
        Odd("9", turned(9), "invalid: treated as upright", KEPT),
        *(
            Odd(f"6, in XMP of a {kind}", bytes_of(turned_by(kind, 6)), "rotated upright", "RGB JPEG of 80 x 96")
            for kind in ("JPEG", "PNG", "WEBP")
        ),
        Odd(
            "6, in ImageMagick's text of a PNG",
            bytes_of(turned_by("tEXt", 6)),
            "rotated upright",
            "RGB JPEG of 80 x 96",
        ),
    ],
    "Several frames or pages": [
        Odd("GIF, animated", frames("GIF"), "the first frame", RGB),
        Odd("PNG, animated", frames("PNG"), "the first frame", RGB),
        Odd("WebP, animated", frames("WEBP"), "the first frame", RGB),
        Odd("TIFF of two pages", frames("TIFF"), "the first page", RGB),
        Odd("JPEG of two pictures (MPO)", frames("MPO"), "readers use the first picture", KEPT),
    ],
    "Shapes and sizes": [
        Odd("PNG of 1 x 1", image("PNG", size=(1, 1)), "", KEPT),
        Odd("JPEG of 1 x 4000", image(size=(1, 4000)), "", KEPT),
        Odd("PNG of 1 x 4000", image("PNG", size=(1, 4000)), "", "RGB JPEG of 1 x 4000"),
        Odd("PNG of 4000 x 1", image("PNG", size=(4000, 1)), "", "RGB JPEG of 4000 x 1"),
        Odd(
            "PNG of 70,000 x 1",
            image("PNG", size=(70_000, 1)),
            "",
            f"left out: 70,000 x 1 pixels, {TOO_LONG}: give --encoding png, or a --shorter-side",
        ),
        Odd("PNG of 400 megapixels", bytes_of(png(20_000, 20_000)), "by its header", BOMB),
        Odd("JPEG of 400 megapixels", bytes_of(patched_jpeg(height=20_000, width=20_000)), "by its header", BOMB),
        Odd("TIFF of 400 megapixels", bytes_of(tiff(size=(20_000, 20_000))), "by its header", BOMB),
        Odd(
            "WebP of 268 megapixels",
            bytes_of(webp_of(16_383, 16_383)),
            "by its header",
            "left out: 268,402,689 pixels, more than 100,000,000",
        ),
        Odd(
            "GIF of 4,295 megapixels",
            bytes_of(overwritten(encoded(kind="GIF"), 6, b"\xff\xff\xff\xff")),
            "by its header",
            "left out: 4,294,836,225 pixels, more than 100,000,000",
        ),
        Odd(
            "BMP of 400 megapixels",
            bytes_of(overwritten(encoded(kind="BMP"), 18, struct.pack("<ii", 20_000, 20_000))),
            "by its header",
            BOMB,
        ),
        Odd("PPM of 400 megapixels", bytes_of(b"P6\n20000 20000\n255\n" + bytes(99)), "by its header", BOMB),
    ],
    "Named .jpg, but another kind of file": [
        Odd("PNG", image("PNG"), "its content decides", RGB),
        Odd("GIF", image("GIF"), "its content decides", RGB),
        Odd("BMP", image("BMP"), "its content decides", RGB),
        Odd("WebP", image("WEBP"), "its content decides", RGB),
        Odd("AVIF", image("AVIF"), "its content decides", RGB),
        Odd("PPM", image("PPM"), "its content decides", RGB),
        Odd("HEIC", bytes_of(b"\0\0\0\x18ftypheic" + bytes(60)), "", f"left out: a HEIC image, {CONVERT}"),
        Odd("JPEG 2000", image("JPEG2000"), "", f"left out: a JPEG 2000 image, {CONVERT}"),
        Odd("JPEG XL", bytes_of(b"\xff\x0a" + bytes(60)), "", f"left out: a JPEG XL image, {CONVERT}"),
        Odd(
            "camera raw, CR2",
            bytes_of(b"II*\0\x10\0\0\0CR\2\0" + bytes(60)),
            "",
            f"left out: a camera's raw file, {CONVERT}",
        ),
        Odd(
            "camera raw, DNG",
            bytes_of(tiff({254: (4, [1]), 271: (2, b"Maker\0"), 330: (4, [8]), 50706: (1, [1, 4, 0, 0])})),
            "its preview is not used",
            f"left out: a camera's raw file, {CONVERT}",
        ),
        Odd("SVG", bytes_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "", f"left out: an SVG drawing, {CONVERT}"),
        Odd("PDF", bytes_of(b"%PDF-1.7\n" + bytes(60)), "", "left out: a PDF document, not an image"),
        Odd("PostScript", bytes_of(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "", "left out: text, not an image"),
        Odd("Windows icon", image("ICO"), "", "left out: not an image of a known format"),
        Odd("DICOM", bytes_of(bytes(128) + b"DICM" + bytes(60)), "", f"left out: a DICOM image, {CONVERT}"),
        Odd("zip archive", bytes_of(b"PK\3\4" + bytes(60)), "", "left out: a zip archive, not an image"),
        Odd("MP4 video", bytes_of(b"\0\0\0\x18ftypisom" + bytes(60)), "", "left out: an MP4 video, not an image"),
        Odd("HTML page", bytes_of(b"\n<!DOCTYPE html><title>404"), "", "left out: an HTML page, not an image"),
        Odd("error in XML", bytes_of(b"<?xml version='1.0'?><Error/>"), "", "left out: XML, not an image"),
        Odd("error in JSON", bytes_of(b'{"error": "denied"}'), "", "left out: JSON, not an image"),
        Odd("text", bytes_of(b"not found\n"), "", "left out: text, not an image"),
        Odd(
            "Git LFS pointer",
            bytes_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
            "",
            "left out: a Git LFS pointer, not the image: fetch it with git lfs pull",
        ),
        Odd("zeros", bytes_of(bytes(5000)), "", "left out: zeros, nothing else"),
        Odd("random bytes", bytes_of(bytes(range(255, 0, -1)) * 9), "", "left out: not an image of a known format"),
        Odd("empty", bytes_of(b""), "", "left out: empty: 0 bytes"),
    ],
    "Damaged": [
        Odd("JPEG cut short", bytes_of(JPEG[:-200]), "", "left out: cut short"),
        Odd("JPEG cut in its header", bytes_of(JPEG[:100]), "", "left out: cut short"),
        Odd(
            "JPEG whose second half is zeros", bytes_of(JPEG[:1200].ljust(len(JPEG), b"\0")), "", "left out: cut short"
        ),
        Odd("PNG cut short", bytes_of(PNG[:-400]), "", "left out: cut short"),
        Odd(
            "PNG with a byte changed",
            bytes_of(overwritten(PNG, 400, bytes(9))),
            "",
            "left out: damaged: it cannot be decoded",
        ),
        Odd(
            "PNG with a wrong checksum",
            bytes_of(overwritten(PNG, 29, bytes(4))),
            "",
            "left out: damaged header",
        ),
        Odd("GIF cut short", bytes_of(encoded(kind="GIF")[:-900]), "", "left out: cut short"),
        Odd("WebP cut short", bytes_of(encoded(kind="WEBP")[:-200]), "", "left out: cut short"),
        Odd("TIFF cut short", bytes_of(tiff()[:9000]), "", "left out: cut short"),
    ],
    "Named .jpg, but not a file": [
        Odd(
            "a folder",
            lambda path: path.mkdir(),
            "searched for images if folders are classes",
            "left out: a folder, not a file",
        ),
        Odd("a pipe", node(stat.S_IFIFO), "not waited for", "left out: a pipe, not a file"),
        Odd("a socket", node(stat.S_IFSOCK), "", "left out: a socket, not a file"),
        Odd("a link to nothing", lambda path: path.symlink_to("nowhere"), "", "left out: a broken link"),
    ],
}

UNREADABLE = "left out: damaged: it cannot be decoded"
MISSING = "left out: damaged: image data is missing"
# The files of other projects' test suites, by folder: how many become what. Sizes are left out.
REAL: dict[str, dict[str, int]] = {
    "exif_orientation": {KEPT: 4, "RGB JPEG": 14},
    "jpeg_decoder/tests/crashtest/images": {
        KEPT: 1,
        "RGB JPEG": 2,
        UNREADABLE: 3,
        "left out: damaged header": 2,
        MISSING: 1,
        "left out: empty: 0 bytes": 1,
        "left out: damaged header: 3360 x 0 pixels": 1,
        "left out: damaged header: 0 x 800 pixels": 1,
        "left out: 4,294,836,225 pixels, more than 100,000,000": 1,
    },
    "jpeg_decoder/tests/crashtest/images/imagetestsuite": {
        KEPT: 4,
        "RGB JPEG": 6,
        UNREADABLE: 29,
        "left out: not an image of a known format": 28,
        "left out: cut short": 20,
        "left out: damaged header": 8,
        MISSING: 3,
    },
    "jpeg_decoder/tests/icc": {KEPT: 1, "RGB PNG": 4},
    "jpeg_decoder/tests/reftest/images": {
        KEPT: 18,
        "RGB JPEG": 8,
        "RGB PNG": 4,
        "grey JPEG": 3,
        "grey PNG": 3,
        MISSING: 1,
    },
    "jpeg_decoder/tests/reftest/images/lossless/1": {
        "grey JPEG": 10,
        "left out: a lossless JPEG of 16 bits, which is not read here: convert it to PNG": 8,
        "left out: text, not an image": 1,
    },
    "jpeg_decoder/tests/reftest/images/lossless/2": {
        "grey JPEG": 2,
        "left out: a lossless JPEG of 10 bits, which is not read here: convert it to PNG": 1,
        "left out: a lossless JPEG of 12 bits, which is not read here: convert it to PNG": 1,
    },
    "jpeg_decoder/tests/reftest/images/mozilla": {KEPT: 18, "RGB PNG": 19, "RGB JPEG": 2, "grey PNG": 1},
    "natural_wrong_ext": {"grey JPEG": 1, "left out: empty: 0 bytes": 1},
}

INTRODUCTION = """# Odd images

Look up what happens to an unusual image file when it is packed or trained on. To find such files among yours, before
anything is packed:

<!-- not run: needs your images -->
```sh
steady check photos/
```

The tables show the results of `steady pack` with its default options. A file that cannot be used is left out. The
output and the card list it with the reason, and [record files](records.md#what-is-stored) says how many may be left
out. The tests pack every one of these files, and compare the results with this page.
"""

MEMORY = """## Memory

An image of up to 100 million pixels is read, however small its file is. One with more is refused by its header: scale
it down first. The decoders of two formats need more memory per pixel, so their limits are lower. They follow from 1 GiB
for the decoder: 67 million pixels for WebP (16 bytes each), 89 million for a CMYK JPEG (12 bytes each).

The table has the peak memory, in MB, of a process that packs one image of 9,900 x 9,900 pixels, checks it, or reads it
as the loader does. 42 MB of Python are included. `steady pack` and `steady check` decode as many images at once as they
have workers (`--workers`). In training and `predict`, PyTorch's memory comes on top.

| file (size) | pack | check | read |
|---|---|---|---|
| PNG, RGB (0.3 MB) | 756 | 751 | 757 |
| PNG, RGB, interlaced (0.3 MB) | 757 | 757 | 757 |
| PNG, RGB with transparency, 16 bits (0.8 MB) | 802 | 801 | 806 |
| PNG, palette with transparency (0.1 MB) | 700 | 625 | 500 |
| PNG, grey of 16 bits (0.2 MB) | 382 | 382 | 608 |
| TIFF, grey of 32 bits (0.7 MB) | 591 | 591 | 817 |
| JPEG, EXIF orientation 6 (1.5 MB) | 986 | 609 | 328 |
| JPEG, progressive, 4:4:4 (1.2 MB) | 884 | 886 | 889 |
| JPEG, progressive, CMYK, of 9,400 x 9,400 (2.1 MB) | 1,108 | 1,108 | 1,108 |
| WebP, lossless, one colour, of 8,191 x 8,191 (3 kB) | 1,121 | 1,121 | 1,121 |
| the last two at 9,900 x 9,900: refused | 47 | 47 | 46 |
| GIF, animated (0.2 MB) | 700 | 624 | 479 |
| BMP, run-length encoded (0.8 MB) | 700 | 624 | 480 |
| AVIF (2 kB) | 963 | 963 | 962 |
| JPEG whose header states 65,500 x 65,500 pixels: refused | 43 | | |
| PNG of 64 x 64 whose profile or text inflates to 1 GB: read without it | 46 | | 51 |

A deflated member of a zip may inflate to 512 MiB, but above 64 MiB to no more than 200 times its bytes. The zip states
its size, and a larger one is left out unread. A compressed file (`.gz`, `.bz2`, `.xz`, `.zst`), even with a tar in it,
is decompressed to the disk, up to 256 MiB or 200 times its bytes. A line of a CSV or TSV may have 1 MiB.
"""


def outcome(result: PackedImage | str) -> str:
    """What became of a file, as the table says it."""
    if isinstance(result, str):
        return f"left out: {result}"
    if result.kept:
        return KEPT
    name = {"jpg": "JPEG", "png": "PNG"}[result.format]
    return f"{'RGB' if result.channels == 3 else 'grey'} {name} of {result.width} x {result.height}"


def page() -> str:
    """The text of docs/odd-images.md."""
    lines = [INTRODUCTION]
    for group, rows in GROUPS.items():
        lines += [f"## {group}", "", "| file | becomes | note |", "|---|---|---|"]
        lines += [f"| {row.what} | {row.becomes} | {row.rule} |" for row in rows]
        lines += [""]
    lines += [
        "## Other projects' test suites",
        "",
        "236 files from EXIF test images and a JPEG decoder's tests:",
        "",
    ]
    lines += ["| folder | files | becomes |", "|---|---|---|"]
    lines += [f"| {folder} | {n} | {what} |" for folder, reasons in REAL.items() for what, n in reasons.items()]
    return "\n".join([*lines, "", MEMORY])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
