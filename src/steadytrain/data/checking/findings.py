"""Kinds of faults in data, each with a name, a severity and what becomes of it; findings, reports, remedies.

An **error** is something that is lost or refused, a **warning** something that will spoil a result unless it is meant,
a **note** something that a rule takes care of.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from steadytrain.data.images.file_types import PACK_IMAGES

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

FEW_TO_MEASURE = 20
"""Validation images below which top-1 says little: its 95 % interval is up to 44 points wide (2 * 0.98 / sqrt(20))."""


class FindingKind(NamedTuple):
    """A kind of finding; ``then`` says what becomes of it, ``packed`` the same where a folder is packed."""

    severity: Severity
    title: str
    then: str
    packed: str = ""


_REPLACED = "training uses another image instead, evaluation refuses it"
_LEFT_OUT = "left out when packed"
_LOST = "these records are lost; a reader stops there"
_REFUSED = "the file is refused"

_TABLE: dict[str, tuple[Severity, str, str] | tuple[Severity, str, str, str]] = {
    # what the whole is
    "other-file": ("error", "not a record file", "training and packing refuse it"),
    "not-images": ("error", "records that are no image records", "training refuses them"),
    "label-vectors": ("warning", "label vectors", "training refuses them: each label must be 0 or 1"),
    "refused": ("error", "packing refuses this", "nothing is packed"),
    "changing": ("error", "the file is changing while it is read", "this report may be wrong: wait, then check again"),
    # framing
    "cut-short": ("error", "the last record is cut short", "a reader refuses the file, or misses the record"),
    "damaged-frame": ("error", "bytes that are no whole record", _LOST),
    # headers
    "no-header": ("error", "records too short for their header and labels", _REFUSED),
    "label-not-class": ("error", "labels that are not class numbers", "they are read as label vectors and refused"),
    "label-width": ("error", "records with a different number of labels", _REFUSED),
    "same-id": ("warning", "ids of several records", "readers by key find only one of them"),
    # images
    "no-image": ("error", "not an image", _REPLACED, _LEFT_OUT),
    "no-picture": ("note", "labels without a picture", "skipped; in sets of faces they are about identities"),
    "damaged-image": ("error", "images that cannot be decoded", _REPLACED, _LEFT_OUT),
    "truncated-image": ("error", "images that are cut short", _REPLACED, _LEFT_OUT),
    "unusable-image": ("error", "images of an unsupported kind or size", _REPLACED, _LEFT_OUT),
    "unreadable": ("error", "files that cannot be read", _LEFT_OUT),
    "too-many-bad": ("error", "too many images cannot be used", "packing fails, unless --max-bad allows them"),
    # odd traits
    "cmyk": ("note", "CMYK or YCCK", "becomes RGB, colour profiles ignored"),
    "palette": ("note", "palette", "becomes RGB"),
    "one-bit": ("note", "1 bit a pixel", "becomes grey, 0 or 255"),
    "sixteen-bit": ("note", "more than 8 bits a channel", "the upper 8 bits, of 16 or of those stated"),
    "bands": ("warning", "bands beside colour and declared transparency", "dropped"),
    "few-levels": ("warning", "images of 16 bits that use few of them", "nearly black, in few levels"),
    "transparency": ("note", "transparency", "composited over white"),
    "other-colours": ("note", "Lab, HSV or YCbCr", "becomes RGB"),
    "frames": ("note", "several frames", "the first frame is used"),
    "rare-jpeg": ("note", "lossless or arithmetic JPEG", "decoded by Pillow: slow; other readers may refuse it"),
    "odd-jpeg": (
        "note",
        "JPEG with odd markers, stray bytes or no end",
        "decoded completely; encoded again when packed",
    ),
    "long": ("note", "more than 20 times as long as wide", "a square crop shows little of it"),
    "wide": ("note", "images mostly longer than 2:1", "training squashes them to squares: --fit pad keeps proportions"),
    "cropped": ("note", "much of the images lies outside of centre squares", "--fit squash or pad shows all of them"),
    "orientation": ("note", "EXIF or XMP orientation not upright", "rotated upright when packed"),
    "lies-on-its-side": (
        "warning",
        "EXIF or XMP orientation not upright",
        "readers of records do not rotate it: pack again",
    ),
    # the index
    "index-missing": ("note", "no index, or an empty one", "the records are found by scanning; MXNet cannot shuffle"),
    "index-wrong": (
        "error",
        "the index cannot be read, or does not fit",
        "training refuses the file; MXNet misses records",
    ),
    # the card
    "card-missing": ("note", "no card", "classes are named by their numbers"),
    "card-wrong": ("error", "the card cannot be read, or does not fit the records", _REFUSED),
    # the set
    "conflicting-labels": ("warning", "the same image in several classes", "no model can be right on all of them"),
    "leak": (
        "warning",
        "validation or test images that are also in the training set",
        "the measured accuracy is too high",
    ),
    "duplicate": ("note", "duplicate images", "they weigh more than others"),
    "suspect-label": (
        "warning",
        "labels that may be wrong, the likeliest first",
        "another class is likelier, with these probabilities: look at each",
    ),
    "near-conflict": ("warning", "images of several classes that look the same", "look at them: which class is right?"),
    "near-leak": (
        "warning",
        "validation or test images that look like training images",
        "the measured accuracy is too high",
    ),
    "near-duplicate": ("note", "images that look like another", "they weigh more than others"),
    "one-class": ("warning", "only one class", "training refuses it: a classifier needs two"),
    "empty-class": ("error", "classes without images", "packing refuses the training set"),
    "unused-class": ("warning", "classes without a record", "a model cannot learn them, or be measured on them"),
    "single-image": (
        "warning",
        "classes with one image",
        "never held out, so not measured: add images, or give --val DATA",
    ),
    "small-class": ("warning", "classes with fewer than 10 images", "too few to learn from, or to measure on"),
    "imbalance": ("note", "classes of very different sizes", "training rarely sees the small ones"),
    "class-only-val": ("error", "classes missing from the training set", "packing refuses them"),
    "class-only-train": ("warning", "classes missing from the validation set", "their accuracy is not measured"),
    "unclassed": ("warning", "images outside of the class folders", "skipped when packed"),
    "passed-over": ("note", "files without an image suffix", "skipped when packed"),
    "beside": ("note", "folders that are no classes, by their names", "not read"),
}
KINDS = {kind: FindingKind(*row) for kind, row in _TABLE.items()}


def few_to_measure(num_images: int) -> str:
    """Say what so few validation images can measure; empty where they are enough.

    >>> few_to_measure(2), few_to_measure(300)
    ('one image is 50 points of top-1', '')
    """
    return f"one image is {100 / num_images:.0f} points of top-1" if 0 < num_images < FEW_TO_MEASURE else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Args:
        kind: a key of :data:`KINDS`.
        offset, record, id: byte of the record file, number of the record from 0, and the id in its header.
        name: of a file or a class; of a record that of the file it was made of, where a list says so.
    """

    kind: str
    detail: str = ""
    offset: int | None = None
    record: int | None = None
    id: int | None = None
    name: str | None = None

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind].severity

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is not known."""
        known = {"kind": self.kind, "severity": self.severity}
        optional = {name: getattr(self, name) for name in ("offset", "record", "id", "name", "detail")}
        return known | {name: value for name, value in optional.items() if value not in (None, "")}


class Findings:
    """Findings so far: the first ``most`` of each kind (None: all), and the number of all.

    >>> findings = Findings(most=1)
    >>> findings.add("cmyk", record=3)
    >>> findings.add("cmyk", record=4)
    >>> findings.counts["cmyk"], findings.of("cmyk")[0].record, len(findings.of("cmyk"))
    (2, 3, 1)
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.counts: Counter[str] = Counter()
        self._kept: dict[str, list[Finding]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, detail: str = "", **place: Any) -> None:
        """Add one; ``place`` is what is known of ``offset``, ``record``, ``id`` and ``name``."""
        self.counts[kind] += 1
        findings = self._kept[kind]
        if self.most is None or len(findings) < self.most:
            findings.append(Finding(kind, detail, **place))

    def drop(self, *kinds: str) -> None:
        """Forget those of some kinds, for which another one stands."""
        for kind in kinds:
            self._kept[kind] = []
            del self.counts[kind]

    def name_records(self, name: Callable[[int], str]) -> None:
        """Name the file of each record that was kept, where ``name`` knows it."""
        for findings in self._kept.values():
            for place, finding in enumerate(findings):
                if finding.record is not None and not finding.name:
                    findings[place] = replace(finding, name=name(finding.record) or None)

    def of(self, kind: str) -> list[Finding]:
        """Return the findings of one kind that were kept."""
        return self._kept[kind]

    def has(self, *kinds: str) -> bool:
        """Return whether there is a finding of any of these kinds."""
        return any(self.counts[kind] for kind in kinds)

    def num(self, severity: Severity) -> int:
        """Count the findings of a severity."""
        return sum(count for kind, count in self.counts.items() if KINDS[kind].severity == severity)

    def num_kinds(self, severity: Severity) -> int:
        """Count the kinds of a severity that were found at least once."""
        return sum(count > 0 and KINDS[kind].severity == severity for kind, count in self.counts.items())

    def by_kind(self) -> list[tuple[str, int, list[Finding]]]:
        """Kind, number and what was kept of it: errors first, else in the order of :data:`KINDS`."""
        order = sorted(self.counts, key=lambda kind: (SEVERITIES.index(KINDS[kind].severity), list(KINDS).index(kind)))
        return [(kind, self.counts[kind], self._kept[kind]) for kind in order]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of an examination.

    Args:
        what: it is, in a few words: "image records", "a folder of classes", "a tar archive".
        of_files: it is images before they are packed, not records.
        num_images: records or files looked at.
        num_sound: those of them that can be used.
        bytes: of the record file, or of all files.
        classes: images of each class, or with each label, by name; empty for what has none.
        is_multi_label: an image may have several of them.
        split: in which these are counted, where there are several.
        width, height: smallest and largest, in pixels, upright; None where nothing was decoded.
        facts: lines for people.
        remarks: others, which were printed already while it was examined.
    """

    path: str
    what: str
    findings: Findings
    of_files: bool = False
    num_images: int = 0
    num_sound: int = 0
    bytes: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    is_multi_label: bool = False
    split: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    width: tuple[int, int] | None = None
    height: tuple[int, int] | None = None
    facts: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    remedies: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def is_usable(self) -> bool:
        """Return whether there is no error."""
        return not self.findings.num("error")

    @property
    def is_fine(self) -> bool:
        """Return whether there is neither an error nor a warning."""
        return self.is_usable and not self.findings.num("warning")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON document."""
        values = {name: getattr(self, name) for name in ("path", "what", "bytes", "classes", "split", "formats")}
        return {
            **values,
            "n": self.num_images,
            "sound": self.num_sound,
            "usable": self.is_usable,
            "fine": self.is_fine,
            **{f"{severity}s": self.findings.num(severity) for severity in SEVERITIES},
            "width": self.width,
            "height": self.height,
            "counts": {kind: count for kind, count, _ in self.findings.by_kind()},
            "findings": [finding.to_dict() for _, _, findings in self.findings.by_kind() for finding in findings],
            "facts": [*self.facts, *self.remarks],
            "remedies": [{"do": do, "why": why} for do, why in self.remedies],
            "seconds": self.seconds,
        }


