"""Bodies of ``POST /predict``: read in any form that clients send, into images and options.

The bytes say what a body is, whatever its content type: curl calls a JPEG a form, and clients of other servers send
base64 under other keys, over several lines, in the alphabet of addresses, or compressed.
"""

from __future__ import annotations

import binascii
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

from starlette.exceptions import HTTPException

from steadytrain.config.plain import parse_json
from steadytrain.errors import did_you_mean

LONG_TEXT = 4096
"""Characters of base64 from which an image is taken out of a JSON body before the rest of it is parsed."""
IMAGE_KEYS = ("images", "image", "instances", "inputs", "data", "file")
"""Names of images in JSON and forms: ours, and those of TensorFlow Serving, TorchServe and others."""
URL_KEYS = ("urls", "url", "image_url")
NUMBERS = ("top", "threshold", "explain")
KEYS = ("images", "urls", *NUMBERS)
SAME_KEYS = {**dict.fromkeys(("top_k", "topk", "k"), "top")}
HOW = "curl -T cat.jpg http://HOST/predict"
_IGNORED = ("signature_name", "parameters")  # TensorFlow Serving's; a table of options of Hugging Face's servers
_WITHIN = ("b64", "image_bytes", "bytes", "image", "data", "base64")
_DEPTH, _MOST_FIELDS = 4, 256
_PIECE = 2**20
_IMAGE_START = re.compile(rb"\xff\xd8|\x89PNG|GIF8|BM|II\*\0|MM\0\*|RIFF|P[1-6]\s|....ftyp", re.DOTALL)


@dataclass(frozen=True)
class Posted:
    """An image of a request: its bytes, or where they are, or why there are none."""

    name: str
    data: bytes = b""
    url: str = ""
    error: str = ""


def refusal(status: int, message: str, *, retry_after: int | None = None, is_early: bool = True) -> HTTPException:
    """Format a refusal; ``is_early``: the request has not been read to its end."""
    headers = {"connection": "close"} if is_early else {}
    headers |= {} if retry_after is None else {"retry-after": str(retry_after)}
    return HTTPException(status, message, headers)


def too_large(what: str, *, is_early: bool = True) -> HTTPException:
    """Format a refusal of what is beyond a limit."""
    return refusal(413, f"the request has {what}: send fewer or smaller images at a time", is_early=is_early)


def too_many_images(count: int, most: int) -> HTTPException:
    """Format a refusal of more images than a request may have."""
    return too_large(f"{count:,} images, more than {most:,}", is_early=False)


