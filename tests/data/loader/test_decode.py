"""Pixels: Pillow's own, or within a stated distance of them; and nothing a stranger sends can do harm."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from tests.data.loader.pictures import Pictures, Run, encode, everything, same, scene
from torchvision.transforms import InterpolationMode, v2

from steadytrain.data.images import jpeg
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.encode import add_restart_markers, to_ppm
from steadytrain.data.loader import ImageLoader
from steadytrain.data.loader.crop import Crop, CropPlan
from steadytrain.data.loader.decode import PSNR, SHRUNK_PSNR, Scratch, cut_from, cut_into, pixels, probe
from steadytrain.data.loader.sampler import uniforms

Pixels = NDArray[np.uint8]

Box = tuple[int, int, int, int]

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def psnr(pixels: Pixels, other: Pixels) -> float:
    """Peak signal to noise ratio in dB; infinite where nothing differs."""
    error = float(np.mean((pixels.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def whole(data: bytes, channels: Literal[1, 3] = 3) -> Pixels:
    return pixels(probe(data), channels, Scratch())


def cut_of(data: bytes, cut: Crop, box: Box, *, flip: bool = False, shrink: int = 1) -> Pixels:
    """The square that a box is resized to."""
    out = np.full((cut.size, cut.size, cut.channels), 99, np.uint8)
    size = np.array([[cut.size, cut.size]])
    plan = CropPlan(np.array([box]), size, size * 0, np.array([flip]), np.array([shrink]))
    cut_into(out, probe(np.frombuffer(data, np.uint8).copy()), cut, plan, 0, Scratch())
    return out


def reference(image: Image.Image, cut: Crop, box: Box) -> Pixels:
    """The same by Pillow alone, all of the image decoded: what torchvision's transforms do."""
    return np.asarray(image.convert("RGB").crop(box).resize((cut.size,) * 2, FILTERS[cut.interpolation]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"quality": 90, "progressive": True}),
        ("JPEG", {"quality": 90, "subsampling": 0}),
        ("JPEG", {"quality": 90, "restart_marker_blocks": 4}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("PPM", {}),
    ],
)
def test_a_whole_image_has_the_pixels_that_pillow_reads(kind: str, options: dict[str, Any]) -> None:
    data = encode(scene(1, 53, 71), kind, **options)
    assert np.array_equal(whole(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("colour", [True, False])
def test_bare_pixels_are_copied_by_no_decoder(
    monkeypatch: pytest.MonkeyPatch, colour: bool, channels: Literal[1, 3]
) -> None:
    image = scene(1, 53, 71) if colour else scene(1, 53, 71).convert("L")
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(53, 71, channels)
    data = to_ppm(np.asarray(image))
    monkeypatch.setattr(Image, "open", None)
    assert np.array_equal(whole(data, channels), expected)
    cut = Crop(kind="none", size=24)
    assert np.array_equal(cut_of(data, cut, (10, 5, 34, 29)), np.asarray(image.convert("RGB"))[5:29, 10:34])


def test_bare_pixels_cut_short_are_bad() -> None:
    with pytest.raises(BadImageError, match=r"cut short|damaged"):
        whole(to_ppm(np.zeros((40, 30, 3), np.uint8))[:-1])


def test_every_original_photograph_has_the_pixels_that_pillow_reads(extracted: Callable[[str], Path]) -> None:
    for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::5]:
        expected = np.asarray(Image.open(path).convert("RGB"))
        assert np.array_equal(whole(path.read_bytes()), expected), path.name


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_cut_is_pillows_resize_of_the_box(kind: str, interpolation: Literal["bilinear", "bicubic"]) -> None:
    image = Image.open(io.BytesIO(encode(scene(2, 120, 160), kind)))
    cut = Crop(kind="none", size=48, interpolation=interpolation)
    boxes: list[Box] = [(0, 0, 160, 120), (11, 7, 100, 90), (100, 60, 130, 90), (3, 100, 160, 103)]
    for box in boxes:
        got = cut_of(encode(scene(2, 120, 160), kind), cut, box)
        assert np.abs(got.astype(int) - reference(image, cut, box)).max() <= 1
        assert psnr(got, reference(image, cut, box)) >= PSNR
        assert np.array_equal(cut_of(encode(scene(2, 120, 160), kind), cut, box, flip=True), got[:, ::-1])


def test_a_cut_at_the_same_scale_copies_pixels() -> None:
    data = encode(scene(3, 60, 80))
    got = cut_of(data, Crop(kind="none", size=32), (10, 20, 42, 52))
    assert np.array_equal(got, whole(data)[20:52, 10:42])


@pytest.mark.parametrize("interpolation", ["bilinear", pytest.param("bicubic", marks=pytest.mark.slow)])
def test_cuts_of_photographs_are_close_to_pillow(
    extracted: Callable[[str], Path], interpolation: Literal["bilinear", "bicubic"]
) -> None:
    """Random boxes of 500 pixel photographs: as they are at 224 pixels, shrunk while decoding at 24, 48 and 96."""
    paths = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::3]
    sizes = np.array([probe(path.read_bytes()).size for path in paths])
    qualities: dict[int, list[float]] = {shrink: [] for shrink in (1, 2, 4, 8)}
    for target in (224, 96, 48, 24):
        cut = Crop(kind="resized-crop", size=target, interpolation=interpolation)
        plan = cut.plan(sizes, uniforms(target, np.arange(len(paths)), cut.num_draws))
        for row, path in enumerate(paths):
            left, top, right, bottom = plan.boxes[row].tolist()
            got = cut_of(path.read_bytes(), cut, (left, top, right, bottom), shrink=int(plan.shrinks[row]))
            expected = reference(Image.open(path), cut, (left, top, right, bottom))
            qualities[int(plan.shrinks[row])].append(psnr(got, expected))
    for shrink, values in qualities.items():
        print(f"{interpolation}, shrunk {shrink}: n={len(values)}, {min(values):.1f} dB, {np.median(values):.1f} dB")
        assert len(values) > 10
        assert min(values) >= (PSNR if shrink == 1 else SHRUNK_PSNR)
        assert np.median(values) >= 40


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_is_torchvisions_resize_and_centre_crop(
    extracted: Callable[[str], Path], interpolation: Literal["bilinear", "bicubic"]
) -> None:
    cut = Crop(kind="none", size=192, crop=0.875, interpolation=interpolation)
    mode = InterpolationMode.BILINEAR if interpolation == "bilinear" else InterpolationMode.BICUBIC
    theirs = v2.Compose([v2.Resize(219, mode, antialias=True), v2.CenterCrop(192)])
    for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::20]:
        encoded = probe(path.read_bytes())
        plan = cut.plan(np.array([encoded.size]), np.empty((1, 0)))
        out = np.empty((192, 192, 3), np.uint8)
        cut_into(out, encoded, cut, plan, 0, Scratch())
        expected = np.asarray(theirs(Image.open(path).convert("RGB")))
        assert psnr(out, expected) >= (PSNR if plan.shrinks[0] == 1 else SHRUNK_PSNR), path.name


