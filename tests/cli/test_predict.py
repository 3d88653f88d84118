"""``steady predict`` and ``steady evaluate`` as a person reads them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.data.packing.odd import GROUPS, TOO_LONG
from tests.data.packing.odd_files import banded

from steadytrain import ledger
from steadytrain.cli import main
from steadytrain.events import Accounted, Noticed
from steadytrain.run import Run
from steadytrain.training.inference.heat_maps import map_mistakes

NON_COMMERCIAL = "timm/convnextv2_atto.fcmae_ft_in1k"


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose best evaluation is hardly its last."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--model", "digits", "--epochs", "5", "--batch-size", "32", "--lr", "0.4", "--schedule", "constant"]
    assert main(["train", str(digits), *words, "--device", "cpu", "--set", "data.pad=1", "--run", str(folder)]) == 0
    return folder


def test_evaluate_prints_the_top1_that_the_runs_end_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def top1(*words: str, row: str) -> str:
        assert main([*words]) == 0
        match = re.search(rf"^{row} +(\S+ %)", capsys.readouterr().out, re.MULTILINE)
        assert match is not None
        return match[1]

    for which in ("best", "last"):
        score = top1("train", "--run", str(run), row=f"{which} top-1")
        assert top1("evaluate", str(run), "--weights", which, row="top-1") == score
    assert top1("evaluate", str(run), row="top-1") == top1("train", "--run", str(run), row="best top-1")
    assert main(["evaluate", str(run)]) == 0
    assert "best.safetensors (best by validation top-1 and loss, epoch " in capsys.readouterr().out.splitlines()[0]


def test_a_run_without_images_is_not_taken_for_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert "runs/a stands alone" in said and "steady predict RUN IMAGE..." in said and "RUN runs/a" not in said


def test_an_evaluation_has_scores_for_each_class_within_80_columns(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run)]) == 0
    out = capsys.readouterr().out
    head, *rows = out[out.index("class ") :].splitlines()
    assert head.split() == ["class", "n", "right", "recall", "precision", "F1"] and len(rows) == 10
    assert all(len(row) == len(head) <= 80 for row in rows)
    assert main(["evaluate", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert f"F1 {100 * document['macro_f1']:.1f} %" in out and f"ECE    {100 * document['ece']:.1f} %" in out
    bins = document["calibration"]
    assert len(bins) == 15 and sum(row["n"] for row in bins) == document["n"]
    assert all(row["recall"] == row["top1"] for row in document["classes"])


def test_a_single_image_has_a_line_for_each_class(
    run: Path, digits_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = min(digits_folder.glob("4/*.png"))
    assert main(["predict", str(run), str(image), "--top", "3"]) == 0
    out, err = capsys.readouterr()
    name, *classes = out.splitlines()
    assert name == str(image) and len(classes) == 3
    assert all(re.fullmatch(r" {2,6}\d+\.\d %  \d", line) and len(line) == len(classes[0]) for line in classes)
    assert f"weights: {run}/best.safetensors (best by validation top-1 and loss, epoch " in err


def test_several_images_have_aligned_lines_and_one_that_is_no_image_is_named(
    run: Path, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = min(digits_folder.glob("4/*.png")).read_bytes()
    Path("a.png").write_bytes(content)
    Path("longer\x1b[2J.png").write_bytes(content)
    Path("bad.png").write_bytes(b"no image")
    words = ["predict", str(run), "a.png", "bad.png", "longer\x1b[2J.png", "--top", "2"]
    assert main(words) == 1
    first, bad, second = capsys.readouterr().out.splitlines()
    assert first[15:] == second[15:] and first.startswith("a.png ") and second.startswith("longer?[2J.png ")
    assert bad.startswith("bad.png: ") and "%" not in bad
    assert main([*words, "--json"]) == 1
    documents = json.loads(capsys.readouterr().out)
    assert [document["error"] is None for document in documents] == [True, False, True]
    assert documents[2]["image"] == "longer\x1b[2J.png" and len(documents[2]["classes"]) == 2


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_weights_not_for_products_are_asked_for(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"")
    words = [verb, NON_COMMERCIAL, str(tmp_path / "a.png")]
    assert main(words) == 2
    assert "non-commercial use only (licence cc-by-nc-4.0): add --accept-licence" in capsys.readouterr().err
    assert main([*words, "--accept-licence"]) == 2
    assert "cannot fetch the weights" in capsys.readouterr().err


def test_an_evaluation_says_over_which_outputs_it_is(
    run: Path, digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for digit in "36":
        (tmp_path / "two" / digit).mkdir(parents=True)
        for image in sorted(digits_folder.glob(f"{digit}/*.png"))[:4]:
            (tmp_path / "two" / digit / image.name).write_bytes(image.read_bytes())
    assert main(["evaluate", str(run), str(tmp_path / "two")]) == 0
    out, err = capsys.readouterr()
    assert "two has 2 of the model's 10 classes (matched: 2 by name)" in err
    assert "8 images)\n       chosen among all 10; the data has 2 of them\n" in out
    assert sorted(line.split()[0] for line in out.splitlines()[-2:]) == ["3", "6"]
    assert main(["evaluate", str(run), str(tmp_path / "two"), "--restrict", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["restricted"] and document["matched"] == {"name": 2} and len(document["classes"]) == 10
    assert main(["evaluate", str(run), "--restrict"]) == 2
    (tmp_path / "two" / "6").rename(tmp_path / "two" / "six")
    assert main(["evaluate", str(run), str(tmp_path / "two")]) == 2
    assert "1 of the 2 classes in " in (err := capsys.readouterr().err) and "six. Rename" in err


def test_a_file_of_stock_weights_prints_names(
    digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm

    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "stock.pth")
    image = str(min(digits_folder.glob("4/*.png")))
    assert main(["predict", str(tmp_path / "stock.pth"), image, "--model", "timm/test_resnet", "--json"]) == 0
    out, err = capsys.readouterr()
    (document,) = json.loads(out)
    assert "taken for ImageNet's" in err
    assert not any(row["class"].isdigit() or row["class"].startswith("n0") for row in document["classes"])


@pytest.fixture(scope="module")
def labels_run(labelled_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on images with several labels."""
    folder = tmp_path_factory.mktemp("runs") / "labels"
    words = ["--model", "digits", "--epochs", "8", "--batch-size", "32", "--lr", "0.2", "--set", "data.pad=1"]
    assert main(["train", str(labelled_digits), *words, "--device", "cpu", "--run", str(folder)]) == 0
    return folder


