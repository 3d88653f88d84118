"""``steady check --suspects``, ``--leave-out`` and ``steady embed`` as they are typed."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from steadytrain.cli import main
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.training.features.series import Series

MOVED = {"green/03.png": "red", "red/05.png": "blue", "blue/11.png": "red", "blue/12.png": "green"}


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a small network, whose first weights tell colours apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pth")
    return ["--model", "timm/test_resnet", "--weights", str(tmp_path / "w.pth"), "--size", "32", "--device", "cpu"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixty images in three classes of a colour, of which four lie in a wrong folder."""
    rng = np.random.default_rng(0)
    for channel, colour in enumerate(("red", "green", "blue")):
        for number in range(20):
            name = f"{colour}/{number:02}.png"
            folder = tmp_path / "photos" / MOVED.get(name, colour)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 120, (40, 40, 3), np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(folder / f"{colour}-{number:02}.png")
    return tmp_path / "photos"


def _rows(name: str) -> list[dict[str, str]]:
    with Path(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


WRONG = {f"{folder}/{name[:-4].replace('/', '-')}.png" for name, folder in MOVED.items()}


def test_images_in_a_wrong_folder_are_found_and_shown(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "photos", "--suspects", "-o", "suspects.csv", "--json", *network]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = _rows("suspects.csv")
    assert {row["path"] for row in rows} == WRONG
    assert [row["path"] for row in rows] == [image["path"] for image in report["suspects"]["images"]]
    assert {row["path"]: row["suggested"] for row in rows} == {
        path: Path(path).name.partition("-")[0] for path in WRONG
    }
    chances = [float(row["p_label"]) for row in rows]
    assert chances == sorted(chances) and all(
        float(row["p_suggested"]) > p for row, p in zip(rows, chances, strict=True)
    )
    assert report["warnings"] == 4 and report["suspects"]["n"] == 4 and report["suspects"]["share"] is None
    page = Path("suspects.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 3 * 4 and all(path in page for path in WRONG)


def test_the_terminal_lists_them_and_says_what_to_do(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "photos", "--suspects", *network]) == 0
    lines = capsys.readouterr().out
    assert "warning: labels that may be wrong" in lines and "4 labels may be wrong" in lines
    assert "red/green-03.png: red 0." in lines and "mixed up: " in lines
    assert "steady check photos --suspects -o suspects.csv" in lines and "--leave-out" in lines
    pack("photos", "packed")
    assert main(["check", "packed.rec", "--suspects", *network]) == 0
    assert "--leave-out" not in capsys.readouterr().out  # it is refused for records
    assert main(["check", "photos", "--suspects", "-o", "none/suspects.csv", *network]) == 2
    assert "there is no folder none" in capsys.readouterr().err


def test_the_table_without_them_packs_to_all_other_images(network: list[str], photos: Path) -> None:
    assert main(["check", "photos", "--suspects", "-o", "suspects.csv", *network]) == 0
    kept = Path("suspects.csv").read_text(encoding="utf-8").splitlines()
    Path("looked-at.csv").write_text("\n".join(kept[:3]) + "\n", encoding="utf-8")  # two lines were deleted
    Path("lists").mkdir()
    assert main(["check", "photos", "--leave-out", "looked-at.csv", "-o", "lists/clean.csv"]) == 0
    (packed,) = pack("lists/clean.csv", "clean")
    with Records.open(packed.path) as records:
        assert len(records) == 58 and records.classes == ("blue", "green", "red")


def test_a_name_that_is_no_utf8_is_left_out_like_others_and_not_listed(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "red" / "green-03.png").rename(photos / "red" / os.fsdecode(b"green-\xe9.png"))
    assert main(["check", "photos", "--suspects", "-o", "suspects.csv", *network]) == 0
    lines, shown = Path("suspects.csv").read_text(encoding="utf-8").splitlines(keepends=True), "red/green-\\xe9.png"
    assert [line for line in lines if line.startswith(f"{shown},red,green,")]
    assert main(["check", "photos", "--leave-out", "suspects.csv", "-o", "clean.csv"]) == 0
    (packed,) = pack("clean.csv", "clean")
    assert packed.card.num_images == 56
    Path("gone.csv").write_text("".join(line for line in lines if not line.startswith(shown)))
    assert main(["check", "photos", "--leave-out", "gone.csv", "-o", "clean.csv"]) == 2
    assert f"a table is UTF-8, and names of photos are none: rename {shown}" in capsys.readouterr().err


def test_a_list_of_other_images_is_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("path,label\nred/none.png,red\n", encoding="utf-8")
    assert main(["check", "photos", "--leave-out", "other.csv", "-o", "clean.csv"]) == 2
    Path("odd.csv").write_text("image\nred/none.png\n", encoding="utf-8")
    assert main(["check", "photos", "--leave-out", "odd.csv", "-o", "clean.csv"]) == 2
    assert main(["check", "photos", "-o", "clean.csv"]) == 2 and not Path("clean.csv").exists()


def test_validation_images_are_examined_too(network: list[str], photos: Path) -> None:
    split = Path("split")
    for path in sorted(photos.rglob("*.png")):
        part = split / ("val" if path.stem.endswith(("3", "7")) else "train") / path.parent.name
        part.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, part)
    assert main(["check", "split", "--suspects", "-o", "suspects.csv", *network]) == 0
    names = {Path(row["path"]).name for row in _rows("suspects.csv")}
    assert {Path(path).name for path in WRONG} <= names
    assert main(["check", "split", "--leave-out", "suspects.csv", "-o", "clean.csv"]) == 0
    splits = [row["split"] for row in _rows("clean.csv")]
    assert len(splits) == 60 - len(names) and set(splits) == {"train", "val"}