def test_padding_is_zero_and_mirrors_with_the_image() -> None:
    source = np.full((8, 8, 3), 200, np.uint8)
    cut = Crop(kind="pad-crop", size=8, pad=4)
    pair = np.ones(2, np.int64)
    plan = CropPlan(
        np.array([[0, 0, 8, 8]] * 2), np.full((2, 2), 8), np.array([[-2, -3]] * 2), np.array([False, True]), pair
    )
    for row, columns in enumerate([slice(3, 8), slice(0, 5)]):
        out = np.full((8, 8, 3), 99, np.uint8)
        cut_from(out, source, cut, plan, row)
        expected = np.zeros_like(out)
        expected[2:, columns] = 200
        assert np.array_equal(out, expected)


def test_grey_is_the_luminance_of_colour_and_colour_of_grey_is_grey() -> None:
    image = scene(4, 64, 64)
    data = encode(image, "JPEG", quality=95)
    assert psnr(whole(data, 1)[..., 0], np.asarray(Image.open(io.BytesIO(data)).convert("L"))) > 45
    for kind in ("JPEG", "PNG"):
        grey = encode(image.convert("L"), kind)
        assert whole(grey, 1).shape == (64, 64, 1)
        assert np.array_equal(whole(grey, 3), np.repeat(whole(grey, 1), 3, axis=2))


