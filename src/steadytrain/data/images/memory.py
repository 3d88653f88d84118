"""Images in memory as bytes of files: PIL images, arrays, tensors, and what holds the bytes or the name of a file.

Arrays are RGB (or grey, or RGBA), height by width by channels, tensors channels first; where only the other order fits,
it is that. uint8 is from 0 to 255; floats are from 0 to 1, as torchvision's ``ToTensor`` makes them. OpenCV's arrays
are BGR, which no array shows: ``image[..., ::-1]`` is RGB.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from steadytrain.errors import DataError, describe_type, read_errors

_CHANNELS = (1, 3, 4)
_STORED = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of PIL that a PNG keeps."""


def is_array(value: object) -> bool:
    """Return whether a value is an array or a tensor: of NumPy, torch, JAX, TensorFlow, ..."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")


def is_image(value: object) -> bool:
    """Return whether a value is an image in memory, by its type; arrays by their shape as well."""
    if isinstance(value, Image.Image | bytes | bytearray | memoryview):
        return True
    if isinstance(value, Mapping):  # as Hugging Face's data sets have it
        return value.keys() <= {"bytes", "path"} and bool(value)
    return is_array(value) and _order(value) is not None


def _order(value: Any) -> str | None:
    """Return which dimensions of an array are which: HW, HWC or CHW; None where it is no single image."""
    shape = tuple(value.shape)
    if len(shape) == 2:
        return "HW"
    if len(shape) != 3:
        return None
    orders = [order for order, channels in (("HWC", shape[2]), ("CHW", shape[0])) if channels in _CHANNELS]
    is_tensor = type(value).__module__.partition(".")[0] == "torch"
    return (orders[-1] if is_tensor else orders[0]) if orders else None


def file_bytes(value: Any) -> tuple[bytes, bytes]:
    """Return an image in memory as the bytes of a file, lossless, and bytes that name its content in any version.

    Of what has the bytes of its file, these; else a PNG of its pixels.

    Raises:
        DataError: it is no image, or its values are not those of one.

    >>> data, _ = file_bytes(np.full((2, 3, 3), 0.5))
    >>> Image.open(io.BytesIO(data)).size, Image.open(io.BytesIO(data)).getpixel((0, 0))
    ((3, 2), (128, 128, 128))
    """
    if isinstance(value, Mapping) and is_image(value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | os.PathLike):
        with read_errors(Path(value)):
            value = Path(value).read_bytes()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), bytes(value)
    if isinstance(value, Image.Image):
        if (name := getattr(value, "filename", "")) and os.path.isfile(name):  # noqa: PTH113
            with suppress(OSError), Image.open(name) as opened:
                if opened == value:  # no change in place
                    data = Path(name).read_bytes()
                    return data, data
        return _png(_stored(ImageOps.exif_transpose(value)))
    if not is_array(value):
        raise DataError(
            f"an image is {describe_type(value)}; it must be a PIL image, an array, a tensor, the bytes of a file, or"
            " its name"
        )
    if (order := _order(value)) is None:
        raise DataError(
            f"an image has the shape {tuple(value.shape)}; it must be height x width, with 1, 3 or 4 channels behind"
            " or before them"
        )
    value = value.detach().cpu() if hasattr(value, "detach") else value
    pixels = _bytes_of(np.asarray(value))
    pixels = np.moveaxis(pixels, 0, -1) if order == "CHW" else pixels
    return _png(Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[2:] == (1,) else pixels)))


def _stored(image: Image.Image) -> Image.Image:
    """Return a PIL image in a mode that a PNG keeps."""
    if image.mode in _STORED:
        return image
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBa", "La", "PA"):
        return image.convert("RGBA" if image.mode in ("RGBa", "La", "PA") else "RGB")
    return Image.fromarray(_bytes_of(np.asarray(image)))  # 16 and 32 bits, and floats


def _bytes_of(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels as uint8. Raises DataError with the values, the limit and what to do."""
    if not pixels.size:
        raise DataError(f"an image has the shape {pixels.shape}: it has no pixels")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    if pixels.dtype.kind not in "uif":
        raise DataError(f"an image has values of the type {pixels.dtype}; it must be uint8: image.astype('uint8')")
    low, high = pixels.min(), pixels.max()
    values = f"an image of {pixels.dtype} has values from {low:.6g} to {high:.6g}"
    if pixels.dtype.kind in "ui":
        if low < 0 or high > 255:
            divide = " (of 16 bits: (image // 257).astype('uint8'))" if high > 255 and low >= 0 else ""
            raise DataError(f"{values}; whole numbers must be from 0 to 255{divide}")
        return pixels.astype(np.uint8)
    if not (low >= 0 and high <= 1):  # also where a value is no number
        if low >= 0 and high <= 255:
            remedy = "image.astype('uint8') for values up to 255, or divide by 255"
        else:
            remedy = "undo the normalisation, or give the data set without its transform"
        raise DataError(f"{values}; floats must be from 0 to 1: {remedy}")
    scaled: NDArray[np.uint8] = np.rint(pixels * 255).astype(np.uint8)
    return scaled


def _png(image: Image.Image) -> tuple[bytes, bytes]:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    palette = (image.getpalette() or []) if image.mode == "P" else []
    return file.getvalue(), f"{image.mode} {image.size} {palette}".encode() + image.tobytes()
