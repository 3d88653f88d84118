"""Confusions of a run, from its prediction for each image: by class, as a matrix, and with the pictures.

The pictures are read from the record file that the run was evaluated on, if it still lies where it was.
"""

from __future__ import annotations

import base64
import heapq
import io
import json
import math
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steadytrain.errors import DataError, SteadyError
from steadytrain.events import top1_95
from steadytrain.format import count, number, percent
from steadytrain.intervals import wilson
from steadytrain.monitor.series import six_digits, thin
from steadytrain.reports.summary import Account

if TYPE_CHECKING:
    from PIL import Image

    from steadytrain.data.recordio.reader import Records
    from steadytrain.data.results.predictions import ImageResult

MATRIX_CLASSES = 20
LISTED_CLASSES = 12
MOST_CLASSES = 1000
PAIRS, PICTURES_PER_PAIR, WORST = 12, 3, 24
PHOTOGRAPH_PIXELS, PHOTOGRAPH_BYTES = (480, 360, 256, 160, 112), 2_500_000
"""Sides of the photographs of a page: the largest at which all of them, as text in it, take no more bytes than that."""
SMALL_PIXELS, NEAR_PIXELS, SUSPECT_PIXELS = 184, 112, 200
THRESHOLD = 0.5
"""The probability of a label above which it is predicted."""
RUNS_WITH_PICTURES = 6
"""The most runs of a report that show pictures; they share the bytes."""
LEAST_IMAGES, LEAST_COVERAGE = 10, 0.05
"""The number of images below which the share of right ones is not measured, and their share of all in a curve."""

PairCounts = Mapping[tuple[str, str], int]
"""Images by true and predicted class."""


@dataclass(frozen=True)
class Mistakes:
    """Counts of a run's predictions, and the wrong ones that are shown.

    ``classes``: in the data's order. ``examples``: the surest predictions of each of the most confused pairs.
    ``worst``: wrong predictions with the highest loss. ``coverage``: shares of images, the surest first, and
    the share of these that is right. ``chance``: the calibration error, and what chance alone shows.
    """

    classes: tuple[str, ...]
    counts: PairCounts
    examples: Mapping[tuple[str, str], Sequence[ImageResult]]
    worst: Sequence[ImageResult]
    chance: str = ""
    coverage: tuple[list[float], list[float]] = ([], [])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The most confused pairs of true and predicted class, the most frequent first."""
        return list(self.examples)


def read_mistakes(account: Account) -> Mistakes:
    """Read a run's ``predictions.csv``; it is read twice, so that memory holds only what is shown.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    from steadytrain.data.results.predictions import read_predictions

    path = account.run.predictions
    counts: Counter[tuple[str, str]] = Counter()
    p, right = array("d"), array("b")
    for row in read_predictions(path):
        counts[row.true, row.predicted] += 1
        p.append(row.p_predicted)
        right.append(row.true == row.predicted)
    named = account.history.started.data.get("classes") if account.history.started else None
    names = [str(name) for name in named] if isinstance(named, list) else []
    classes = dict.fromkeys([*names, *(name for pair in sorted(counts) for name in pair)])
    wrong = [pair for pair in counts if pair[0] != pair[1]]
    pairs = heapq.nsmallest(PAIRS, wrong, key=lambda pair: (-counts[pair], pair))
    surest: dict[tuple[str, str], list[ImageResult]] = {pair: [] for pair in pairs}
    worst: list[tuple[float, int, ImageResult]] = []
    for order, row in enumerate(read_predictions(path)):
        if row.true == row.predicted:
            continue
        heapq.heappush(worst, (row.loss if math.isfinite(row.loss) else -1.0, -order, row))
        if len(worst) > WORST:
            heapq.heappop(worst)
        if (examples := surest.get((row.true, row.predicted))) is not None:
            examples.append(row)
            examples.sort(key=lambda other: -other.p_predicted)
            del examples[PICTURES_PER_PAIR:]
    shown = [row for *_, row in sorted(worst, reverse=True)]
    return Mistakes(tuple(classes), counts, surest, shown, _chance_words(p, right), _coverage(p, right))