def test_odd_modes_follow_the_packers_rule() -> None:
    clear = Image.new("RGBA", (20, 20), (200, 10, 10, 0))
    assert (whole(encode(clear)) == 255).all(), "transparency is laid over white"
    deep = Image.fromarray(np.full((20, 20), 0x8080, np.uint16))
    assert (whole(encode(deep)) == 0x80).all()
    palette = scene(5, 20, 20).quantize(16)
    assert np.array_equal(whole(encode(palette)), np.asarray(palette.convert("RGB")))
    cmyk = scene(6, 20, 20).convert("CMYK")
    data = encode(cmyk, "JPEG")
    assert np.array_equal(whole(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"not an image at all",
        encode(scene(7, 40, 40), "JPEG")[:-200],
        encode(scene(7, 40, 40))[:-200],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
    ids=["empty", "start of a JPEG", "text", "half a JPEG", "half a PNG", "PostScript"],
)
def test_incomplete_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadImageError):
        whole(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_bomb_is_refused_by_its_header(kind: str) -> None:
    data = bytearray(encode(Image.new("L", (64, 64)), kind))
    if kind == "PNG":
        data[16:24] = (20_000).to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    else:
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = (20_000).to_bytes(2, "big") * 2
    with pytest.raises(BadImageError, match="pixels"):
        probe(bytes(data))


def test_odd_and_hostile_files_are_read_as_pillow_reads_them_or_refused(data_folder: Path) -> None:
    """Corrupt, lossless, CMYK, progressive, of strange sizes: the same verdict and the same pixels as Pillow's."""
    read = 0
    for path in sorted((data_folder / "odd-images").rglob("*")):
        if path.suffix.lower() not in (".jpg", ".jpeg", ".png"):
            continue
        data = path.read_bytes()
        try:
            got: Pixels | None = whole(data)
        except BadImageError:
            got = None
        try:
            expected = Image.open(path)
            expected.load()
        except (OSError, SyntaxError, Image.DecompressionBombError):
            assert got is None, path.name
            continue
        if expected.mode in ("L", "RGB", "CMYK"):
            assert got is not None and np.array_equal(got, np.asarray(expected.convert("RGB"))), path.name
            read += 1
    assert read > 60


NEEDS_PARTS = pytest.mark.skipif(jpeg.parts is None, reason="the native decoder is not built, or there is no AVX2")

CUTS = {
    "training": Crop(kind="resized-crop", size=64, flip=True),
    "training, bicubic": Crop(kind="resized-crop", size=96, area=(0.3, 1.0), flip=True, interpolation="bicubic"),
    "evaluation": Crop(kind="none", size=56, crop=0.875),
    "evaluation, bicubic": Crop(kind="none", size=100, crop=0.95, interpolation="bicubic"),
    "all of the shorter side": Crop(kind="none", size=48),
    "mostly padding": Crop(kind="pad-crop", size=1, pad=6),
    "padded": Crop(kind="pad-crop", size=60, pad=6, flip=True),
    "grey": Crop(kind="resized-crop", size=40, flip=True, channels=1),
    "training, squashed": Crop(kind="resized-crop", size=64, flip=True, fit="squash"),
    "squashed": Crop(kind="none", size=48, fit="squash", interpolation="bicubic"),
    "training, filled": Crop(kind="resized-crop", size=64, flip=True, fit="pad", fill=(9, 99, 199)),
    "filled": Crop(kind="none", size=48, crop=0.875, fit="pad", fill=(9, 99, 199)),
}


def many_kinds() -> list[bytes]:
    """Of all sizes and samplings, with markers and without; some that only a full decoder knows, and some damaged."""
    sizes = [(64, 64), (5, 90), (90, 5), (61, 133), (150, 200), (300, 170), (1, 1), (3, 40), (17, 16), (256, 341)]
    images: list[bytes] = []
    for seed, (height, width) in enumerate(sizes):
        for options in ({"subsampling": seed % 3}, {"restart_marker_blocks": 1 + seed % 4}, {"optimize": True}):
            images.append(encode(scene(seed, height, width), "JPEG", quality=90, **options))
    image = scene(20, 120, 150)
    images += [encode(image.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    images += [encode(image, "JPEG", progressive=True), encode(image, "JPEG", keep_rgb=True), encode(image)]
    images += [simplejpeg.encode_jpeg(np.asarray(image), 85, "RGB", sampling) for sampling in ("440", "411")]
    whole = encode(image, "JPEG", quality=90)
    return [*images, whole[:-300], whole[:-300] + b"\xff\xd9", whole[:1500] + bytes(9) + whole[1500:]]


def run(images: list[bytes], cut: Crop, *, train: bool, **options: Any) -> Run:
    with ImageLoader(
        Pictures(images), cut, batch_size=16, train=train, stop=2 * len(images) if train else None, **options
    ) as feed:
        return everything(feed)


@NEEDS_PARTS
@pytest.mark.filterwarnings("ignore:record")
@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["", "kept"])
@pytest.mark.parametrize("name", CUTS)
def test_a_feed_gives_the_same_bytes_without_the_native_decoder(
    name: str, keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, cut = many_kinds(), CUTS[name]
    sound = images[:-3]
    got = [run(images, cut, train=True, keep_bytes=keep_bytes), run(sound, cut, train=False, keep_bytes=keep_bytes)]
    monkeypatch.setattr(jpeg, "parts", None)
    assert same(got[0], run(images, cut, train=True, keep_bytes=keep_bytes))
    assert same(got[1], run(sound, cut, train=False, keep_bytes=keep_bytes))


@NEEDS_PARTS
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("train", [True, False])
def test_photographs_are_decoded_in_part_with_the_same_bytes(
    extracted: Callable[[str], Path], restarts: int, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::8]
    images = [path.read_bytes() for path in paths if max(Image.open(path).size) < 3 * 224]  # larger ones are shrunk
    assert len(images) > 20
    if restarts:
        images = [encode(Image.open(io.BytesIO(data)), "JPEG", restart_marker_blocks=restarts) for data in images]
    cut = Crop(kind="resized-crop", size=224, crop=0.875, flip=True)
    with monkeypatch.context() as patch:
        patch.setattr(simplejpeg, "decode_jpeg", None)
        got = run(images, cut, train=train, keep_bytes=0)
    monkeypatch.setattr(jpeg, "parts", None)
    assert same(got, run(images, cut, train=train, keep_bytes=0))


@NEEDS_PARTS
def test_chroma_of_a_form_without_a_name_is_read(extracted: Callable[[str], Path]) -> None:
    """4:4:1, luma sampled 1 x 4: what turning a 4:1:1 file without loss leaves."""
    path = min(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))
    photo = Image.open(path).convert("RGB").crop((0, 0, 64, 64))
    file = io.BytesIO()
    photo.save(file, "JPEG", subsampling="4:2:0")
    data = file.getvalue()
    frame = data.index(b"\xff\xc0")
    assert data[frame + 11] == 0x22
    data = data[: frame + 11] + b"\x14" + data[frame + 12 :]  # as many blocks, in another shape
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(pixels(probe(data), 3, Scratch()), wanted)
    assert add_restart_markers(data, most=4) == data
