"""What to do about findings: commands and advice, each with what it is good for."""

from __future__ import annotations

import shlex
from pathlib import Path

from steadytrain.records.findings import KINDS, Findings

Remedies = tuple[tuple[str, str], ...]

_FRAMING = ("cut-short", "wrong-magic", "wrong-length", "stray-bytes", "broken-parts")
_RECORDS = ("no-header", "label-overrun", "label-not-finite", "label-not-class", "label-unknown", "label-width")
_IMAGES = ("no-image", "damaged-image", "truncated-image", "unusable-image")
_INDEX = tuple(kind for kind in KINDS if kind.startswith("index-") and kind != "index-keys")
_CARD = ("card-unreadable", "card-size", "card-digest", "card-count", "card-classes")


def remedies_for_records(path: Path, found: Findings, *, num_sound: int) -> Remedies:
    """Remedies for a record file of which ``num_sound`` records can be used."""
    here, told = shlex.quote(str(path)), []
    lost = _any(found, *_FRAMING, *_RECORDS, *_IMAGES)
    if found.counts["not-images"]:
        told += [("pack the images themselves: steady pack FOLDER OUT", "these records hold none")]
    elif lost and num_sound:
        out = shlex.quote(str(path.with_name(f"{path.stem}-salvaged")))
        one = num_sound == 1
        told += [
            (f"steady check {here} --salvage {out}", f"writes the {num_sound:,} sound record{'s' * (not one)} anew")
        ]
    if _any(found, *_INDEX):
        why = "writes the index" if found.counts["index-missing"] else "writes the index anew"
        told += [(f"steady check {here} --index", why)]
    if _any(found, *_CARD) and not lost:
        told += [(f"fetch {path.stem}.rec and .json again, or pack again", "the card is that of other records")]
    if found.counts["detection"] or found.counts["label-vectors"]:
        told += [("pack the images in a folder for each class, or from a .lst with one class each", "to classify them")]
    if found.counts["lies-on-its-side"]:
        told += [("pack the images again (not with --encoding pass)", "turns them upright")]
    if found.counts["conflicting-labels"]:
        told += [("give each image one label, and pack again", "a model is scored on both")]
    if found.counts["leak"]:
        told += [("take them out of one of the two, and pack again", "accuracy is then told on images never seen")]
    return tuple(told)


def remedies_for_source(path: Path, found: Findings, *, total: int) -> Remedies:
    """Remedies for a folder or another source of ``total`` images."""
    told = []
    if path.suffix.lower() == ".lst" and 2 * found.counts["unreadable"] > total:
        return (
            (f"steady check {shlex.quote(str(path))} --root FOLDER", "says where the paths of the list start from"),
        )
    if _any(found, *_IMAGES, "unreadable"):
        told += [("mend or remove what cannot be used", "packing leaves it out and names it on the card")]
    if found.counts["too-many-bad"]:
        told += [(f"steady pack {shlex.quote(str(path))} OUT --max-bad N", "packs the rest all the same")]
    if found.counts["conflicting-labels"]:
        told += [("keep each image in one class", "a model is scored on both")]
    if found.counts["leak"]:
        told += [("keep each image in one split", "accuracy is then told on images never seen")]
    if found.counts["name-clash"]:
        told += [("rename one of each pair", "a copy to macOS or Windows would lose the other")]
    return tuple(told)


def _any(found: Findings, *kinds: str) -> bool:
    return any(found.counts[kind] for kind in kinds)