@pytest.mark.parametrize("is_beside", [False, True], ids=["table", "labels"])
def test_a_table_keeps_its_other_columns(network: list[str], photos: Path, is_beside: bool) -> None:
    lines = ["patient\tfile\tcolour\tphase\ta, b"]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        name = path.relative_to(photos if is_beside else photos.parent).with_suffix("")  # as contests write them
        lines.append(f"p{number // 3}\t{name}\t{path.parent.name}\t{'valid' if number % 5 else 'train'}\tx, {number}")
    Path("all.tsv").write_text("\n".join([*lines, lines[-1]]) + "\n", encoding="utf-8")
    source = [*(["photos", "--labels", "all.tsv"] if is_beside else ["all.tsv"]), "--label-column", "colour"]
    assert main(["check", *source, "--suspects", "-o", "suspects.csv", *network]) == 0
    assert {"/".join(Path(row["path"]).parts[-2:]) for row in _rows("suspects.csv")} == WRONG
    Path("lists").mkdir()
    assert main(["check", *source, "--leave-out", "suspects.csv", "-o", "lists/clean.csv"]) == 0
    rows = _rows("lists/clean.csv")
    assert list(rows[0]) == ["file", "colour", "phase", "patient", "a, b"] and len(rows) == 56
    whole = {f"{line.split(chr(9))[1]}.png": line.split("\t") for line in lines[1:]}
    for row in rows:
        cells = whole[row["file"].removeprefix("../").removeprefix("photos/" if is_beside else "")]
        assert (row["patient"], row["colour"], row["a, b"]) == (cells[0], cells[2], cells[4])
        assert row["phase"] == {"train": "train", "valid": "val"}[cells[3]]
    assert main(["pack", "lists/clean.csv", "clean", "--label-column", "colour"]) == 0


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_embeddings_are_written_with_their_names_and_labels(network: list[str], photos: Path, ending: str) -> None:
    out = Path(f"x.{ending}")
    assert main(["embed", "photos", "-o", str(out), *network]) == 0
    if ending == "npy":
        values = np.load(out)
        rows = [(row["name"], row["label"]) for row in _rows("x.csv")]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        values = np.array(table["embedding"].to_pylist(), np.float32)
        rows = list(zip(table["name"].to_pylist(), table["label"].to_pylist(), strict=True))
        assert table.schema.field("embedding").type.list_size == values.shape[1]
    assert values.shape == (60, 96) and values.dtype == np.float32 and len(set(rows)) == 60
    assert all(name.partition("/")[0] == label for name, label in rows)
    is_red = np.array(["/red-" in name for name, _ in rows])
    mean = values[is_red].mean(0) - values[~is_red].mean(0)
    assert ((values @ mean)[is_red].min()) > np.median((values @ mean)[~is_red]), "rows and names belong together"


def test_records_are_embedded_as_the_folder_they_were_packed_from(network: list[str], photos: Path) -> None:
    pack("photos", "packed")
    assert main(["embed", "photos", "-o", "a.npy", *network]) == 0
    assert main(["embed", "packed.rec", "-o", "b.npy", *network]) == 0
    np.testing.assert_allclose(np.load("a.npy"), np.load("b.npy"), atol=1e-5)
    assert Path("a.csv").read_text(encoding="utf-8") == Path("b.csv").read_text(encoding="utf-8")


