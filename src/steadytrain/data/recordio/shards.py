"""Record files named by one pattern: ``OUT-{00000..00003}-of-00004.rec``, ``OUT-*.rec``, ``{a,b}.rec``."""

from __future__ import annotations

from pathlib import Path

from steadytrain.data.recordio.card import Card, card_of, refuse_other_classes, together
from steadytrain.data.sources import filenames
from steadytrain.errors import DataError


def record_files(path: str | Path) -> list[Path]:
    """The record files that a name stands for, in their order: one, or several by braces and wildcards.

    Raises:
        DataError: there is none of that name.
    """
    named = Path(path)
    if named.exists() or not filenames.is_pattern(str(path)):
        return [named]
    return filenames.expand(str(path))


def card_for(path: Path) -> Card | None:
    """The card of what a name stands for: of several files one for all; None where one lacks it.

    Raises:
        DataError: a card is damaged, describes another file, or the files have different classes.
    """
    files = record_files(path)
    cards = [card for card in map(card_of, files) if card is not None]
    if len(cards) < len(files):
        return None
    for file, card in zip(files, cards, strict=True):
        refuse_other_classes(card.classes, cards[0].classes, of=file, card=files[0].with_suffix(".json"))
        if card.label_names != cards[0].label_names:
            raise DataError(f"{file} has other labels in its vectors than {files[0]}: pack both from one table")
    return together(cards)
