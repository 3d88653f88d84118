"""Names in a zip whose code page it does not tell: as they were written on a Chinese, Japanese or Russian Windows.

A zip marks names as UTF-8 or as nothing. Code page 437 is the standard's for the latter, and most Windows programs used
the code page of their country. No rule tells them apart, so the user is asked, and shown what the names may be.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from steadytrain.errors import DataError
from steadytrain.format import printable

_CODE_PAGES = (
    *("gbk", "cp932", "cp949", "big5", "cp1251", "cp866", "cp1252", "cp850", "cp437", "cp1253", "cp874", "cp1256"),
)
_NUM_SHOWN = 3
_WORD = re.compile(r"[^\W\d_]+")
# Letters of two alphabets, side by side.
_MIXED = re.compile(r"[A-Za-z](?![A-Za-zÀ-ɏ])[^\W\d_]|(?![A-Za-zÀ-ɏ])[^\W\d_][A-Za-z]")


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
    """Make the error about names of the zip ``of`` that are by no code page that is known: it shows the likeliest."""
    parts = list(dict.fromkeys(part for name in names for part in name.split(b"/") if not part.isascii()))
    texts: dict[str, str] = {}
    for code_page in _CODE_PAGES:
        try:
            texts[code_page] = b", ".join(parts).decode(code_page)
        except UnicodeDecodeError:
            continue
    likely = sorted(texts, key=lambda code_page: _strangeness(texts[code_page]))[:_NUM_SHOWN]
    shown = "; ".join(f"{code_page}: {printable(b', '.join(parts[:2]).decode(code_page))}" for code_page in likely)
    return DataError(
        f"{of} does not tell the code page of its names ({shown or 'of none that is common'}): name the right one, such"
        f" as --zip-names {likely[0] if likely else 'cp1250'}"
    )


def _strangeness(text: str) -> int:
    """Count what people rarely write: signs that are no letters or of half width, scripts, two scripts in a word."""
    signs = [sign for sign in text if not sign.isascii()]
    scripts = {unicodedata.name(sign, "?").partition(" ")[0] for sign in signs}
    return (
        len(scripts)
        + 2 * len(_MIXED.findall(text))
        + sum(not sign.isalpha() or unicodedata.east_asian_width(sign) == "H" for sign in signs)
    )
