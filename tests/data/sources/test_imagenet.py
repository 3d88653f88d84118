"""ImageNet in the forms in which it is handed out, made of real photographs: one class list and the right labels."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from tests.data.sources.samples import content, encoded, found, told, write_tar

from steadytrain.cli import main
from steadytrain.data.sources.folder import list_folder
from steadytrain.errors import DataError

WNIDS = ["n01440764", "n01496331", "n01530575", "n01558993"]
IDS = {"n01440764": 3, "n01496331": 1, "n01530575": 4, "n01558993": 2}  # in no order of theirs, as in the real kit
TRUTH = ["n01530575", "n01440764", "n01440764", "n01558993", "n01496331", "n01530575"]


@pytest.fixture(scope="module")
def photos(extracted: Callable[[str], Path]) -> list[bytes]:
    """Twelve original photographs."""
    return [path.read_bytes() for path in sorted(extracted("imagenet-sample-200.tar").iterdir())[:12]]


def _val_names() -> list[str]:
    return [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(TRUTH) + 1)]


def _meta(*, compress: bool = True) -> bytes:
    """The kit's table, an array of structures, with a few synsets that are no leaves, as in the real one."""
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O"), ("children", "O")]
    rows = [
        (float(IDS[wnid]), wnid, "tench, Tinca tinca", 0.0, np.zeros((0, 0)))
        for wnid in sorted(IDS, key=lambda w: IDS[w])
    ]
    rows.append((1001.0, "n00001740", "entity", 2.0, np.array([1.0, 2.0])))
    file = io.BytesIO()
    savemat(file, {"other": np.eye(3), "synsets": np.array(rows, kind)[:, None]}, do_compression=compress)
    return file.getvalue()


def _without_wnids() -> bytes:
    file = io.BytesIO()
    savemat(file, {"synsets": np.eye(2)})
    return file.getvalue()


def _kit(path: Path) -> Path:
    ids = "".join(f"{IDS[wnid]}\n" for wnid in TRUTH).encode()
    data = "ILSVRC2012_devkit_t12/data"
    files = {f"{data}/ILSVRC2012_validation_ground_truth.txt": ids, f"{data}/meta.mat": _meta(), f"{data}/x.m": b"%"}
    return write_tar(path, files, format=tarfile.GNU_FORMAT) if path.suffix == ".tar" else _gz(path, files)


