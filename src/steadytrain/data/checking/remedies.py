"""What to do about findings: commands and advice, each with what it is good for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from steadytrain.data.checking.findings import KINDS, Findings

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
    is_writable = os.access(path.parent, os.W_OK)
    if _any(found, *_FRAMING):
        told += [("fetch or copy it again, if there is a whole one", "nothing is lost then")]
    if found.counts["not-images"]:
        told += [("pack the images themselves: steady pack FOLDER OUT", "these records hold none")]
    elif lost and num_sound:
        out = path.with_name(f"{path.stem}-salvaged") if is_writable else Path(f"{path.stem}-salvaged")
        why = f"writes the {num_sound:,} sound record{'s' * (num_sound != 1)} anew"
        told += [(f"steady check {here} --salvage {shlex.quote(str(out))}", why)]
    if _any(found, *_INDEX):
        why = "writes the index" if found.counts["index-missing"] else "writes the index anew"
        told += [(f"steady check {here} --index", why + "; its folder must be writable" * (not is_writable))]
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


def remedies_for_source(
    sources: Sequence[str],
    found: Findings,
    *,
    total: int,
    bad: int,
    root: Path | None = None,
    labels: Path | None = None,
) -> Remedies:
    """Remedies for a folder or other sources of ``total`` images, of which ``bad`` cannot be used.

    Args:
        sources: what is to be packed.
        found: what is wrong with it.
        total, bad: see above.
        root, labels: what packing was to be told beside that.
    """
    here, told = shlex.join(sources), []
    if sources[0].lower().endswith(".lst") and root is None and 2 * found.counts["unreadable"] > total:
        return ((f"steady check {here} --root FOLDER", "says where the paths of the list start from"),)
    if _any(found, *_IMAGES, "unreadable"):
        told += [("mend or remove what cannot be used", "packing leaves it out and names it on the card")]
    if found.counts["too-many-bad"] and bad < total and not found.counts["refused"]:
        given = "".join(
            f" {name} {shlex.quote(str(at))}" for name, at in (("--root", root), ("--labels", labels)) if at
        )
        told += [(f"steady pack {here} {_name(sources)}{given} --max-bad {bad}", "packs the rest all the same")]
    if found.counts["conflicting-labels"]:
        told += [("keep each image in one class", "a model is scored on both")]
    if found.counts["leak"]:
        told += [("keep each image in one split", "accuracy is then told on images never seen")]
    if found.counts["name-clash"]:
        told += [("rename one of each pair", "a copy to macOS or Windows would lose the other")]
    return tuple(told)


def _name(sources: Sequence[str]) -> str:
    """What to call the record file of a source, as a shell takes it."""
    path = Path(sources[0])
    name = path.name.partition(".")[0] if path.is_file() else path.resolve().name if path.is_dir() else ""
    return shlex.quote(name if name and len(sources) == 1 else "packed")


def _any(found: Findings, *kinds: str) -> bool:
    return any(found.counts[kind] for kind in kinds)