def _coverage(p: array[float], right: array[int]) -> tuple[list[float], list[float]]:
    """Return shares of images, the surest first, and the share of these that is right, as many as a chart draws."""
    import numpy as np

    from steadytrain.data.results.scores import coverage_curve

    _, n, num_right = coverage_curve(np.array(p), np.array(right, np.bool_))
    is_enough = n >= max(LEAST_IMAGES, LEAST_COVERAGE * len(p))
    n, num_right = n[is_enough], num_right[is_enough]
    values = [six_digits(value) for value in (num_right / n).tolist()]
    return [round(n[i] / len(p), 4) for i in thin(values)], [values[i] or 0.0 for i in thin(values)]


def _chance_words(p: array[float], right: array[int]) -> str:
    """Word the calibration error of predictions beside what chance alone shows; empty where it is not known."""
    import numpy as np

    from steadytrain.data.results.scores import calibration_of, chance_words

    calibrated = calibration_of(np.array(p), np.array(right) > 0)
    if math.isnan(calibrated.ece):
        return ""
    return f"ECE {percent(calibrated.ece, 1)}; {chance_words(calibrated.chance, calibrated.chance_high, len(p))}"


def mistakes_section(account: Account, *, most_bytes: int = PHOTOGRAPH_BYTES) -> dict[str, Any]:
    """Format a run's confusions, with photographs of so many bytes; ``why``: the reason if there is nothing to show."""
    if account.summary.log:
        return {"why": "A log of another program holds no predictions of single images.", "command": ""}
    if not account.summary.setup.num_val:
        return {"why": "The run has no validation images.", "command": ""}
    path = account.run.predictions
    command = f"steady evaluate {shlex.quote(str(account.run.directory))} --per-image {shlex.quote(str(path))}"
    if not path.exists():
        if account.summary.course.status == "running":
            return {"why": "A run writes predictions.csv at its first evaluation.", "command": ""}
        why = "This run has no predictions.csv, which older versions did not write."
        return {"why": why, "command": command}
    try:
        if account.summary.quality.is_multi_label:
            figures = _label_figures(account)
            intro = f"A label is predicted above a probability of {percent(THRESHOLD)}. From {path.name}."
            return {"why": "", "intro": intro, "labels": label_rows(figures)[:MOST_CLASSES]}
        mistakes = read_mistakes(account)
    except DataError as error:
        return {"why": f"{error}.", "command": command}
    if not mistakes.counts:
        return {"why": f"{path} holds no predictions.", "command": ""}
    with ExitStack() as stack:
        records, no_pictures, near = None, "", _Nearest()
        if not most_bytes:
            no_pictures = f"Pictures are shown of the first {RUNS_WITH_PICTURES} runs of a report."
        else:
            try:
                records = stack.enter_context(open_pictures(account, "val"))
                near = _nearest_images(account, stack)
            except SteadyError as error:
                no_pictures = f"The pictures are not shown: {error}."
        shown = dict.fromkeys([*mistakes.worst, *(row for rows in mistakes.examples.values() for row in rows)])
        images = {} if records is None else _decode_all(shown, records)
        large, small = _addresses(images, most_bytes), {row: _data_address(images[row], SMALL_PIXELS) for row in images}

        def picture(row: ImageResult, *, is_small: bool = False) -> dict[str, Any]:
            """Format a prediction; of one that is shown twice the smaller picture has nothing beside it."""
            source = (small if is_small else large).get(row, "")
            return _picture(row, source, None if is_small else records, near)

        rows = class_rows(_class_figures(mistakes)[:MOST_CLASSES], image_worth(account))
        return {
            "why": "",
            "intro": _intro(mistakes, account),
            "wrong": _wrong(mistakes),
            "classes": rows,
            "few": f"In italics: fewer than {LEAST_IMAGES} images, too few to measure."
            * any(row["few"] for row in rows),
            "listed": LISTED_CLASSES,
            "more_classes": max(0, len(mistakes.classes) - MOST_CLASSES),
            "matrix": _matrix(mistakes),
            "coverage": mistakes.coverage,
            "pairs": [_pair(mistakes, pair, picture) for pair in mistakes.pairs],
            "worst": [picture(row) for row in mistakes.worst],
            "meaning": near.meaning,
            "no_pictures": no_pictures,
        }


