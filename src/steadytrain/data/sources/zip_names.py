"""Names in a zip whose code page it does not tell: as they were written on a Chinese, Japanese or Russian Windows.

A zip marks names as UTF-8 or as nothing. Code page 437 is the standard's for the latter, and most Windows programs used
the code page of their country. No rule tells them apart, so the user is asked, and shown what the names may be.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress

from steadytrain.errors import DataError
from steadytrain.format import printable

_CODE_PAGES = (
    *("gbk", "cp932", "cp949", "big5", "cp1251", "cp866", "cp1252", "cp850", "cp437", "cp1253", "cp874", "cp1256"),
)
_WORD = re.compile(r"[^\W\d_]+")


def require_code_page(name: str) -> None:
    """Raise DataError where Python knows no such code page."""
    ascii_signs = bytes(range(32, 127))
    try:
        is_code_page = ascii_signs.decode(name) == ascii_signs.decode("ascii")
    except (LookupError, ValueError):
        is_code_page = False
    if not is_code_page:
        raise DataError(f"--zip-names is {name}, which is no code page: give one such as gbk, cp932 or cp1251")


def decode(name: bytes, code_page: str) -> str:
    """Decode the name of a member. Raises DataError where it is not of this code page."""
    try:
        return name.decode(code_page)
    except UnicodeDecodeError:
        shown = printable(name.decode("cp437"))
        raise DataError(
            f"--zip-names is {code_page}, by which {shown} cannot be read: name another code page"
        ) from None


def are_plain(names: Sequence[bytes]) -> bool:
    """Return whether all names are words by code page 437, of Latin letters most of which are ASCII.

    >>> are_plain(["Mädchen/1.jpg".encode("cp437")]), are_plain(["КОТ/1.jpg".encode("cp866")])
    (True, False)
    """
    text = " ".join(name.decode("cp437") for name in names)
    if not all(sign.isascii() or unicodedata.name(sign).startswith("LATIN ") for sign in text):
        return False
    return all(
        word in (word.lower(), word.upper(), word.capitalize())
        and sum(not letter.isascii() for letter in word) * 3 <= len(word) * 2
        for word in _WORD.findall(text)
        if not word.isascii()
    )


def ask_for_code_page(names: Sequence[bytes], of: str) -> DataError:
    """Make the error about names of the zip ``of`` that are by no known code page: it shows what they may be."""
    shown, code_page = readings(part for name in names for part in name.split(b"/"))
    return DataError(
        f"{of} does not tell the code page of its names ({shown}): name the right one, such as --zip-names {code_page}"
    )


def readings(texts: Iterable[bytes]) -> tuple[str, str]:
    """Return what the first two of some texts that are not ASCII may be by each code page, and one of these."""
    parts = list(dict.fromkeys(part for part in texts if not part.isascii()))
    known: dict[str, str] = {}
    for code_page in _CODE_PAGES:
        with suppress(UnicodeDecodeError):
            b", ".join(parts).decode(code_page)
            known.setdefault(b", ".join(parts[:2]).decode(code_page), code_page)
    shown = "; ".join(f"{code_page}: {printable(text)}" for text, code_page in known.items())
    return shown or "of none that is common", next(iter(known.values()), "cp1250")