async def inflated(chunks: AsyncIterator[bytes], encoding: str, count: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Yield a body without its compression, in pieces of at most 1 MiB.

    Args:
        encoding: the value of ``content-encoding``.
        count: is told the size of each piece, and raises where all of them are too much.

    Raises:
        HTTPException: an encoding that is not known, or bytes that are not in it.
    """
    name = encoding.strip().lower()
    if name not in ("gzip", "x-gzip", "deflate"):
        raise refusal(415, f"content-encoding is {name[:40]!r}: send the body plain, or as gzip")
    window = 15 if name == "deflate" else 31
    inflater, is_empty = zlib.decompressobj(window), True
    try:
        async for chunk in chunks:
            waiting = chunk
            while waiting:
                if inflater.eof:  # gzip may have several members
                    inflater = zlib.decompressobj(window)
                piece = inflater.decompress(waiting, _PIECE)
                waiting, is_empty = inflater.unconsumed_tail or inflater.unused_data, False
                if piece:
                    count(len(piece))
                    yield piece
    except zlib.error as error:
        raise refusal(400, f"the body is not {name}, as its content-encoding says: {error}") from None
    while not inflater.eof and not is_empty:
        if not (piece := inflater.decompress(inflater.unconsumed_tail, _PIECE)):
            raise refusal(400, f"the body's {name} is cut short", is_early=False)
        count(len(piece))
        yield piece


def read_body(
    body: bytes, kind: str, *, max_images: int
) -> tuple[list[Posted], dict[str, Any], Literal["json", "form", "base64", "bytes"]]:
    """Read a body that is no multipart form: JSON, a form in the manner of an address, base64, or an image's bytes.

    Args:
        kind: the content type, in lower case, without parameters; the bytes overrule it.

    Returns:
        The images, the options, and what the body was.

    Raises:
        HTTPException: JSON that cannot be read, or is too long.
    """
    start = body[:256].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"{") or (kind.endswith("json") and not _IMAGE_START.match(start)):
        return (*read_json(body, max_images=max_images), "json")
    if kind == "application/x-www-form-urlencoded" and re.match(rb"[\w.-]{1,40}=", start):
        return (*read_form(_pairs(body), max_images=max_images), "form")
    if re.match(rb"data:[\w/.+;=-]{0,100},|[A-Za-z0-9+/_-]{60}", start):
        try:
            offset = body.find(b",", 0, 256) + 1 if start.startswith(b"data:") else len(body) - len(body.lstrip())
            return [Posted("body", decode_base64(body, offset))], {}, "base64"
        except ValueError:
            pass  # a text, or an image after all
    return [Posted("body", body)] if body else [], {}, "bytes"


def _pairs(body: bytes) -> list[tuple[str, bytes]]:
    """Read ``image=...&top=3``; of base64 a plus may stand for itself, which is a space by the rules."""
    parts = body.split(b"&", _MOST_FIELDS)
    if len(parts) > _MOST_FIELDS:
        raise too_large(f"more than {_MOST_FIELDS} fields", is_early=False)
    pairs = []
    for part in parts:
        name, _, value = part.partition(b"=")
        if len(value) > LONG_TEXT:  # an image: what is escaped takes no more memory than it has
            for code, sign in _PERCENT.items():
                value = value.replace(code, sign)
        else:
            value = unquote_to_bytes(
                value if valid(name.decode("latin-1")) in IMAGE_KEYS else value.replace(b"+", b" ")
            )
        pairs.append((name.decode("utf-8", "replace")[:LONG_TEXT], value))
    return pairs


def read_form(pairs: Sequence[tuple[str, bytes]], *, max_images: int) -> tuple[list[Posted], dict[str, str]]:
    """Read the texts of a form: images in base64, addresses, and options."""
    names = (*IMAGE_KEYS, *URL_KEYS)
    texts = [(name, value) for name, value in pairs if name in names]
    if len(texts) > max_images:
        raise too_many_images(len(texts), max_images)
    options = {name: value[:LONG_TEXT].decode("utf-8", "replace") for name, value in pairs if name not in names}
    return [_posted(name, value) for name, value in texts], options


def read_json(body: bytes, *, max_images: int) -> tuple[list[Posted], dict[str, Any]]:
    """Read ``{"images": [base64, ...], "urls": [...], "top": 5, "threshold": 0.5}``, or one ``image`` or ``url``.

    Long base64 is decoded where it stands, and only what is left is parsed, a few kB for each image at most: parsed as
    a whole, a body could become thirty times as large in memory.

    Raises:
        HTTPException: it is something else, or too long.

    >>> read_json(b'{"image": "aGVsbG8=", "top": 3}', max_images=1)
    ([Posted(name='image', data=b'hello', url='', error='')], {'top': 3})
    >>> read_json(b'{"instances": [{"b64": "aGVsbG8="}]}', max_images=1)  # TensorFlow Serving's
    ([Posted(name='instances[0]', data=b'hello', url='', error='')], {})
    """
    long_texts, shortened, end = dict[str, tuple[int, int]](), bytearray(), 0
    for match in _LONG_BASE64.finditer(body):
        shortened += body[end : match.start()] + b'"\\u0000%d"' % len(long_texts)
        long_texts[f"\0{len(long_texts)}"] = match.span(1)
        end = match.end()
    limit = (max_images + 16) * LONG_TEXT
    if len(shortened) + len(body) - end > limit:
        raise too_large(f"more than {limit:,} bytes of JSON beside the images' base64", is_early=False)
    shortened += body[end:]
    try:
        document = parse_json(shortened)
    except (ValueError, RecursionError) as error:
        raise refusal(400, f"the body is not JSON: {error}", is_early=False) from None
    if not isinstance(document, dict):
        raise refusal(400, 'the body must be a JSON object: {"image": BASE64}', is_early=False)
    entries = [(key, document.pop(key)) for key in (*IMAGE_KEYS, *URL_KEYS) if key in document]
    texts = [pair for key, value in entries for pair in _texts(key, value)]
    if len(texts) > max_images:
        raise too_many_images(len(texts), max_images)
    posted = []
    for name, text in texts:
        if text in long_texts:
            try:
                posted.append(Posted(name, decode_base64(body, *long_texts.pop(text))))
            except ValueError:
                posted.append(Posted(name, error="it is not base64"))
        else:
            posted.append(_posted(name, text.encode("utf-8", "replace")))
    for key in _IGNORED:
        options = document.pop(key, None)
        document |= options if isinstance(options, dict) else {}
    return posted, document


def _texts(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the texts of an image key's value, each with a name; lists and other servers' tables have them within."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list) and depth < _DEPTH and not any(isinstance(item, int | float) for item in value):
        for index, item in enumerate(value):
            yield from _texts(f"{name}[{index}]", item, depth + 1)
    elif isinstance(value, dict) and depth < _DEPTH and (key := next((key for key in _WITHIN if key in value), "")):
        yield from _texts(name, value[key], depth + 1)
    else:
        raise refusal(400, f"{name} must be a list of strings, or one: an image's file in base64", is_early=False)


def _posted(name: str, text: bytes) -> Posted:
    """Return the image that a text is: base64, a ``data:`` address, or where to fetch it."""
    if name.partition("[")[0] in URL_KEYS or re.match(rb"https?://", text):
        url = text.decode("utf-8", "replace")
        return Posted(url, url=url)
    try:
        return Posted(name, decode_base64(text, text.find(b",", 0, 256) + 1 if text.startswith(b"data:") else 0))
    except ValueError:
        is_name = re.fullmatch(rb"[^\r\n]{1,250}\.\w{2,5}", text) is not None
        hint = ", but the name of a file: curl -F image=@cat.jpg http://HOST/predict sends the file" if is_name else ""
        return Posted(name, error=f"it is not base64{hint}")


# Within a string of JSON; some writers escape the signs of base64, and break its lines.
_LONG_BASE64 = re.compile(rb'"(?:data:[\w/\\.+;=-]{0,100},)?([A-Za-z0-9+/=\\ _-]{%d,})"' % LONG_TEXT)
_ESCAPES = {rb"\/": b"/", rb"\n": b"", rb"\r": b"", rb"\t": b""}
_CODES = {form % ord(sign): sign for sign in (b"+", b"/", b"=", b"-", b"_") for form in (b"%02x", b"%02X")}
_ESCAPES |= {rb"\u00%s" % code: sign for code, sign in _CODES.items()}
_PERCENT = {b"%%%s" % code: sign for code, sign in _CODES.items()}
_PERCENT |= {b"%0A": b"", b"%0D": b"", b"%0a": b"", b"%0d": b"", b"%20": b"", b"%3A": b":", b"%3B": b";", b"%2C": b","}
_WEB = bytes.maketrans(b"-_", b"+/")


def decode_base64(data: bytes, start: int = 0, end: int | None = None) -> bytes:
    r"""Decode base64 within a text, without a copy where it is plain.

    Line breaks and spaces, the alphabet of addresses, JSON's escapes and a missing padding are taken as well.

    Raises:
        ValueError: it is something else.

    >>> decode_base64(b"aGVs\nbG8_"), decode_base64(b"aGVsbG8"), decode_base64(rb"aGVs\nbG8=")
    (b'hello?', b'hello', b'hello')
    """
    end = len(data) if end is None else end
    text: bytes | memoryview = memoryview(data)[start:end]
    if (
        any(data.find(sign, start, end) >= 0 for sign in (b"\\", b"-", b"_", b" ", b"\n", b"\r", b"\t"))
        or len(text) % 4
    ):
        text = bytes(text)
        if b"\\" in text:
            for escaped, sign in _ESCAPES.items():
                text = text.replace(escaped, sign)
        text = text.translate(_WEB, b" \n\r\t")
        text += b"=" * (-len(text) % 4)
    return binascii.a2b_base64(text, strict_mode=True)


def valid(text: str) -> str:
    """Replace what no answer can hold: halves of characters, which JSON and some encodings of forms can spell."""
    return text.encode("utf-8", "replace").decode()


def require_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by their names here. Raises HTTPException where one is unknown."""
    renamed = {SAME_KEYS.get(name, name): value for name, value in options.items()}
    for name in renamed:
        if name not in NUMBERS:
            short = name[:40]  # a name may be as long as a request
            near = did_you_mean(short, KEYS)
            raise refusal(400, f"{short!r} is unknown; there are {', '.join(KEYS)}.{near}", is_early=False)
    return renamed