def test_an_evaluation_of_labels_says_what_the_run_said(labels_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--run", str(labels_run)]) == 0
    match = re.search(r"^best mAP +(\S+ %)", capsys.readouterr().out, re.MULTILINE)
    assert main(["evaluate", str(labels_run), "--threshold", "0.3"]) == 0
    out = capsys.readouterr().out
    assert match is not None and f"mAP    {match[1]}  (over 3 labels; 80 images)" in out
    assert "best.safetensors (best by validation mAP, epoch " in out.splitlines()[0]
    head, *rows = out[out.index("\nlabel ") + 1 :].splitlines()
    assert head.split() == ["label", "n", "AP", "recall", "precision", "F1"] and len(rows) == 3
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert main(["evaluate", str(labels_run), "--threshold", "0.3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["threshold"] == 0.3 and f"micro  precision {100 * document['micro_precision']:.1f} %" in out
    assert sum(row["n"] for row in document["calibration"]) == 3 * document["n"] == 240
    assert document["mean_ap"] == pytest.approx(sum(row["ap"] for row in document["labels"]) / 3)


def test_the_labels_of_each_image_are_listed(
    labels_run: Path, digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(labels_run), "--per-image", str(tmp_path / "a.csv"), "--threshold", "0.2"]) == 0
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        has, predicted = (set(filter(None, row[name].split(";"))) for name in ("true", "predicted"))
        assert predicted == {name for name in ("even", "large", "round") if float(row[name]) > 0.2}
        assert int(row["wrong"]) == len(has ^ predicted)
    assert main(["evaluate", str(labels_run), "--per-image", str(tmp_path / "a.csv")]) == 0, "may be replaced"
    capsys.readouterr()
    zero, one = (sorted((digits_folder / digit).glob("*.png"))[0] for digit in "01")
    assert main(["predict", str(labels_run), str(zero), str(one)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "even" in first and "round" in first and second.endswith("no label above 50 %")
    assert main(["predict", str(labels_run), str(one), "--threshold", "0", "--json"]) == 0
    [document] = json.loads(capsys.readouterr().out)
    assert {row["class"] for row in document["classes"]} == {"even", "large", "round"}


def test_a_threshold_is_a_probability_of_labels(
    run: Path, labels_run: Path, digits_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(next(digits_folder.glob("*/*.png")))
    assert main(["evaluate", str(labels_run), "--threshold", "1"]) == 2
    assert "--threshold is 1; it must be from 0 to below 1" in capsys.readouterr().err
    assert main(["predict", str(run), image, "--threshold", "0.4"]) == 2
    assert "digits names one class for each image, the likeliest: drop --threshold" in capsys.readouterr().err
    assert main(["evaluate", str(labels_run), str(digits_folder / "labels.csv"), "--restrict"]) == 2
    assert "an image may have several of these labels: drop it" in capsys.readouterr().err


def test_a_missing_image_is_named_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words.jpg").write_text("a")
    assert main(["predict", str(run), str(tmp_path / "no.jpg"), str(tmp_path / "words.jpg")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"cannot read {tmp_path / 'no.jpg'}: No such file or directory",
        f"{tmp_path / 'words.jpg'}: text, not an image",
    ]


def test_images_none_of_which_is_there_are_a_users_mistake(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.png").write_bytes(b"")
    assert main(["predict", str(run), str(tmp_path / "cet.png"), str(tmp_path / "no.png")]) == 2
    assert f"there is no file or folder {tmp_path / 'cet.png'}. Did you mean cat.png?" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_every_odd_image_has_classes_or_one_reason_as_packing_gives_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/odd-images.md, but for what only packing cannot do: a JPEG of 70,000 pixels a side."""
    folder, expected = tmp_path / "odd", dict[str, str | None]()
    folder.mkdir()
    for number, odd in enumerate(odd for rows in GROUPS.values() for odd in rows):
        path = folder / f"{number:03d}.jpg"
        odd.make(path)
        if path.is_file():
            reason = odd.becomes.removeprefix("left out: ") if odd.becomes.startswith("left out: ") else None
            expected[str(path)] = None if TOO_LONG in odd.becomes else reason
        elif path.is_symlink():
            expected[str(path)] = f"cannot read {path}: No such file or directory"
    assert main(["predict", str(run), str(folder), "--json", "--threads", "2"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 90 and [row["image"] for row in rows] == sorted(expected)
    for row in rows:
        reason = expected[row["image"]]
        assert bool(row["classes"]) == (reason is None) and "\n" not in (row.get("error") or "")
        assert reason is None or row["error"].startswith(reason.partition(" (")[0]), row


def test_a_share_of_a_few_images_stands_once_in_an_evaluation(
    run: Path, digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, path in enumerate(sorted(digits_folder.glob("[012]/*.png"))[:6]):
        (tmp_path / "few" / path.parent.name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "few" / path.parent.name / f"{number}.png").write_bytes(path.read_bytes())
    assert main(["evaluate", str(run), str(tmp_path / "few"), "--prior", "training"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "in the surest" in line]
    shares = re.findall(r"(\d+ %): ", line)
    assert len(shares) >= 2 and len(set(shares)) == len(shares), line


def test_predict_shows_that_it_is_at_work_until_the_first_answer(
    run: Path, digits_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    @contextmanager
    def status(text: str) -> Iterator[None]:
        yield
        shown.append(text)
        assert capsys.readouterr().out == ""

    monkeypatch.setattr("steadytrain.cli.evaluate.status", status)
    images = list(map(str, sorted(digits_folder.glob("4/*.png"))[:3]))
    assert main(["predict", str(run), *images]) == 0
    assert shown[-1] == "predicting" and len(capsys.readouterr().out.splitlines()) == 3
    shown.clear()
    assert main(["predict", str(run), *images, "--json"]) == 0
    assert "predicting" not in shown, "a bar shows it"


def test_what_of_an_image_is_not_used_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("I;16", (8, 8), 999).save(tmp_path / "deep.png")
    Image.new("L", (8, 8), 9).save(tmp_path / "plain.png")
    (tmp_path / "bands.tif").write_bytes(banded(5, 0, 0))
    assert main(["predict", str(run), str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert "1 image has 16 bits a channel, of which 8 are kept" in errors
    assert "1 image has 5 bands, of which the first 3 are kept" in errors


def test_predictions_are_written_as_csv_and_paths_read_from_standard_input(
    run: Path, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [*sorted(digits_folder.glob("4/*.png"))[:3], tmp_path / "none.png"]
    target = tmp_path / "a.csv"
    stdin = io.TextIOWrapper(io.BytesIO("".join(f"{path}\n" for path in files).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["predict", str(run), "-", "--csv", str(target), "--top", "2"]) == 1
    assert "4 images, 1 of which could not be read, " in capsys.readouterr().err
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == list(map(str, files))
    assert rows[3]["error"].startswith("cannot read ") and not rows[3]["class1"]
    assert float(rows[0]["probability1"]) >= float(rows[0]["probability2"])
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))  # a name that is no UTF-8
    odd.write_bytes(files[0].read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(os.fsencode(odd) + b"\n")))
    assert main(["predict", str(run), "-", "--csv", "-", "--top", "1"]) == 0
    assert f"\\udcff.png,,{rows[0]['class1']}," in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(files[0].read_bytes())))
    assert main(["predict", str(run), "-", "--csv", "-", "--top", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "image,error,class1,probability1"
    assert out[1].split(",") == ["-", "", rows[0]["class1"], rows[0]["probability1"]]
    white = b"P5\n8 8\n255\n" + b"\xff" * 64  # an image without a zero in it
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(white)))
    assert main(["predict", str(run), "-", "--csv", "-", "--top", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("-,,")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.png", "--csv", "a.png"], "--csv is a.png; it must be a name that ends in .csv"),
        (["a.png", "--csv", "a.csv", "--json"], "--csv and --json exclude each other"),
        (["-"], "standard input is empty"),
        (["-", "-"], "name it once"),
        (["a.png", "--batch-size", "0"], "--batch-size is 0; it must be from 1"),
    ],
)
def test_what_predict_cannot_do_is_one_line(
    words: list[str], message: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert main(["predict", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_each_image_has_a_heat_map_under_a_name_of_its_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("L", (12, 8), 90).save(tmp_path / folder / "same name.png")
    (tmp_path / "b" / "bad.png").write_text("no image")
    maps = tmp_path / "new" / "maps"
    words = ["predict", str(run), str(tmp_path / "a"), str(tmp_path / "b"), "--explain", str(maps)]
    assert main([*words, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    paths = [row["classes"][0]["map"] for row in rows if not row["error"]]
    assert [Path(path).name for path in paths] == ["1-same_name.jpg", "3-same_name.jpg"]
    assert sorted(map(str, maps.iterdir())) == paths and Image.open(paths[0]).size == (256, 171)
    assert "map" not in rows[0]["classes"][1]
    assert main([*words, "--top", "2", "--csv", "-"]) == 1
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [Path(table[0][f"map{rank}"]).name for rank in (1, 2)] == ["1-same_name.jpg", "1-same_name-2.jpg"]
    assert table[1]["error"] and not table[1]["map1"]


def test_a_heat_map_of_a_long_name_is_written_and_only_those_are_counted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, bad, maps = tmp_path / f"{'猫' * 80}.png", tmp_path / "bad.jpg", tmp_path / "maps"
    Image.new("L", (8, 8)).save(image)
    bad.write_bytes(b"\xff\xd8\xff")
    words = ["predict", str(run), str(image), str(bad), "--explain", str(maps), "--top", "2"]
    assert main(words) == 1
    assert f"wrote 2 heat maps into {maps}. Coloured: " in capsys.readouterr().err
    assert sorted(path.name for path in maps.iterdir()) == [f"1-{'猫' * 32}-2.jpg", f"1-{'猫' * 32}.jpg"]
    assert main(["predict", str(run), str(bad), "--explain", str(maps)]) == 1
    assert "heat map" not in capsys.readouterr().err


def test_a_folder_for_heat_maps_is_no_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert main(["predict", str(run), str(tmp_path / "a.png"), "--explain", str(tmp_path / "file")]) == 2
    assert "which is a file; it must be a folder" in capsys.readouterr().err


def test_a_finished_run_has_maps_of_its_worst_mistakes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads((run / "best.maps.json").read_text())
    wrong = [row for row in csv.DictReader((run / "predictions.csv").open()) if row["true"] != row["predicted"]]
    assert len(document["records"]) == min(24, len(wrong)) > 0
    drawn = {row["record"]: row["predicted"] for row in wrong}
    assert all(drawn[number] == each["class"] for number, each in document["records"].items())

    def finish(age: float) -> int:
        """Run the finished run again, whose maps are older than its weights by so many seconds."""
        then = (run / "best.safetensors").stat().st_mtime_ns - round(1e9 * age)
        os.utime(run / "best.maps.json", ns=(then, then))
        assert main(["train", "--run", str(run)]) == 0
        return (run / "best.maps.json").stat().st_mtime_ns - then

    monkeypatch.setattr("steadytrain.cli.train._COUNTS", 0.0)
    assert finish(1) > 0
    before = ledger(run)
    assert finish(0) == 0
    assert ledger(run) == before, "where nothing is measured again, nothing counts"
    assert finish(1) > 0, "made again only for newer weights"
    after = ledger(run)
    assert after.seconds["measuring"] > before.seconds["measuring"], "what the command does after the end counts"
    grown = after.seconds["measuring"] - before.seconds["measuring"]
    assert after.wall_seconds == pytest.approx(before.wall_seconds + grown, abs=0.01)
    assert sum(after.seconds.values()) == pytest.approx(after.wall_seconds)
    with Run.open(run).log_beside() as log, monkeypatch.context() as later:
        later.setattr("steadytrain.events.log.time.time", lambda now=time.time(): now + 1e5)  # noqa: B008
        log.append(Noticed(message="of the next day"))
    Run.open(run).add_to_account(1.0)
    account = [event for event in Run.open(run).events() if isinstance(event, Accounted)][-1]
    assert account.wall_seconds == pytest.approx(after.wall_seconds + 1, abs=0.1), "what came after the end is no run's"
    assert sum(account.seconds.values()) == pytest.approx(account.wall_seconds)
    page = run / "report.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert page.read_text().count("where the answer ") == len(document["records"])
    map_mistakes(Run.open(run), seconds=0.0)
    worst = max(wrong, key=lambda row: float(row["loss"]))["record"]
    assert list(json.loads((run / "best.maps.json").read_text())["records"]) == [worst], "no more than time is left for"
