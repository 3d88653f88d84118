"""What a run confuses: counted from its predictions, with the pictures where the data still lie there."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from tests.reports.runs import Clock, course, finished, recipe, started, write

from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import HEAD, ImageResult
from steadytrain.reports.mistakes import (
    PHOTOGRAPH_BYTES,
    PHOTOGRAPH_PIXELS,
    _addresses,
    _probability,
    class_rows,
    mistakes_section,
    read_mistakes,
    sections,
)
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import markdown, to_json
from steadytrain.run import Run


def save(run: Run, rows: list[ImageResult]) -> None:
    lines = [",".join(map(str, row)) for row in rows]
    run.predictions.write_text("\n".join([HEAD, *lines]) + "\n")


def result(true: str, predicted: str, *, record: int = 0, p: float = 0.5, loss: float = 1.0) -> ImageResult:
    rank = 1 if true == predicted else 2
    return ImageResult("", "cifar10-val.rec", record, true, predicted, float(np.exp(-loss)), p, loss, rank)


def of_digits(folder: Path, digits: Path, *, digest: str = "") -> Account:
    """A run on the digits that takes every 3 for an 8, and knows all others."""
    run = Run.create(folder / "run", recipe())
    with Records.open(digits) as records:
        labels = records.labels.tolist()
        data = {"val": str(digits), "val_digest": digest or records.digest, "classes": list(records.classes)}
    begun = started()
    write(
        run, [replace(begun, data={**begun.data, **data, "num_val": 400}), *course(0, 20, total=20)], Clock(), end=True
    )
    rows = [
        ImageResult("", digits.name, i, str(label), "8" if label == 3 else str(label), 0.1, 0.9 - i / 1000, i / 100, 1)
        for i, label in enumerate(labels)
    ]
    save(run, rows)
    return Account.of(run)


def test_mistakes_are_counted_and_the_worst_come_first(tmp_path: Path) -> None:
    run = finished(tmp_path)
    rows = [result("cat", "dog", p=p, loss=3 * p) for p in (0.6, 0.9, 0.7, 0.8)]
    rows += [result("dog", "cat", loss=9.0), result("dog", "dog", loss=20.0), result("cat", "cat")]
    save(run, rows)
    mistakes = read_mistakes(Account.of(run))
    assert mistakes.counts == {("cat", "dog"): 4, ("dog", "cat"): 1, ("dog", "dog"): 1, ("cat", "cat"): 1}
    assert mistakes.pairs == [("cat", "dog"), ("dog", "cat")]
    assert [row.p_predicted for row in mistakes.examples["cat", "dog"]] == [0.9, 0.8, 0.7]
    assert [row.loss for row in mistakes.worst] == [9.0, *(pytest.approx(3 * p) for p in (0.9, 0.8, 0.7, 0.6))]
    section = mistakes_section(Account.of(run))
    assert section["intro"].startswith("2 of 7 validation images are right: 28.6 %")
    assert [(row["name"], row["top1"], row["other"]) for row in section["classes"]] == [
        ("cat", "20.0 %", "dog (4)"),
        ("dog", "50.0 %", "cat (1)"),
    ]
    assert section["pairs"][0]["words"] == "4 of 5 (80 %); the other way round 1"
    assert "| cat | 5 | 1 | 20.0 % | 3.6 to 62.4, too few to measure | dog (4) |" in markdown([Account.of(run)])
    text = page([Account.of(run)])
    assert text.count("In italics: fewer than 10 images, too few to measure.") == 1, "and not in each row"
    assert '<td class="few" title="too few to measure">3.6 to 62.4</td>' in text and "more pairs" not in text
    first = json.loads(to_json([Account.of(run)]))["runs"][0]["per_class"][0]
    assert first == {"class": "cat", "n": 5, "right": 1, "top1": 0.2, "taken_for": "dog", "taken": 4}


def test_accuracy_over_coverage_begins_where_the_images_are_enough(tmp_path: Path) -> None:
    run = finished(tmp_path)
    right = [result("cat", "cat", p=0.9 - i / 1000) for i in range(398)]
    save(run, [result("cat", "dog", p=0.99), *right, result("cat", "dog", p=0.1)])
    shares, accuracies = read_mistakes(Account.of(run)).coverage
    assert (shares[0], shares[-1]) == (0.05, 1.0), "not the one surest image, which is wrong"
    assert (accuracies[0], accuracies[-1]) == (0.95, 398 / 400)
    save(run, right[:40])
    assert read_mistakes(Account.of(run)).coverage[0][0] == 10 / 40
    save(run, right[:9])
    assert read_mistakes(Account.of(run)).coverage == ([], [])


def test_classes_of_few_images_are_named_as_too_few_to_measure() -> None:
    [few, enough] = class_rows(
        {"class": "cat", "n": n, "right": n, "top1": 1.0, "taken_for": None, "taken": 0} for n in (9, 10)
    )
    assert (few["interval"], few["few"]) == ("70.1 to 100.0", "too few to measure")
    assert (enough["interval"], enough["few"]) == ("72.2 to 100.0", "")


def test_what_evaluation_never_sees_is_told_beside_the_accuracy(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    begun = started()
    write(run, [replace(begun, model={**begun.model, "unseen": 0.59223}), *course(0, 20, total=20)], Clock(), end=True)
    save(run, [result("cat", "dog"), result("cat", "cat")])
    account = Account.of(run)
    assert ". 59 % of their pixels are never seen. " in mistakes_section(account)["intro"]
    assert "59 % of the pixels" in page([account]) and "0.59223" not in page([account])


def test_pictures_are_found_from_wherever_the_report_is_made(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in digits.parent.glob(f"{digits.stem}.*"):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    account = of_digits(tmp_path, Path(digits.name))
    monkeypatch.chdir("/")
    assert mistakes_section(account)["worst"][0]["source"].startswith("data:image/jpeg")


def test_the_page_shows_the_very_pictures_that_were_confused(tmp_path: Path, digits: Path) -> None:
    account = of_digits(tmp_path, digits)
    section = mistakes_section(account)
    assert section["no_pictures"] == "" and len(section["worst"]) == 24
    assert [(pair["true"], pair["predicted"]) for pair in section["pairs"]] == [("3", "8")]
    worst = section["worst"][0]
    with Records.open(digits) as records:
        number = int(np.flatnonzero(records.labels == 3)[-1])
        original = np.asarray(Image.open(io.BytesIO(records.image(number))), int)
    assert worst["alt"] == f"record {number} of {digits.name}: 3, predicted as 8"
    shown = Image.open(io.BytesIO(base64.b64decode(worst["source"].partition(",")[2])))
    assert np.abs(np.asarray(shown, int) - original).mean() < 12, "a JPEG of the same image"
    text = page([account])
    assert text.count('<img src="data:image/jpeg;base64,') == 24 + 3
    assert 'id="viewer"' in text and re.search(r"Wrong: [34]\d of 400 validation images. Here are the 24", text)
    assert 'title="' in text and re.search(r'<td title="\d+ of \d+ 3 are taken for 8 \(100 %\)" class="wrong"', text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gone", "there is no file"),
        ("copy", "the packed copy of cifar10-val.rec is not in the cache"),
        ("other", "is not the file any more that the run was evaluated on"),
    ],
)
def test_without_its_data_the_page_says_so_and_shows_the_rest(
    change: str, message: str, tmp_path: Path, digits: Path
) -> None:
    name = "data-val" if change == "copy" else "cifar10-val"
    for suffix in (".rec", ".idx", ".json"):
        shutil.copy(digits.with_suffix(suffix), tmp_path / f"{name}{suffix}")
    account = of_digits(tmp_path, tmp_path / f"{name}.rec", digest="of another" if change == "other" else "")
    if change in ("gone", "copy"):
        (tmp_path / f"{name}.rec").unlink()
    section = mistakes_section(account)
    assert section["no_pictures"].startswith("The pictures are not shown: ") and message in section["no_pictures"]
    assert len(section["classes"]) == 10 and not any(picture["source"] for picture in section["worst"])
    assert "<img" not in page([account])


def test_an_old_run_names_the_command_that_writes_its_predictions(tmp_path: Path) -> None:
    run = finished(tmp_path, "an old run")
    section = mistakes_section(Account.of(run))
    assert section["why"].startswith("This run has no predictions.csv")
    assert section["command"] == f"steady evaluate '{run.directory}' --per-image '{run.predictions}'"
    assert "steady evaluate" in page([Account.of(run)])


def test_a_damaged_file_costs_its_section_and_no_more(tmp_path: Path) -> None:
    run = finished(tmp_path)
    run.predictions.write_text(f"{HEAD}\nhalf a li")
    section = mistakes_section(Account.of(run))
    assert "line 2 of" in section["why"] and section["command"]


def test_of_a_thousand_classes_the_most_confused_are_shown_and_the_page_stays_small(tmp_path: Path) -> None:
    run = finished(tmp_path)
    draw = np.random.default_rng(0)
    true = draw.integers(0, 1000, 20_000)
    predicted = np.where(draw.random(20_000) < 0.7, true, draw.integers(0, 1000, 20_000))
    predicted[true == 17] = 23
    names = [f"class number {i}" for i in range(1000)]
    save(run, [result(names[i], names[k], record=n) for n, (i, k) in enumerate(zip(true, predicted, strict=True))])
    account = Account.of(run)
    section = mistakes_section(account)
    matrix = section["matrix"]
    assert len(matrix["names"]) == 20 and {names[17], names[23]} <= set(matrix["names"])
    assert matrix["note"].startswith("20 of 1,0")
    total = int((true == 17).sum())
    row = dict(matrix["rows"])[names[17]]
    assert [cell["n"] for cell in row if cell["n"]] == [str(total)] and len(row) == 21
    assert section["classes"][0]["name"] == names[17] and len(section["pairs"]) == 12
    text = page([account])
    assert len(text) < 3_500_000
    assert "<summary>6 more pairs</summary>" in text and text.count("<details") == text.count("</details>")


def test_many_runs_show_pictures_of_the_first_few(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.reports.mistakes.RUNS_WITH_PICTURES", 1)
    account = of_digits(tmp_path, digits)
    first, second = sections([account, account])
    assert first["worst"][0]["source"] and not second["worst"][0]["source"]
    assert "of the first 1 runs" in second["no_pictures"]


def test_photographs_become_smaller_where_they_would_weigh_too_much(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 600, 400, 3), np.uint8)
    images = {result("cat", "dog", record=i): Image.fromarray(noise) for i, noise in enumerate(pixels)}
    sides = []
    for most_bytes in (PHOTOGRAPH_BYTES, 300_000, 90_000):
        addresses = _addresses(images, most_bytes)
        assert sum(map(len, addresses.values())) <= most_bytes
        opened = [Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2]))) for text in addresses.values()]
        sides.append({max(image.size) for image in opened})
    assert sides[0] == {PHOTOGRAPH_PIXELS[0]} and sides == sorted(sides, key=max, reverse=True)
    assert [len(side) for side in sides] == [1, 1, 1] and sides[0] != sides[2]


def test_a_probability_is_rounded_to_neither_0_nor_100() -> None:
    words = [_probability(p) for p in (0.0, 0.0004, 0.004, 0.43, 0.99, 0.997, 0.9996, 1.0)]
    assert words == ["< 0.1 %", "< 0.1 %", "0.4 %", "43 %", "99 %", "99.7 %", "> 99.9 %", "> 99.9 %"]