@dataclass(frozen=True)
class _Nearest:
    """Training images that are nearest to validation images, by the numbers of their records, and their heat maps."""

    by_record: Mapping[str, Sequence[int]] = field(default_factory=dict)
    records: Records | None = None
    maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    meaning: str = ""


def _nearest_images(account: Account, stack: ExitStack) -> _Nearest:
    """Open the nearest training images and heat maps of mistakes, if the run's end or ``--limits`` has made any."""
    path, maps = account.run.directory / "best.limits.safetensors", _Nearest()
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(account.run.maps.read_text(encoding="utf-8"))
        maps = _Nearest(maps=dict(document["records"]), meaning=str(document["meaning"]))
    try:
        with path.open("rb") as file:  # its header is JSON, so a page is made without torch
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        by_record = json.loads(header["__metadata__"]["steadytrain"])["neighbours"]
        return replace(maps, by_record=dict(by_record), records=stack.enter_context(open_pictures(account, "train")))
    except (OSError, ValueError, KeyError, TypeError, SteadyError):
        return maps


def open_pictures(account: Account, part: Literal["train", "val"]) -> Records:
    """Open the records that a run was evaluated or trained on, from wherever the report is made.

    Raises:
        DataError: they are gone, or others.
    """
    from steadytrain.data.recordio.card import record_files
    from steadytrain.data.recordio.reader import Records

    data, recipe = account.history.started.data if account.history.started else {}, account.run.recipe.data
    place = account.run.locate(str(data.get(part)))
    named = str((recipe.val if part == "val" else None) or recipe.train)
    if place.name != Path(named).name and not record_files(place)[0].exists():
        raise DataError(f"the packed copy of {named} is not in the cache any more")
    records = Records.open(place)
    if records.card is not None and records.digest != data.get(f"{part}_digest"):
        records.close()
        done = "evaluated" if part == "val" else "trained"
        raise DataError(f"{data.get(part)} is not the file any more that the run was {done} on")
    return records


def _wrong(mistakes: Mistakes) -> str:
    """Say how many predictions are wrong, and which of them are shown."""
    images, num_wrong = sum(mistakes.counts.values()), sum(n for (a, b), n in mistakes.counts.items() if a != b)
    few = f" Here are the {len(mistakes.worst)} with the least probability for their label."
    return f"Wrong: {num_wrong:,} of {count(images, 'validation image')}.{few * (num_wrong > len(mistakes.worst))}"


def _intro(mistakes: Mistakes, account: Account) -> str:
    images = sum(mistakes.counts.values())
    right = sum(n for (true, predicted), n in mistakes.counts.items() if true == predicted)
    best = account.run.progress().best if account.run.log_path().exists() else None
    interval = wilson(right / images, images) if best is None or best.n != images else top1_95(best)
    words = f"{right:,} of {count(images, 'validation image')} are right: {percent(right / images, 1)}"
    words += f" ({percent(interval.low, 1)} to {percent(interval.high, 1)})"
    if best is not None and best.even_top1 is not None:
        words += f". Answered as if classes were equally frequent (--prior uniform): {percent(best.even_top1, 1)}"
        words += f"; macro recall {percent(best.even_macro_recall, 1)}"
    source = f"From {account.run.predictions.name} in the run's folder, which lists every image."
    unseen = account.history.started.model.get("unseen", 0.0) if account.history.started else 0.0
    never = f"{percent(unseen)} of their pixels are never seen" * (round(unseen, 2) > 0)
    return ". ".join(filter(None, (words, never, mistakes.chance, source)))