Remedies = tuple[tuple[str, str], ...]  # commands and advice, each with what it is good for

IMAGE_FAULTS = ("no-image", "damaged-image", "truncated-image", "unusable-image")

_LEAK = "accuracy is then measured on unseen images"
_FRAMING = ("cut-short", "damaged-frame")
_RECORDS = ("no-header", "label-not-class", "label-width")


def remedies_for_records(path: Path, findings: Findings, *, num_sound: int) -> Remedies:
    """Remedies for a record file of which ``num_sound`` records can be used."""
    has, file = findings.has, shlex.quote(str(path))
    lost = has(*_FRAMING, *_RECORDS, *IMAGE_FAULTS)
    is_writable = os.access(path.parent, os.W_OK)
    out = path.with_name(f"{path.stem}-salvaged") if is_writable else Path(f"{path.stem}-salvaged")
    index = "writes the index" if has("index-missing") else "writes the index again"
    remedies = (
        (has(*_FRAMING), "fetch or copy it again, if there is a whole one", "nothing is lost then"),
        (has("not-images"), PACK_IMAGES, "these records hold none"),
        (
            lost and num_sound and not has("not-images"),
            f"steady check {file} --salvage {shlex.quote(str(out))}",
            f"writes the {num_sound:,} sound record{'s' * (num_sound != 1)} to a new file",
        ),
        (
            has("index-missing", "index-wrong") and num_sound and not has("not-images"),
            f"steady check {file} --index",
            index if is_writable else f"{index}; its folder must be writable",
        ),
        (
            has("card-wrong") and not lost,
            f"fetch {path.stem}.rec and .json again, or pack again",
            "the card is that of other records, or a byte has changed",
        ),
        (
            has("label-vectors"),
            "pack the images in a folder for each class, or from a list of one class or of a 0 or 1 for each label",
            "to classify them",
        ),
        (has("lies-on-its-side"), "pack the images again (not with --encoding pass)", "turns them upright"),
        (
            has("conflicting-labels"),
            "give each image one label, and pack again",
            "any model is wrong on one of the two",
        ),
        (has("leak"), "take them out of one of the two, and pack again", _LEAK),
        *_remedies_for_copies(findings, ", and pack again"),
    )
    return tuple((do, why) for applies, do, why in remedies if applies)


