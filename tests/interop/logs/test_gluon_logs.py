"""Lines of Gluon's, GluonCV's, Horovod's and MLPerf's scripts become the figures of their epochs."""

# ruff: noqa: E501 - lines of logs are as long as they are
from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadytrain.cli import main
from steadytrain.format import NONE
from steadytrain.interop.logs import read_log
from steadytrain.reports.summary import Account

EPOCHS = range(3)


def lines(*templates: str) -> str:
    """Repeat lines for epochs 0 to 2; ``{a}`` grows from 0.1 by 0.1, ``{b}`` is 1 - ``{a}``, ``{s}`` are seconds."""
    return "\n".join(
        template.format(e=e, a=f"{0.1 + e / 10:.6f}", b=f"{0.9 - e / 10:.6f}", s=f"{40 + e}.500000")
        for e in EPOCHS
        for template in templates
    )


GLUON = lines(
    "INFO:root:Epoch[{e}] Batch [50]\tSpeed: 300.5 samples/sec\taccuracy=0.05, top_k_accuracy_5=0.2",
    "INFO:root:[Epoch {e}] training: accuracy={a}, top_k_accuracy_5=0.5",
    "INFO:root:[Epoch {e}] time cost: {s}",
    "INFO:root:[Epoch {e}] validation: accuracy={a}, top_k_accuracy_5={b}",
)
GLUONCV = lines(
    "Epoch[{e}] Batch [49]\tSpeed: 900.0 samples/sec\ttop1-err=0.95\ttop5-err=0.8\tlr=0.0{e}1",
    "[Epoch {e}] training: err-top1={b} err-top5=0.5",
    "[Epoch {e}] speed: 300 samples/sec\ttime cost: {s}",
    "[Epoch {e}] validation: err-top1={b} err-top5={a}",
)
TOP1_ERR = GLUONCV.replace("err-top1", "top1-err").replace("err-top5", "top5-err")
CIFAR = lines("INFO:root:[Epoch {e}] train={a} val={a} loss=1.5 time: {s}")
HOROVOD = lines(
    "[1,0]<stderr>:INFO:root:Epoch[{e}] Rank[0] Batch[99]\taccuracy=0.05\tlr=0.1",
    "[1,0]<stderr>:INFO:root:Epoch[{e}] Batch[99]\tSpeed: 310.00 samples/sec",
    "[1,0]<stderr>:INFO:root:Epoch[{e}] Rank[0] Batch[120]\tTime cost={s}\tTrain-accuracy={a}",
    "[1,0]<stderr>:INFO:root:Epoch[{e}]\tSpeed: 300.00 samples/sec",
    "[1,0]<stderr>:INFO:root:Epoch[{e}] Rank[0]\tValidation-accuracy={a}\tValidation-top_k_accuracy_5={b}",
)
HOROVOD_MNIST = lines(
    "INFO:root:[Epoch {e} Batch 100] Training: accuracy=0.05",
    "INFO:root:Epoch[{e}]\tSpeed=300.00 samples/s\tTime cost={s}",
    "INFO:root:Epoch[{e}]\tTrain: accuracy={a}\tValidation: accuracy={a}",
)
GLUON_MNIST = lines(
    "[Epoch {e} Batch 100] Training: accuracy=0.05",
    "[Epoch {e}] Training: accuracy={a}",
    "[Epoch {e}] Validation: accuracy={a}",
)
MLPERF_TEXT = lines(
    ":::MLPv0.5.0 resnet 15000{e}0000.5 (train.py:49) train_epoch: {e}",
    ':::MLPv0.5.0 resnet 15000{e}0040.5 (train.py:49) eval_accuracy: {{"epoch": {e}, "value": {a}}}',
)
MLPERF_JSON = "\n".join(
    f":::MLLOG {json.dumps({'namespace': '', 'time_ms': 1000 * at, 'event_type': 'x', 'key': key, 'value': value, 'metadata': {'epoch_num': e + 1}})}"
    for e in EPOCHS
    for at, key, value in (
        (100 * e, "epoch_start", None),
        (100 * e + 40, "epoch_stop", None),
        (100 * e + 50, "eval_accuracy", 0.1 + e / 10),
    )
)


def account(tmp_path: Path, text: str) -> Account:
    (tmp_path / "a.log").write_text(text)
    [run] = read_log(tmp_path / "a.log")
    return Account.of_log(run)


@pytest.mark.parametrize(
    ("text", "train_top1", "val_top5", "seconds", "images_per_second"),
    [
        pytest.param(GLUON, 0.3, 0.7, 42.5, 300.5, id="Gluon"),
        pytest.param(GLUONCV, 0.3, 0.7, 42.5, 300, id="GluonCV"),
        pytest.param(TOP1_ERR, 0.3, 0.7, 42.5, 300, id="GluonCV, errors named otherwise"),
        pytest.param(CIFAR, 0.3, None, 42.5, None, id="GluonCV on CIFAR"),
        pytest.param(HOROVOD, 0.3, 0.7, 42.5, 300, id="Horovod"),
        pytest.param(HOROVOD_MNIST, 0.3, None, 42.5, 300, id="Horovod on MNIST"),
        pytest.param(GLUON_MNIST, 0.3, None, None, None, id="Gluon on MNIST"),
        pytest.param(MLPERF_TEXT, None, None, 40.0, None, id="MLPerf 0.5"),
        pytest.param(MLPERF_JSON, None, None, 40.0, None, id="MLPerf since 0.7"),
    ],
)
def test_every_figure_of_an_epoch_is_that_of_its_own_last_line(
    tmp_path: Path,
    text: str,
    train_top1: float | None,
    val_top5: float | None,
    seconds: float | None,
    images_per_second: float | None,
) -> None:
    rows = account(tmp_path, text).epochs
    assert [row.epoch for row in rows] == [e + 1 for e in EPOCHS]
    assert [row.val_top1 for row in rows] == pytest.approx([0.1 + e / 10 for e in EPOCHS])
    last = rows[-1]
    found = [last.train_top1, last.val_top5, last.seconds, last.images_per_second]
    expected = [train_top1, val_top5, seconds, images_per_second]
    assert found == [None if value is None else pytest.approx(value) for value in expected]


