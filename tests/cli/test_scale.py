"""``steady scale`` as it is typed: from an earlier measurement, and with real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from steadytrain.cli import main


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A document as an earlier command has printed it: 0.4 s an update, 100 MB of gradients."""
    gradients = [[1_000_000, (k + 1) / 100] for k in range(100)]
    figures: dict[str, Any] = {"model": "timm/resnet50", "device": "cpu", "threads": 2, "parameters": 25_000_000}
    figures |= {"batch_size": 32, "precision": "fp32", "forward_seconds": 0.1, "backward_seconds": 0.28}
    figures |= {"update_seconds": 0.02, "fixed_seconds": 0.01, "spread": 0.0, "gradients": gradients}
    path = tmp_path / "scale.json"
    path.write_text(json.dumps({"one": figures, "fitted": None, "epochs": 90.0}))
    return path


def test_a_person_reads_tables_of_80_columns(
    earlier: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--devices", "64", "--link", "10GbE", "--per-machine", "8", "--price", "32.77", "--num-train", "1281167"]
    assert main(["scale", "--measured", str(earlier), *words, "--loader-rate", "1500", "--spread", "0.04"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "timm/resnet50: 25,000,000 parameters, 100.0 MB of gradients, on cpu by 2 threads in fp32" in text
    assert "32 images on each device" in text
    assert (
        "updates vary by 4 %" in text
        and text.count("recommended: ") == 1
        and "loader: 1,500 images/s a machine" in text
    )
    head = next(line for line in lines if line.lstrip().startswith("devices"))
    assert head.split()[:3] == ["devices", "images/s", "efficiency"] and head.split()[-2:] == ["time", "cost"]
    first = next(line.split() for line in lines if re.match(r" +1  ", line))
    assert first[1:4] == ["80.0", "100", "%"]


def test_a_document_holds_every_figure_and_can_be_asked_again(
    earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["scale", "--measured", str(earlier), "--devices", "4", "--json", "--price", "2"]
    assert main([*words, "--link", "0.1 ms,1 Gbit/s"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in first["weak"]] == [1, 2, 4]
    four = first["weak"][-1]
    assert four["images_per_second"] == pytest.approx(4 * 32 / four["step_seconds"])
    assert four["cost_per_million"] == pytest.approx(2 * 4 * 1e6 / four["images_per_second"] / 3600)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(first))
    assert main(["scale", "--measured", str(again), "--devices", "4", "--json", "--link", "100GbE"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["one"] == first["one"]
    assert second["weak"][-1]["images_per_second"] > four["images_per_second"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "token-ring"], "the link 'token-ring' is unknown: name one of 1GbE"),
        (["--link", "1GbE", "--devices", "0"], "--devices is 0; it must be from 1 to 4096"),
        (["--link", "1GbE", "--size", "0"], "--size is 0; it must be from 1 to 4096"),
        (["--link", "1GbE", "--channels", "0"], "--channels is 0; it must be from 1 to 1024"),
        (["--link", "1GbE", "--classes", "-1"], "--classes is -1; it must be from 1 to 1000000"),
        (["--link", "1GbE", "--price", "0"], "--price is 0; it must be above 0"),
        (["--link", "1GbE", "--spread", "2"], "--spread is 2; it must be from 0 to 1"),
        (["--link", "1GbE", "--epochs", "3"], "--epochs needs the number of images: give --num-train or data"),
        (["--link", "nvlink", "--per-machine", "4"], "give the network as --link, such as 10GbE"),
        ([], "has no measured link between ranks: add --link, such as --link 10GbE"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    earlier: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["scale", "--measured", str(earlier), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert main(["scale", "--measured", str(other), "--link", "1GbE"]) == 2
    assert "is not a document of steady scale --json: measure again" in capsys.readouterr().err


def test_a_network_and_a_link_have_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--link", "1GbE"]) == 2
    assert "name the network" in capsys.readouterr().err
    assert main(["scale", "--model", "resnet20"]) == 2
    assert "nothing says what joins the devices: give --link 1GbE" in capsys.readouterr().err


def test_one_device_is_measured_with_its_gradients_in_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "digits", "--size", "8", "--channels", "1", "--classes", "10", "--batch-size", "16"]
    assert main(["scale", *words, "--device", "cpu", "--link", "1GbE", "--seconds", "0.2", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    alone = document["one"]
    assert sum(num for num, _ in alone["gradients"]) == 4 * alone["parameters"]
    ready = [share for _, share in alone["gradients"]]
    assert ready == sorted(ready) and ready[0] > 0 and ready[-1] <= 1
    assert min(alone["forward_seconds"], alone["backward_seconds"]) > 0
    step = alone["forward_seconds"] + alone["backward_seconds"] + alone["update_seconds"]
    assert document["weak"][0]["step_seconds"] == pytest.approx(step)


@pytest.mark.slow
def test_the_link_between_two_ranks_here_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "resnet20", "--classes", "10", "--batch-size", "8", "--device", "cpu", "--procs", "2"]
    assert main(["scale", *words, "--devices", "2", "--seconds", "0.5", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["link"]["name"] == "gloo here" and [row["devices"] for row in document["weak"]] == [1, 2]


@pytest.mark.slow
def test_an_unknown_network_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--model", "resnet2O", "--link", "1GbE", "--seconds", "1"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "resnet2O" in line and "there is no" in line]
    assert len(errors) == 1


def test_an_interrupt_ends_without_a_traceback() -> None:
    words = ["scale", "--model", "resnet20", "--size", "32", "--link", "10GbE", "--seconds", "60"]
    child = subprocess.Popen(
        [sys.executable, "-m", "steadytrain", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stderr is not None
    assert "measuring resnet20 on one device" in child.stderr.readline()
    time.sleep(1)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in errors


def test_a_busy_machine_is_told(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(earlier.read_text())
    document["one"]["spread"] = 0.45
    earlier.write_text(json.dumps(document))
    assert main(["scale", "--measured", str(earlier), "--link", "100GbE", "--json"]) == 0
    printed = capsys.readouterr()
    assert "updates vary by 45 % here" in printed.err and "--spread 0.05" in printed.err
    assert json.loads(printed.out)["weak"][-1]["limit"] == "slowest"
    assert main(["scale", "--measured", str(earlier), "--link", "100GbE", "--json", "--spread", "0"]) == 0
    printed = capsys.readouterr()
    assert not printed.err and json.loads(printed.out)["weak"][-1]["limit"] == "compute"