def _remedies_for_copies(findings: Findings, then: str = "") -> list[tuple[bool, str, str]]:
    """List remedies for images that look alike; ``then``: what has to be done afterwards."""
    advice = {
        "near-conflict": (
            "look at the pairs, and give all copies of an image one class",
            "any model is wrong on some of them",
        ),
        "near-leak": ("look at the pairs, and keep all copies of an image in one split", _LEAK),
        "near-duplicate": ("look at the pairs, and remove copies that add nothing", "each of them counts in training"),
    }
    return [(findings.has(kind), f"{do}{then}", why) for kind, (do, why) in advice.items()]


def remedies_for_source(
    sources: Sequence[str],
    findings: Findings,
    *,
    total: int,
    bad: int,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    columns: Sequence[tuple[str, str]] = (),
) -> Remedies:
    """Remedies for a folder or other sources of ``total`` images, of which ``bad`` cannot be used.

    ``root`` and ``labels`` are those that were given with the sources, ``columns`` the options for a table's columns.
    """
    has, source = findings.has, shlex.join(sources)
    if sources[0].lower().endswith(".lst") and root is None and 2 * findings.counts["unreadable"] > total:
        return ((f"steady check {source} --root FOLDER", "says where the paths of the list start from"),)
    path, name = Path(sources[0]), "packed"
    if len(sources) == 1 and os.path.exists(path):  # noqa: PTH110 - a pattern of many names may be too long for one
        name = (path.name.partition(".")[0] if path.is_file() else path.resolve().name) or name
    them = "it" if bad == 1 else "them"
    places = (("--root", root), ("--labels", labels), *columns)
    options = "".join(f" {option} {shlex.quote(str(place))}" for option, place in places if place)
    remedies = (
        (
            has(*IMAGE_FAULTS, "unreadable"),
            "fix or remove the files that cannot be used",
            f"packing leaves {them} out and names {them} on the card",
        ),
        (
            has("too-many-bad") and bad < total and not has("refused"),
            f"steady pack {source} {shlex.quote(name)}{options} --max-bad {bad}",
            "packs the rest",
        ),
        (has("conflicting-labels"), "keep each image in one class", "any model is wrong on one of the two"),
        (has("leak"), "keep each image in one split", _LEAK),
        *_remedies_for_copies(findings),
    )
    return tuple((do, why) for applies, do, why in remedies if applies)