def test_run_rate_is_of_whole_epochs(tmp_path: Path) -> None:
    assert account(tmp_path, GLUONCV).summary.speed.images_per_second == 300


def test_horovod_ranks_are_workers_and_their_speed_counts_once(tmp_path: Path) -> None:
    """Rank 0 writes the rate of all; each rank writes its own accuracy."""
    ranks = [line for line in HOROVOD.splitlines() for rank in range(4) if "Rank[0]" in line or rank == 0]
    own = [
        line.replace("Rank[0]", f"Rank[{i % 4}]").replace("[1,0]", f"[1,{i % 4}]") if "Rank" in line else line
        for i, line in enumerate(ranks)
    ]
    (tmp_path / "a.log").write_text("\n".join(own))
    [run] = read_log(tmp_path / "a.log")
    assert run.num_workers == 4
    assert {point.images_per_second for point in run.points if point.batch == 99} == {310.0}


def test_losses_that_a_line_has_beside_the_accuracy_are_shown(tmp_path: Path) -> None:
    last = account(tmp_path, CIFAR).epochs[-1]
    assert (last.train_loss, last.val_loss) == (1.5, None)


def test_lines_with_figures_that_are_not_understood_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(GLUON + "\nmy own accuracy: 0.5\nloss = 3\nnothing of interest 7\nepoch done\n")
    [run] = read_log(tmp_path / "a.log")
    assert run.notices == ["2 lines with figures not understood and left out, such as: my own accuracy: 0.5"]
    (tmp_path / "a.log").write_text(GLUON)
    assert read_log(tmp_path / "a.log")[0].notices == []


def test_a_benchmark_that_is_no_classifier_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(MLPERF_TEXT.replace("resnet", "ssd"))
    assert "MLPerf's ssd" in read_log(tmp_path / "a.log")[0].notices[0]


def test_a_file_that_cannot_be_read_does_not_end_a_report_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(GLUON)
    Path("b.log").write_text("no figures\n")
    for command in (
        ["report", "b.log", "a.log", "missing", "--json"],
        ["cost", "b.log", "a.log", "missing", "--price", "1", "--json"],
    ):
        assert main(command) == 0
        output = capsys.readouterr()
        assert [Path(run.get("directory", run.get("run"))).name for run in json.loads(output.out)["runs"]] == ["a.log"]
        assert "left out: b.log is no training log" in output.err and "left out: missing does not exist" in output.err
    assert main(["report", "b.log", "missing"]) == 2
    assert "b.log is no training log" in (error := capsys.readouterr().err) and "missing does not exist" in error


PUBLISHED = "start with arguments Namespace(batch_size=1408, gpus='0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15', network='inception-v3', num_epochs=100)\n"


def test_the_published_bill_of_imagenet_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 epochs of 30 minutes on p2.16xlarge: the article says 720 dollars, about 80 on spot."""
    (tmp_path / "a.log").write_text(
        PUBLISHED + "\n".join(f"Epoch[{e}] Train-accuracy=0.1\nEpoch[{e}] Time cost=1800.000" for e in EPOCHS)
    )
    assert main(["cost", str(tmp_path / "a.log"), "--instance", "p2.16xlarge", "--json"]) == 0
    [cost] = json.loads(capsys.readouterr().out)["runs"]
    assert (cost["so_far"], cost["at_end"], cost["device_seconds"]) == (
        pytest.approx(21.6),
        pytest.approx(720),
        16 * 5400,
    )
    assert min(row["money"] for row in cost["spot"]) == pytest.approx(80)


def test_a_log_without_times_has_no_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(GLUON_MNIST)
    assert main(["cost", str(tmp_path / "a.log"), "--price", "1"]) == 2
    assert "says neither how long an epoch took nor when" in capsys.readouterr().err


def _of_gpus(num: int, images_per_second: float) -> str:
    gpus = ",".join(map(str, range(num)))
    start = f"start with arguments Namespace(batch_size={32 * num}, gpus='{gpus}', network='resnet', num_epochs=1)\n"
    return (
        start + f"Epoch[0] Batch [20]\tSpeed: {images_per_second} samples/sec\taccuracy=0.1\nEpoch[0] Time cost=9.5\n"
    )


def test_two_measured_runs_say_how_efficient_eight_devices_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published 7.7 of 8 GPUs are 96 %."""
    monkeypatch.chdir(tmp_path)
    Path("one.log").write_text(_of_gpus(1, 21))
    Path("eight.log").write_text(_of_gpus(8, 161.7))
    assert main(["scale", "eight.log", "one.log"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["one.log", "1", NONE, "21.0", "1", "of", "1", "100", "%"],
        ["eight.log", "8", NONE, "161.7", "7.7", "of", "8", "96", "%"],
    ]
    Path("unsaid.log").write_text(GLUONCV)
    assert main(["scale", "unsaid.log@32", "one.log", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][1]["efficiency"] == pytest.approx(300 / 21 / 32)
    for words, message in (
        (["unsaid.log", "one.log"], "behind the name, such as unsaid.log@8"),
        (["one.log", "one.log"], "all runs have 1 device:"),
        (["one.log", "eight.log", "--procs", "2"], "--procs belongs to a prediction"),
    ):
        assert main(["scale", *words]) == 2
        assert message in capsys.readouterr().err
