"""Images in memory as bytes of files: PIL images, arrays, tensors, and what holds the bytes or the name of a file.

Arrays are RGB, grey or RGBA, with channels last, and tensors with channels first, unless only the other order fits.
Whole numbers are from 0 to 255; floats from 0 to 1, as torchvision's ``ToTensor`` makes them. OpenCV's arrays are BGR,
which no array shows: ``image[..., ::-1]`` is RGB.
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

_STORED = ("1", "L", "LA", "P", "RGB", "RGBA")  # modes of PIL that a PNG keeps


def is_array(value: object) -> bool:
    """Return whether a value is an array or a tensor: of NumPy, torch, JAX, TensorFlow, ..."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")


def is_image(value: object) -> bool:
    """Return whether a value is an image in memory, by its type; arrays by their shape as well."""
    if isinstance(value, Mapping):  # as Hugging Face's data sets have it
        return bool(value) and value.keys() <= {"bytes", "path"}
    is_file = isinstance(value, Image.Image | bytes | bytearray | memoryview) or hasattr(value, "read")
    return is_file or (is_array(value) and bool(_order(value)))


def _order(value: Any) -> str:
    """Return which dimensions of an array are which: HW, HWC or CHW; empty where it is no single image."""
    shape, is_tensor = tuple(value.shape), type(value).__module__.partition(".")[0] == "torch"
    if len(shape) != 3:
        return "HW" if len(shape) == 2 else ""
    orders = [order for order, channels in (("HWC", shape[2]), ("CHW", shape[0])) if channels in (1, 3, 4)]
    return orders[-1 if is_tensor else 0] if orders else ""


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
    if hasattr(value, "read"):
        value = getattr(value, "buffer", value)  # of a file that is open as text
        with suppress(AttributeError, OSError):  # it may be read again; a stream cannot be
            value.seek(0)
        value = value.read()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), bytes(value)
    if isinstance(value, Image.Image):
        name = getattr(value, "filename", "")
        with suppress(OSError, AttributeError, ValueError), Image.open(name) as stored:
            if stored == value:  # no change in place
                data = Path(name).read_bytes()
                return data, data
        image = ImageOps.exif_transpose(value)
        is_colour = image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBa", "La", "PA")
        image = image.convert("RGBA" if image.mode in ("RGBa", "La", "PA") else "RGB") if is_colour else image
        return _png(image if image.mode in _STORED else Image.fromarray(_as_bytes(np.asarray(image))))
    if not is_array(value):
        raise DataError(f"an image is {describe_type(value)}; it must be a PIL image, an array, a tensor, or a file")
    if not (order := _order(value)):
        raise DataError(
            f"an image has the shape {tuple(value.shape)}; it must be height x width, with 1, 3 or 4 channels behind"
            " or before them"
        )
    value = value.detach().cpu() if hasattr(value, "detach") else value
    pixels = _as_bytes(np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value))
    pixels = np.moveaxis(pixels, 0, -1) if order == "CHW" else pixels
    return _png(Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)))


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels as uint8. Raises DataError with the values, the limit and what to do."""
    if pixels.dtype.kind not in "buif" or not pixels.size:
        raise DataError(f"an image has {pixels.size} values of the type {pixels.dtype}; give image.astype('uint8')")
    low, high = pixels.min(), pixels.max()
    most = 1 if pixels.dtype.kind in "bf" else 255
    if not (low >= 0 and high <= most):  # also where a value is no number
        remedy = "undo the normalisation, or give the data set without its transform"
        if low >= 0 and high <= 65_535:
            remedy = "image.astype('uint8')" if high <= 255 else "(image // 257).astype('uint8') for 16 bits"
        values = f"an image of {pixels.dtype} has values from {low:.6g} to {high:.6g}"
        raise DataError(f"{values}; they must be from 0 to {most}: {remedy}")
    scaled: NDArray[np.uint8] = np.rint(pixels * (255 // most)).astype(np.uint8)
    return scaled


def _png(image: Image.Image) -> tuple[bytes, bytes]:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    palette = image.getpalette() if image.mode == "P" else None
    return file.getvalue(), f"{image.mode} {image.size} {palette}".encode() + image.tobytes()