def _gz(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _train_tar(path: Path, photos: list[bytes]) -> Path:
    """A tar of one tar for each class, in an order of its own."""
    inner = {}
    for number, wnid in enumerate(WNIDS[::-1]):
        files = {f"{wnid}_{k}.JPEG": photos[number * 3 + k] for k in (2, 0, 1)}
        inner[f"{wnid}.tar"] = write_tar(path.with_name("inner.tar"), files).read_bytes()
        path.with_name("inner.tar").unlink()
    return write_tar(path, inner)


def _unpacked(folder: Path, photos: list[bytes]) -> Path:
    for number, wnid in enumerate(WNIDS[::-1]):
        (folder / wnid).mkdir(parents=True)
        for k in range(3):
            (folder / wnid / f"{wnid}_{k}.JPEG").write_bytes(photos[number * 3 + k])
    return folder


@pytest.fixture
def given_out(tmp_path: Path, photos: list[bytes]) -> Path:
    """A folder with the two archives and the kit."""
    folder = tmp_path / "imagenet"
    folder.mkdir()
    _train_tar(folder / "ILSVRC2012_img_train.tar", photos)
    write_tar(folder / "ILSVRC2012_img_val.tar", dict(zip(_val_names()[::-1], photos, strict=False)))
    _kit(folder / "ILSVRC2012_devkit_t12.tar.gz")
    return folder


def test_the_tar_of_tars_is_listed_as_the_folder_it_unpacks_to(
    given_out: Path, tmp_path: Path, photos: list[bytes]
) -> None:
    [listing] = found(given_out / "ILSVRC2012_img_train.tar", tmp_path / "scratch")
    [folder] = list_folder(_unpacked(tmp_path / "train", photos))
    assert told(listing) == told(folder)
    assert [content(listing, n) for n in range(12)] == [content(folder, n) for n in range(12)]
    assert not (tmp_path / "scratch").exists()


def test_the_folder_gives_both_sets_with_one_class_list(given_out: Path, tmp_path: Path, photos: list[bytes]) -> None:
    train, val = found(given_out, tmp_path / "scratch")
    assert [value.split for value in (train, val)] == ["train", "val"]
    assert train.classes == val.classes == tuple(WNIDS)
    assert val.names == _val_names()
    assert [val.classes[label] for label in val.labels.tolist()] == TRUTH
    assert content(val, 5) == photos[0]


FORMS: dict[str, Callable[[Path], object]] = {
    "ILSVRC2012_devkit_t12.tar.gz": _kit,
    "kit.tar": _kit,
    "one WNID a line.txt": lambda path: path.write_text("\r\n".join(TRUTH) + "\r\n"),
    "names and WNIDs.txt": lambda path: path.write_text(
        "\n".join(f"{n} {w}" for n, w in zip(_val_names(), TRUTH, strict=True))
    ),
    "names and numbers.txt": lambda path: path.write_text(
        "\n".join(f"{n} {WNIDS.index(w)}" for n, w in zip(_val_names(), TRUTH, strict=True))
    ),
    "LOC_val_solution.csv": lambda path: path.write_text(
        "ImageId,PredictionString\n"
        + "".join(f"{n[:-5]},{w} 1 2 3 4 {w} 5 6 7 8 \n" for n, w in list(zip(_val_names(), TRUTH, strict=True))[::-1])
    ),
}


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize("form", FORMS)
def test_the_validation_set_with_its_truth_in_every_form(
    tmp_path: Path, photos: list[bytes], form: str, kind: str
) -> None:
    FORMS[form](tmp_path / form)
    source = write_tar(tmp_path / "val.tar", dict(zip(_val_names(), photos, strict=False)))
    if kind == "folder":
        with tarfile.open(source) as tar:
            tar.extractall(tmp_path / "val", filter="data")
        source = tmp_path / "val"
    [listing] = found(source, tmp_path / "scratch", labels=tmp_path / form, classes=WNIDS)
    assert [WNIDS[label] for label in listing.labels.tolist()] == TRUTH
    assert [Path(name).name for name in listing.names] == _val_names()
    assert content(listing, 3) == photos[3]


def test_kaggle_s_tree_is_found_from_every_level(tmp_path: Path, photos: list[bytes]) -> None:
    inside = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    _unpacked(inside / "train", photos)
    for kind in ("val", "test"):
        (inside / kind).mkdir()
        for number, name in enumerate(_val_names()):
            (inside / kind / name.replace("val", kind)).write_bytes(photos[number])
    FORMS["LOC_val_solution.csv"](tmp_path / "LOC_val_solution.csv")
    for source in (tmp_path, tmp_path / "ILSVRC", inside):
        train, val = found(source, tmp_path / "scratch")
        assert (train.split, len(train), val.split) == ("train", 12, "val")
        assert [val.classes[label] for label in val.labels.tolist()] == TRUTH
    (tmp_path / "LOC_val_solution.csv").unlink()
    with pytest.raises(DataError, match=r"val has images without labels: put ILSVRC2012_devkit_t12\.tar\.gz"):
        found(tmp_path, tmp_path / "scratch")


def test_the_folder_of_the_archives_is_packed(
    given_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "imagenet", "-o", str(tmp_path / "out")]) == 2
    assert "steady pack" in capsys.readouterr().err
    words = ["pack", str(given_out), str(tmp_path / "imagenet"), "--shorter-side", "64", "--workers", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "imagenet-train.rec: 12 images," in out and "imagenet-val.rec: 6 images," in out


def test_the_kit_unpacked_beside_the_images_is_found(given_out: Path, tmp_path: Path) -> None:
    (given_out / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    data = given_out / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{IDS[wnid]}\n" for wnid in TRUTH))
    (data / "meta.mat").write_bytes(_meta(compress=False))
    [listing] = found(given_out / "ILSVRC2012_img_val.tar", tmp_path / "scratch")
    assert [listing.classes[label] for label in listing.labels.tolist()] == TRUTH
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"numbers classes as meta\.mat does, which is not beside it"):
        found(given_out / "ILSVRC2012_img_val.tar", tmp_path, labels=data / "ILSVRC2012_validation_ground_truth.txt")


REFUSED: dict[str, tuple[bytes, str]] = {
    "too few": ("\n".join(TRUTH[1:]).encode(), "has 5 labels for 6 images: the two numbers must be equal"),
    "counted from one": ("\n".join(str(IDS[w]) for w in TRUTH).encode(), "counts classes from 1, as ImageNet's"),
    "unknown class": ("\n".join([*TRUTH[1:], "n99999999"]).encode(), "the class list lacks: n99999999"),
    "beyond the classes": (b"0\n1\n2\n3\n9\n1\n", r"has label 9; the class list ends at 3 \(n01558993\)"),
    "not all": (
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1 2 3 4\n",
        "has no label for 5 of the images",
    ),
    "no boxes": (
        b"ImageId,PredictionString\nILSVRC2012_val_00000001,\n",
        "line 2 is not an image name followed by boxes",
    ),
    "no text": (b"\x00\x01\x02\x03", "is not a file of labels"),
    "latin": ("n01440764\n\xe9\n".encode("latin-1"), r"is not UTF-8 text \(0xe9 found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_labels_that_do_not_go_with_the_images_are_refused(tmp_path: Path, photos: list[bytes], case: str) -> None:
    text, message = REFUSED[case]
    (tmp_path / "truth.txt").write_bytes(text)
    source = write_tar(tmp_path / "val.tar", dict(zip(_val_names(), photos, strict=False)))
    with pytest.raises(DataError, match=message):
        found(source, tmp_path / "scratch", labels=tmp_path / "truth.txt", classes=WNIDS)


def test_a_kit_without_its_parts_or_with_damaged_ones_says_so(tmp_path: Path, photos: list[bytes]) -> None:
    source = write_tar(tmp_path / "val.tar", dict(zip(_val_names(), photos, strict=False)))
    truth, meta = "d/ILSVRC2012_validation_ground_truth.txt", "d/meta.mat"
    for files, message in (
        ({truth: b"1\n"}, r"holds no meta\.mat: give the kit"),
        ({meta: _meta()}, "holds no ILSVRC2012_validation_ground_truth"),
        ({truth: b"1\n", meta: b"no"}, r"meta\.mat of .* cannot be used: it is damaged, or not such a file"),
        ({truth: b"1\n", meta: _meta()[:-100]}, r"meta\.mat of .* cannot be used: it is damaged, or not such a file"),
        ({truth: b"1\n", meta: bytes(300_000)}, r"meta\.mat of .* cannot be used: 300,000 bytes, more than 262,144"),
        ({truth: b"1\n", meta: _without_wnids()}, r"meta\.mat of .* cannot be used: it is damaged, or not such a file"),
        ({truth: b"77\n", meta: _meta()}, r"has the class '77', which meta\.mat does not list"),
    ):
        with pytest.raises(DataError, match=message):
            found(source, tmp_path / "scratch", labels=write_tar(tmp_path / "kit.tar", files))


def test_a_kit_without_scipy_says_what_to_install(given_out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError, match=r"is a MATLAB file, which scipy reads: pip install scipy, or give one WNID"):
        found(given_out, given_out.parent / "scratch")


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_labels_by_line_are_refused_where_names_have_two_orders(tmp_path: Path, form: str) -> None:
    files = {f"images/{number}.png": encoded(number) for number in range(12)}  # by letters 10 comes before 2
    source = write_tar(tmp_path / "images.tar", files)
    if form == "folder":
        with tarfile.open(source) as tar:
            tar.extractall(tmp_path, filter="data")
        source = tmp_path / "images"
    (tmp_path / "labels.txt").write_text("cat\ndog\n" * 6)
    with pytest.raises(
        DataError, match=r"11\.png comes before .*2\.png, but after it in numerical order\): use a table"
    ):
        found(source, tmp_path / "scratch", labels=tmp_path / "labels.txt")


def test_labels_by_line_are_used_where_names_have_a_single_order(tmp_path: Path) -> None:
    for number in range(8, 12):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{number:03}.png").write_bytes(encoded(number))
    (tmp_path / "labels.txt").write_text("cat\ndog\ncat\ncat\n")
    [listing] = found(tmp_path / "images", tmp_path / "scratch", labels=tmp_path / "labels.txt")
    assert [listing.classes[label] for label in listing.labels] == ["cat", "dog", "cat", "cat"]
