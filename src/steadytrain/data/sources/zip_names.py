"""Names in a zip whose encoding it does not tell: as they were written on a Chinese, Japanese or Russian Windows.

A zip marks names as UTF-8 or as nothing. Code page 437 is the standard's for the latter, and most Windows programs used
the code page of their country. All names of an archive are decoded by each encoding in turn. One is right if every
sign is a usual one of its script: a common ideograph, a syllable, a letter in a word that is written in lower case, in
capitals, or with a capital first. Where none or several are right, whoever calls has to ask.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steadytrain.data.filenames import is_image

_WORD = re.compile(r"[^\W\d_]+")
_THAI = re.compile("(?:[\u0e40-\u0e44]?[\u0e01-\u0e2e][\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*[\u0e30\u0e32\u0e33\u0e45]?)+")
_COMMON_LETTERS = {
    **dict.fromkeys(("cp866", "cp1251", "koi8-r"), frozenset("оеаинтсрвлкмдпу")),
    **dict.fromkeys(("cp737", "cp1253"), frozenset("αάοόιίεέτσςνηήυύρπκμλ")),
}
# Syllables that make up most Korean text: without them a word is more likely Chinese.
_COMMON_HANGUL = frozenset(
    "이다는을를가에의고지도로하사아기어은서자나리라시대인일과만그해전한정부제수스장보동원주있상구게유요들경성안소문신여세화물우공개"
    "강선미국연면무생관진비오조모마바계영용발방위산회차체품양업학교반민분간단내당적말식실분의금입종작중합행후명력불거드러레르트프크카타파"
    "페포푸피토터코키치채초추축새색생설손송순술숲승십쓰씨아악알앞야약언얼엄여역열예옥온옷와왕외욕운울웃원월육은음잎잔잠저절점접정족죽줄쥐즈"
    "집짐찌창책천청춘출충취칠칼컵케콩탁탑택털통퇴투특팔팽편평포폰표풀품풍필함해햄향허호혼홍황회효흑흰힘갈감갑강개건검겨결고곰공곤관광괴굴귀"
    "근글길김까꽃꿀끼낙난남납낭너널네노논놀농높누눈늑늘능니닐닭담답대더덕데도독돌동돼되두둑둘뒤들등따딸때떡또뚜뛰라락란람랑래량려련렬령료"
    "루류륙률름릉리린림막망매머먹멀메면목몰못무묵문물미밀밤배백뱀버번벌범법벽변별병보복볶본봉부북불붕블비빌빗빛빵뻐뿌사산살삼상새"
)


@dataclass(frozen=True)
class NameReading:
    """Names by one encoding.

    Args:
        encoding: as Python spells it.
        names: the names that are not ASCII, without folders and without the suffix of an image.
    """

    encoding: str
    names: tuple[str, ...]


def readings(names: Iterable[bytes]) -> list[NameReading]:
    """Return the encodings by which all these names of members are what people write; none, one or several.

    >>> [reading.encoding for reading in readings(["猫狗/1.jpg".encode("gbk"), "鸟/2.jpg".encode("gbk")])]
    ['gbk']
    >>> readings(["Кошка/1.jpg".encode("cp866")])[0].names
    ('Кошка',)
    """
    parts = {part: None for name in names for part in name.split(b"/") if not part.isascii()}
    stems = [part.rpartition(b".")[0] if is_image(part.decode("latin-1")) else part for part in parts]
    right: dict[str, tuple[str, ...]] = {}
    for encoding, is_right in _RULES.items():
        try:
            texts = tuple(stem.decode(encoding) for stem in stems)
        except UnicodeDecodeError:
            continue
        if is_right(texts) and texts not in right.values():
            right[encoding] = texts
    return [NameReading(encoding, right[encoding]) for encoding in _likeliest(right)]


def _likeliest(right: Mapping[str, tuple[str, ...]]) -> Sequence[str]:
    """Leave out encodings beside which another one is far more likely."""
    if "cp949" in right and len(_strange("".join(right["cp949"]))) > 1:  # a tenth of Chinese signs would be common
        return ["cp949"]
    if "cp437" in right and right.keys() <= {"cp437", "cp850", "cp1252"}:
        return ["cp437"]  # the standard's
    if "gbk" in right and "cp874" in right:
        return [encoding for encoding in right if encoding != "cp874"]  # few Thai words are pairs of common ideographs
    shares = {
        encoding: sum(sign in letters for sign in text.lower()) / len(text)
        for encoding, letters in _COMMON_LETTERS.items()
        if encoding in right and (text := _strange("".join(right[encoding])))
    }
    best = max(shares, key=shares.__getitem__, default="")
    close = {encoding for encoding, share in shares.items() if share >= shares[best] - 0.2}
    return [encoding for encoding in right if encoding not in shares or encoding in close]


def _strange(text: str) -> str:
    return "".join(sign for sign in text if not sign.isascii())


def _ideographs(texts: Sequence[str], encoding: str) -> list[bytes]:
    """Codes of the signs that are not ASCII, without punctuation, digits and marks as wide as an ideograph."""
    return [
        sign.encode(encoding)
        for sign in _strange("".join(texts))
        if unicodedata.east_asian_width(sign) not in "FW" or unicodedata.category(sign) in ("Lo", "So")
    ]


def _are_amid_letters(texts: Sequence[str]) -> bool:
    return any(re.search(r"[a-z][^\x00-\x7f]|[^\x00-\x7f][a-z]", text) for text in texts)


def _is_chinese(texts: Sequence[str]) -> bool:
    """Return whether all signs are of GB 2312, and most of them of its first level, the 3,755 common ones."""
    codes = _ideographs(texts, "gbk")
    common = sum(0xB0 <= code[0] <= 0xD7 for code in codes)
    return bool(codes) and common >= 0.7 * len(codes) and all(code[0] >= 0xB0 and code[-1] >= 0xA1 for code in codes)


def _is_traditional_chinese(texts: Sequence[str]) -> bool:
    """Return whether all signs are of Big5's first level, and some of a kind that GB 2312 has not."""
    codes = _ideographs(texts, "big5")
    is_usual = any(code[-1] < 0xA1 for code in codes) and all(0xA4 <= code[0] <= 0xC6 for code in codes)
    return len(codes) > 1 and is_usual and not _are_amid_letters(texts)


