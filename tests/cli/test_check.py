"""``steady check`` as it is typed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.data.checking.test_records import PNGS
from tests.data.packing.pictures import write_folder
from tests.data.recordio.damage import labelled, made_of, read_original

from steadytrain.cli import main
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records


@pytest.fixture
def torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``torn.rec`` in the working directory: 24 records, of which one has a wrong magic and the last is cut short."""
    original = made_of(*(labelled(n % 2, png, id=100 + n) for n, png in enumerate(PNGS)))
    (tmp_path / "torn.rec").write_bytes(original.with_bytes(original.offsets[3], b"\0")[:-8])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "torn.rec"


def test_the_verdict_comes_first_and_the_remedy_last(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = made_of(*(labelled(n % 2, png, id=100 + n) for n, png in enumerate(PNGS)))
    assert main(["check", "torn.rec"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 findings (2 errors): torn.rec: 22 image records"
    assert lines[2] == "  2 classes: 0 12, 1 10"
    table = lines.index("error: bytes that are no whole record")
    assert lines[table + 1 : table + 4] == [
        "  these records are lost; a reader stops there",
        "     byte  record   id",
        f"    {original.offsets[3]:,}       -  103  412 bytes, up to byte 1,736",
    ]
    assert lines[-4:] == [
        "  steady check torn.rec --salvage torn-salvaged",
        "    writes the 22 sound records to a new file",
        "  steady check torn.rec --index",
        "    writes the index",
    ]


def test_one_kind_of_finding_in_three_places_is_one_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 12, "dog": 5, "elk": 6, "fox": 7})
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("1 finding in 3 places (1 warning): ")
    assert main(["check", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == 3


def test_a_class_with_one_image_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(write_folder(tmp_path / "data", {"cat": 18, "dog": 1}))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 finding (1 warning): ")
    assert "never held out, so not measured: add images, or give --val DATA" in out


def test_what_is_fine_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [(path, _)] = pack(write_folder(tmp_path / "data", {"cat": 12, "dog": 12}), tmp_path / "a")
    for source, what in ((path, "24 image records"), (tmp_path / "data", "a folder of classes, 24 images")):
        assert main(["check", str(source)]) == 0
        out, error = capsys.readouterr()
        assert out.startswith(f"fine: {source}: {what}\n")
        assert f"checking {source.name}: done=" in error


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_lines_fit_the_terminal(
    torn: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["check", "torn.rec"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert max(len(line) for line in lines if "--salvage" not in line) < columns


def test_one_json_document_holds_every_finding(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = labelled(0, b"<html>")
    torn.write_bytes(torn.read_bytes() + made_of(*[payload] * 30).data)
    assert main(["check", "torn.rec", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["what"], document["n"], document["sound"], document["usable"]) == ("image records", 52, 22, False)
    assert (
        document["counts"]["no-image"]
        == len([finding for finding in document["findings"] if finding["kind"] == "no-image"])
        == 30
    )
    assert main(["check", "torn.rec"]) == 1
    assert "and 10 more; --json names them all" in capsys.readouterr().out


def test_salvage_writes_what_can_be_used_and_says_what_cannot(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "torn.rec", "--salvage", "whole"]) == 1
    error = capsys.readouterr().err
    assert "wrote whole.rec: 22 records; not in it:" in error
    assert "(id 103): bytes that are no whole record" in error
    with Records.open("whole.rec") as records:
        assert records.record_ids.tolist() == [100 + n for n in range(23) if n != 3]
    assert main(["check", "whole.rec"]) == 0
    assert main(["check", "torn.rec", "--salvage", "whole"]) == 2
    assert "whole.rec, whole.idx, whole.json exist" in capsys.readouterr().err


def test_a_lost_index_is_written_and_a_good_one_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [(path, _)] = pack(write_folder(tmp_path / "data", {"cat": 12, "dog": 12}), tmp_path / "a")
    right = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_text("0\t4\n")
    assert main(["check", str(path)]) == 1
    assert main(["check", str(path), "--index", "--json"]) == 0  # what was wrong has been mended
    assert f'"index": "{path.with_suffix(".idx")}"' in capsys.readouterr().out
    assert path.with_suffix(".idx").read_bytes() == right
    assert main(["check", str(path), "--index"]) == 0
    assert "the index is good: it stays" in capsys.readouterr().err


def test_validation_beside_a_training_set_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a-train.rec").write_bytes(made_of(*(labelled(n % 2, PNGS[n], id=n) for n in range(20))).data)
    (tmp_path / "a-val.rec").write_bytes(made_of(*(labelled(n % 2, PNGS[n], id=n) for n in (3, 22))).data)
    assert main(["check", str(tmp_path / "a-train.rec")]) == 0
    out = capsys.readouterr().out
    assert "1 of the 2 images of a-val.rec are in it" in out
    assert "warning: validation or test images that are also in the training set" in out
    assert main(["check", str(tmp_path / "a-train.rec"), "--val", str(tmp_path / "a-train.rec"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["leak"] == 20


def test_shards_of_validation_are_found_beside_those_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, numbers in (
        ("train-00001-of-00002", range(12)),
        ("val-00000-of-00002", (3,)),
        ("val-00001-of-00002", (4,)),
    ):
        data = made_of(*(labelled(n % 2, PNGS[n], id=n) for n in numbers)).data
        (tmp_path / f"a-{name}.rec").write_bytes(data)
    (tmp_path / "a-valuable.rec").write_bytes(data)
    main(["check", str(tmp_path / "a-train-00001-of-00002.rec"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["leak"] == 2
    assert [fact for fact in document["facts"] if "are in it" in fact] == [
        "1 of the 1 images of a-val-00000-of-00002.rec are in it",
        "1 of the 1 images of a-val-00001-of-00002.rec are in it",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.rec"], "there is no file or folder nothing.rec"),
        (["tor.rec"], "Did you mean torn.rec?"),
        (["torn.rec", "--root", "x"], "--root goes with images"),
        (["torn.rec", "--val", "x"], "--val is x: give a .rec"),
        (["torn.rec", "--workers", "0"], "--workers is 0"),
        ([".", "--index"], "--index and --salvage are for a .rec"),
        (["torn.rec", "torn.rec", "--salvage", "x"], "--salvage takes one record file, and 2 are given"),
        (["torn.rec", "--near", "--device", "cpu"], "--device is for the network of --suspects"),
        ([], "steady check needs PATH, such as:"),
    ],
)
def test_a_wrong_use_is_one_clear_line(
    torn: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert len(error.splitlines()) == 1


def test_files_of_other_kinds_are_named_without_progress(
    torn: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(data_folder / "mxnet-rec" / "empty" / "validation.rec")]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines()[0].endswith("validation.rec: a Git LFS pointer, not the data")
    assert out.splitlines()[-1] == "  fetch the data with git lfs pull"
    assert error == ""


def test_what_many_files_have_in_common_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(9):
            path = tmp_path / "photos" / name / f"{number}.jpg"
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    assert main(["check", str(tmp_path / "photos")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("a Git LFS pointer") == 1
    assert "(18)" in out and "cat/0.jpg, cat/1.jpg, cat/2.jpg and 15 more: a Git LFS pointer" in out


def test_how_many_can_be_used_is_said_where_not_all_can(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn.write_bytes(torn.read_bytes() + made_of(labelled(0, b"<html>"), labelled(1, b"")).data)
    main(["check", "torn.rec"])
    assert "; 22 of 24 can be used;" in capsys.readouterr().out.splitlines()[1]


def test_several_record_files_are_looked_at_one_by_one(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("whole.rec").write_bytes(made_of(*(labelled(n % 2, png, id=n) for n, png in enumerate(PNGS))).data)
    assert main(["check", "whole.rec", "torn.rec"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fine: whole.rec: 24 image records"
    assert lines[lines.index("2 findings (2 errors): torn.rec: 22 image records") - 1] == ""
    assert main(["check", "torn.rec", "whole.rec", "--json", "--index"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [(report["path"], report["written"]["index"]) for report in document] == [
        ("torn.rec", "torn.idx"),
        ("whole.rec", "whole.idx"),
    ]


def test_a_pattern_of_record_files_is_those_files(torn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("whole.rec").write_bytes(made_of(*(labelled(n % 2, png, id=n) for n, png in enumerate(PNGS))).data)
    assert main(["check", "{whole,torn}.rec"]) == 1
    out = capsys.readouterr().out
    assert "whole.rec: 24 image records" in out and "(2 errors" in out and "torn.rec: 22 image records" in out


def test_several_sources_are_one_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "one", {"cat": 12, "dog": 12})
    two = write_folder(tmp_path / "two", {"cat": 15, "dog": 10}, size=(30, 20))
    [(path, _)] = pack([folder, two], tmp_path / "both")
    assert main(["check", str(folder), str(two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"fine: {folder} {two}: 2 sources, 49 images"
    assert lines[2] == "  2 classes: cat 27, dog 22"
    assert main(["check", str(path)]) == 0
    packed = capsys.readouterr().out.splitlines()
    assert packed[2] == lines[2]
    assert main(["check", str(folder), str(path)]) == 0
    assert "2 sources, 73 images" in capsys.readouterr().out


def test_an_address_with_a_password_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "https://me:pw@example.org/a.rec"]) == 2
    assert "https://...@example.org/a.rec holds a user or a password" in capsys.readouterr().err


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "data", {"cat": 12, "dog": 12})
    (folder / "cat" / "a\x1b[2J\udce9\n.jpg").write_text("no image")
    assert main(["check", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "cat/a?[2J\\xe9 .jpg: text" in out


def test_a_decoder_that_crashes_costs_one_image(torn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A decoder that crashes on one image, put in place of the real one in the children alone.
    (torn.parent / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'machine.worker_pool\\')' in ' '.join(sys.orig_argv):\n"
        "    from steadytrain.data.images import look\n"
        "    whole = look.decode_file\n"
        f"    bad = {PNGS[7]!r}\n"
        "    def decode_file(image, data):\n"
        "        return os.kill(os.getpid(), 11) if data == bad else whole(image, data)\n"
        "    look.decode_file = decode_file\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(torn.parent))
    command = [sys.executable, "-m", "steadytrain", "check", "torn.rec", "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert document["sound"] == 21
    assert [finding["detail"] for finding in document["findings"] if finding["kind"] == "damaged-image"] == [
        "the decoder crashed (SIGSEGV)"
    ]


def test_ctrl_c_ends_it_and_its_children(tmp_path: Path) -> None:
    many = made_of(*(labelled(n % 2, PNGS[n % 24] + bytes(n % 7), id=n) for n in range(40_000)))
    (tmp_path / "many.rec").write_bytes(many.data)
    command = [sys.executable, "-m", "steadytrain", "check", str(tmp_path / "many.rec"), "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watched = psutil.Process(process.pid)
        end = time.monotonic() + 60
        while len(children := watched.children()) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in error
    end = time.monotonic() + 60
    while (left := [child for child in children if _runs(child)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_reader_that_goes_away_is_no_error(torn: Path) -> None:
    script = f'"{sys.executable}" -m steadytrain check torn.rec 2>&1 | head -n 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "Traceback" not in done.stdout + done.stderr


def test_the_command_needs_no_torch(torn: Path) -> None:
    script = "import sys; from steadytrain.cli import main; main(['check', 'torn.rec'])"
    done = subprocess.run([sys.executable, "-c", f"{script}; sys.exit('torch' in sys.modules)"], capture_output=True)
    assert done.returncode == 0


def test_real_files_of_mxnet_take_every_damage_that_is_told(
    data_folder: Path, torn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = read_original(data_folder / "mxnet-rec" / "im2rec" / "photos40.rec")
    Path("shifted.rec").write_bytes(b"\xef\xbb\xbf" + original.data)
    assert main(["check", "shifted.rec"]) == 1
    assert "3 bytes, up to byte 3" in capsys.readouterr().out
    assert main(["check", "shifted.rec", "--salvage", "whole"]) == 1
    assert Path("whole.rec").read_bytes() == original.data
    assert Path("whole.idx").read_bytes() == (data_folder / "mxnet-rec" / "im2rec" / "photos40.idx").read_bytes()


def test_the_working_directory_itself_has_a_name_in_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "data", {"cat": 12, "dog": 12})
    monkeypatch.chdir(tmp_path / "data")
    assert main(["check", "."]) == 0
    assert capsys.readouterr().err.startswith("checking .: done=24 ")