def class_figures(account: Account) -> list[dict[str, Any]]:
    """Return the accuracy of each class that has images, the least accurate first; nothing without predictions.

    ``class``, its images ``n``, those that are ``right``, ``top1`` as a fraction, the class that it is most often
    ``taken_for`` (None: never) and how often (``taken``).

    Where images may have several labels: each ``label``, the images ``n`` that have it, for which it is ``predicted``
    and for which rightly so (``right``), ``ap``, ``precision``, ``recall`` and ``f1``; the lowest ``ap`` first.
    """
    try:
        if not account.run.predictions.exists():
            return []
        if account.summary.quality.is_multi_label:
            return _label_figures(account)
        return _class_figures(read_mistakes(account))
    except DataError:
        return []


def _label_figures(account: Account) -> list[dict[str, Any]]:
    from steadytrain.data.results.predictions import read_label_predictions
    from steadytrain.data.results.scores import label_scores

    names, has_label, probabilities = read_label_predictions(account.run.predictions)
    scores = label_scores(probabilities, probabilities > THRESHOLD, has_label)
    figures = [{"label": name, **vars(score)} for name, score in zip(names, scores, strict=True)]
    return sorted(figures, key=lambda row: (row["ap"] is None, row["ap"]))


def label_rows(figures: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Format the figures of labels, without those that no image has."""
    shares = ("ap", "precision", "recall", "f1")
    return [
        {
            "name": row["label"],
            "images": f"{row['n']:,}",
            "predicted": f"{row['predicted']:,}",
            "right": f"{row['right']:,}",
            **{share: percent(row[share], 1) for share in shares},
            "width": f"{100 * row['ap']:.1f}%",
        }
        for row in figures
        if row["n"]
    ]


def _class_figures(mistakes: Mistakes) -> list[dict[str, Any]]:
    total: Counter[str] = Counter()
    wrong: dict[str, tuple[int, str]] = {}
    for (true, predicted), n in mistakes.counts.items():
        total[true] += n
        if true != predicted:
            wrong[true] = max(wrong.get(true, (0, "")), (n, predicted))
    figures = []
    for name in (name for name in mistakes.classes if total[name]):
        right, (n, other) = mistakes.counts.get((name, name), 0), wrong.get(name, (0, None))
        top1 = right / total[name]
        figures.append({"class": name, "n": total[name], "right": right, "top1": top1, "taken_for": other, "taken": n})
    return sorted(figures, key=lambda row: row["top1"])


def image_worth(account: Account) -> float:
    """Return how many independent images each validation image is worth: less than 1 where these are in groups."""
    best = account.summary.quality.best
    return 1.0 if best is None or not best.n else (best.effective_n or best.n) / best.n


def class_rows(figures: Iterable[Mapping[str, Any]], worth: float = 1.0) -> list[dict[str, str]]:
    """Format the figures of :func:`class_figures`; each image is ``worth`` so many independent ones."""
    rows = []
    for row in figures:
        interval = wilson(row["top1"], worth * row["n"])
        rows.append(
            {
                "name": row["class"],
                "images": number(row["n"]),
                "right": number(row["right"]),
                "top1": percent(row["top1"], 1),
                "interval": f"{100 * interval.low:.1f} to {100 * interval.high:.1f}",
                "few": "too few to measure" * (row["n"] < LEAST_IMAGES),
                "width": f"{100 * row['top1']:.1f}%",
                "other": f"{row['taken_for']} ({row['taken']:,})" if row["taken_for"] else "",
            }
        )
    return rows


def _matrix(mistakes: Mistakes) -> dict[str, Any]:
    """Format the confusion matrix; of many classes only those that are confused most often."""
    totals: Counter[str] = Counter()
    for (true, _), n in mistakes.counts.items():
        totals[true] += n
    chosen = set(mistakes.classes)
    if len(chosen) > MATRIX_CLASSES:
        wrong = [pair for pair in mistakes.counts if pair[0] != pair[1]]
        most_confused = heapq.nsmallest(MATRIX_CLASSES, wrong, key=lambda pair: (-mistakes.counts[pair], pair))
        names_in_turn = dict.fromkeys([*(name for pair in most_confused for name in pair), *mistakes.classes])
        chosen = set(list(names_in_turn)[:MATRIX_CLASSES])
    names = [name for name in mistakes.classes if name in chosen]
    is_part = len(names) < len(mistakes.classes)
    others: Counter[str] = Counter()
    for (true, predicted), n in mistakes.counts.items():
        others[true] += n if predicted not in chosen else 0

    def cell(true: str, predicted: str, n: int) -> dict[str, Any]:
        share = n / totals[true] if totals[true] else 0.0
        verb = "are right" if true == predicted else f"are taken for {predicted}"
        title = f"{n:,} of {totals[true]:,} {true} {verb} ({percent(share)})"
        return {"n": number(n) if n else "", "title": title, "share": round(55 * share), "is_right": true == predicted}

    rows = [[cell(true, name, mistakes.counts.get((true, name), 0)) for name in names] for true in names]
    if is_part:
        for true, row in zip(names, rows, strict=True):
            row.append(cell(true, "a class that is not shown", others[true]))
    note = f"{len(names)} of {len(mistakes.classes):,} classes, those of the most confused pairs. " if is_part else ""
    return {
        "names": names,
        "heads": [*names, *(["others"] if is_part else [])],
        "rows": list(zip(names, rows, strict=True)),
        "note": f"{note}A row is a true class, a column what it was predicted as; the shade is the share of the row.",
    }


def _pair(mistakes: Mistakes, pair: tuple[str, str], picture: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Format a confused pair; a click on one of its pictures that is among the worst opens that one."""
    true, predicted = pair
    total = sum(n for (name, _), n in mistakes.counts.items() if name == true)
    n = mistakes.counts[pair]
    back = mistakes.counts.get((predicted, true), 0)
    return {
        "true": true,
        "predicted": predicted,
        "words": f"{n:,} of {total:,} ({percent(n / total)}); the other way round {back:,}",
        "pictures": [picture(row, is_small=row in mistakes.worst) for row in mistakes.examples[pair]],
    }


def _picture(row: ImageResult, source: str, records: Records | None, near: _Nearest) -> dict[str, Any]:
    name = row.file or f"record {row.record} of {row.shard}"
    return {
        "key": f"{row.shard}:{row.record}",
        "source": source,
        "near": [] if records is None else _near_thumbnails(row, records, near),
        "map": "" if records is None else _map_of(row, records, near),
        "alt": f"{name}: {row.true}, predicted as {row.predicted}",
        "name": name,
        "true": row.true,
        "predicted": row.predicted,
        "p": _probability(row.p_predicted),
        "p_true": _probability(row.p_true),
        "rank": row.rank,
    }


def _probability(p: float) -> str:
    if p < 0.0005 or p >= 0.9995:
        return "< 0.1 %" if p < 0.5 else "> 99.9 %"
    return percent(p, 1 if p > 0.9905 else None)


def _decode_all(rows: Iterable[ImageResult], records: Records) -> dict[ImageResult, Image.Image]:
    """Decode the images of predictions, without those whose record is another by now or cannot be read."""
    images = {}
    for row in rows:
        with suppress(IndexError, SteadyError):
            at = records.number(row.shard, row.record)
            if records.classes[int(records.labels[at])] == row.true:
                images[row] = _decode(records, at, PHOTOGRAPH_PIXELS[0])
    return images


def _addresses(images: Mapping[ImageResult, Image.Image], most_bytes: int) -> dict[ImageResult, str]:
    """Return images as JPEGs in data addresses, as large as the bytes allow for all of them."""
    for side in PHOTOGRAPH_PIXELS:
        addresses = {row: _data_address(image, side) for row, image in images.items()}
        if sum(map(len, addresses.values())) <= most_bytes:
            break
    return addresses


def _map_of(row: ImageResult, records: Records, near: _Nearest) -> str:
    """Return the picture of what spoke for the predicted class; nothing where there is none of this prediction."""
    try:
        drawn = near.maps[str(records.number(row.shard, row.record))]
        return drawn["source"] if drawn["class"] == row.predicted else ""
    except (IndexError, KeyError, TypeError):
        return ""


def _near_thumbnails(row: ImageResult, records: Records, near: _Nearest) -> list[dict[str, str]]:
    """Return small pictures of the training images that are nearest to one, with their classes."""
    try:
        numbers = near.by_record.get(str(records.number(row.shard, row.record)), ())
        if near.records is None:
            return []
        names = [near.records.classes[int(near.records.labels[at])] for at in numbers]
        sources = [thumbnail(near.records, at, NEAR_PIXELS) for at in numbers]
    except (IndexError, SteadyError):
        return []
    return [{"name": name, "source": source} for name, source in zip(names, sources, strict=True) if source]


def thumbnail(records: Records, number: int, side: int) -> str:
    """Return a small JPEG of an image as a data address; nothing where it cannot be read."""
    try:
        return _data_address(_decode(records, number, side), side)
    except SteadyError:
        return ""


def _decode(records: Records, number: int, side: int) -> Image.Image:
    """Return an image that fits into a square. Raises SteadyError where it cannot be read."""
    from steadytrain.data.images.decode import BadImageError, decode

    try:
        image = decode(records.image(number))
    except BadImageError as error:
        raise DataError(str(error)) from error
    image.thumbnail((side, side))
    return image


def _data_address(image: Image.Image, side: int) -> str:
    """Return an image as a JPEG that fits into a square, as a data address."""
    image, buffer = image.copy(), io.BytesIO()
    image.thumbnail((side, side))
    image.save(buffer, "JPEG", quality=80, optimize=True, progressive=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class SuspectImage:
    """An image whose label may be wrong, and the nearest images that have its label and the suggested one.

    ``picture``, ``near_label``, ``near_suggested``: records and a number in them; None where there is none.
    """

    path: str
    label: str
    suggested: str
    p_label: float
    p_suggested: float
    picture: tuple[Records, int]
    near_label: tuple[Records, int] | None
    near_suggested: tuple[Records, int] | None


def suspect_rows(images: Iterable[SuspectImage]) -> list[dict[str, Any]]:
    """Format images whose label may be wrong, with the nearest images of both classes beside each."""
    rows = []
    for image in images:
        places = [
            (f"labelled {image.label}", image.picture),
            (f"nearest {image.label}", image.near_label),
            (f"nearest {image.suggested}", image.near_suggested),
        ]
        figures = [(words, "" if place is None else thumbnail(*place, SUSPECT_PIXELS)) for words, place in places]
        chances = {"label": _probability(image.p_label), "suggested": _probability(image.p_suggested)}
        rows.append({"image": image, "figures": figures, **chances})
    return rows


def sections(accounts: Sequence[Account]) -> list[dict[str, Any]]:
    """Format each run's confusions, with pictures of the first :data:`RUNS_WITH_PICTURES` that have any."""
    worded, left = [], RUNS_WITH_PICTURES
    share = PHOTOGRAPH_BYTES // max(1, min(len(accounts), RUNS_WITH_PICTURES))
    for account in accounts:
        section = mistakes_section(account, most_bytes=share if left > 0 else 0)
        left -= any(picture["source"] for picture in section.get("worst", ()))
        worded.append(section)
    return worded