def test_another_ending_is_refused_before_anything_is_computed(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", str(photos), "-o", "x.txt"]) == 2
    assert ".npy or .parquet" in capsys.readouterr().err


def test_a_parquet_without_pyarrow_is_refused_before_anything_is_computed(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.cli.embed.find_spec", lambda name: None)
    monkeypatch.setattr("steadytrain.cli.check.open_images", None)
    assert main(["embed", str(photos), "-o", "x.parquet"]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["embed", "-o", "photos.npy"], ["check", "--suspects", "-o", "photos.csv"]])
def test_the_table_that_is_read_is_not_replaced(
    network: list[str], photos: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"photos/{folder}/{path.name},{folder}" for folder in ("red", "blue") for path in (photos / folder).iterdir()
    ]
    Path("photos.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    before = Path("photos.csv").read_bytes()
    assert main([*flags, "photos.csv", *network]) == 2
    assert "choose another name" in capsys.readouterr().err and Path("photos.csv").read_bytes() == before


@pytest.mark.parametrize("source", ["split", "packed.rec"])
def test_copies_of_a_wrong_label_do_not_defend_each_other(network: list[str], photos: Path, source: str) -> None:
    for path in photos.glob("*/*.png"):  # each image is there twice, in the part that validates or beside itself
        for part, stem in (("split/train", path.stem), ("split/val", path.stem), ("twice", f"{path.stem}-copy")):
            copy = Path(part) / path.parent.name / f"{stem}.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    shutil.copytree(photos, "twice", dirs_exist_ok=True)
    pack("twice", "packed")
    for hashes in Path().glob("*.hashes"):
        hashes.unlink()  # as of an older version
    assert main(["check", source, "--suspects", "-o", "suspects.csv", *network]) in (0, 1)
    found = {"/".join(Path(row["path"]).parts[-2:]).replace("-copy", "") for row in _rows("suspects.csv")}
    assert found == WRONG and len(_rows("suspects.csv")) == 8


def test_the_network_of_a_run_sees_images_at_the_size_that_is_asked_for(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", "photos", "--train", "probe", "--run", "run", *network]) == 0
    values = []
    for number, size in enumerate(([], ["--size", "32"], ["--size", "64"])):
        assert main(["embed", "photos", "--weights", "run", *size, "-o", f"{number}.npy", "--device", "cpu"]) == 0
        values.append(np.load(f"{number}.npy"))
    assert np.array_equal(values[0], values[1]) and not np.allclose(values[0], values[2])


def test_files_that_cannot_be_read_are_left_out(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("photos/red/broken.png").write_bytes(b"no image")
    assert main(["check", "photos", "--suspects", "-o", "suspects.csv", *network]) == 1  # for the file, which is named
    assert "broken.png" in capsys.readouterr().out
    assert {row["path"] for row in _rows("suspects.csv")} == WRONG


def test_what_series_do_to_labels_and_figures_is_said_wherever_they_are(
    network: list[str], photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("features.series", "finetuning.linear_probe"):
        monkeypatch.setattr(f"steadytrain.training.{place}.find_series", lambda *_, **__: Series(0.9, None, 0))
    assert main(["check", "photos", "--suspects", "-o", "suspects.csv", *network]) == 0
    words = "a wrong label of a whole series is not found"
    assert words in " ".join(capsys.readouterr().out.split())
    assert words in Path("suspects.html").read_text(encoding="utf-8")
    assert main(["finetune", "photos", "--train", "probe", "--run", "run", *network]) == 0
    for command in (
        ["evaluate", "run"],
        ["evaluate", "run", "--limits"],
        ["evaluate", "run", "--calibrate"],
        ["predict", "run", "photos/red", "--abstain-at", "0.2"],
    ):
        capsys.readouterr()
        main(command)
        assert "series: 90 % of the images" in capsys.readouterr().err, command


@pytest.mark.parametrize("of_run", [False, True], ids=["network", "run"])
def test_whole_pictures_are_examined_where_that_is_asked_for(network: list[str], photos: Path, of_run: bool) -> None:
    for path in photos.glob("*/*.png"):
        wide = Image.new("RGB", (120, 40))
        wide.paste(Image.open(path), (0, 0))  # which a centre square does not see
        wide.save(path)
    flags = network
    if of_run:
        assert main(["finetune", "photos", "--fit", "crop", "--train", "probe", "--run", "run", *network]) == 0
        flags = ["--weights", "run", "--device", "cpu"]
    assert main(["embed", "photos", "--fit", "crop", "-o", "crop.npy", *flags]) == 0
    assert main(["embed", "photos", "--fit", "squash", "-o", "whole.npy", *flags]) == 0
    assert 10 * np.ptp(np.load("crop.npy"), axis=0).max() < np.ptp(np.load("whole.npy"), axis=0).max()


def test_what_weights_do_not_say_of_their_images_is_said(
    network: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "photos", "--suspects", *network]) == 0
    assert "does not say how its images were scaled" in capsys.readouterr().err