def _is_japanese(texts: Sequence[str]) -> bool:
    """Return whether all signs are kana or common ideographs (JIS X 0208's first level), not amid Latin letters."""
    codes = _ideographs(texts, "cp932")
    usual = [len(code) == 2 and (0x82 <= code[0] <= 0x83 or 0x88 <= code[0] <= 0x98) for code in codes]
    return len(codes) > 1 and all(usual) and not _are_amid_letters(texts)


def _is_korean(texts: Sequence[str]) -> bool:
    signs = _strange("".join(texts))
    is_hangul = all(0xB0 <= sign.encode("cp949")[0] <= 0xC8 and 0xAC00 <= ord(sign) <= 0xD7A3 for sign in signs)
    return bool(signs) and is_hangul and sum(sign in _COMMON_HANGUL for sign in signs) >= 0.6 * len(signs)


def _is_thai(texts: Sequence[str]) -> bool:
    """Return whether all signs are Thai, in syllables, some with a vowel, and not amid Latin letters."""
    words = [_strange(text) for text in texts]
    has_vowel = any("\u0e2f" < sign < "\u0e46" for word in words for sign in word)
    return has_vowel and all(map(_THAI.fullmatch, words)) and not _are_amid_letters(texts)


def _are_words(script: str) -> Callable[[Sequence[str]], bool]:
    """Return the test for a script with upper and lower case."""

    def are_words(texts: Sequence[str]) -> bool:
        for text in texts:
            signs = _strange(text)
            if any(not unicodedata.name(sign, "").startswith(f"{script} ") for sign in signs) or "ƒ" in signs:
                return False
            for word in _WORD.findall(text):
                # No Russian word begins with a hard or soft sign; the other sigma ends Greek words.
                is_odd = word[0] in "ЪЫЬъыь" or "ς" in word[:-1]
                if is_odd or word not in (word.lower(), word.upper(), word.capitalize()):
                    return False
                share = len(_strange(word)) / len(word)
                if share > 2 / 3 and len(word) > 1 if script == "LATIN" else 0 < share < 1:
                    return False
        return True

    return are_words


_RULES: dict[str, Callable[[Sequence[str]], bool]] = {
    **dict.fromkeys(("cp437", "cp850", "cp1252"), _are_words("LATIN")),
    **dict.fromkeys(("cp866", "cp1251", "koi8-r"), _are_words("CYRILLIC")),
    **dict.fromkeys(("cp737", "cp1253"), _are_words("GREEK")),
    "gbk": _is_chinese,
    "big5": _is_traditional_chinese,
    "cp932": _is_japanese,
    "cp949": _is_korean,
    "cp874": _is_thai,
}
