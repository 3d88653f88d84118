"""Each kind of log becomes a run; what is around its lines, and how they are written, changes nothing."""

# ruff: noqa: E501 - lines of logs are as long as they are
from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reports.runs import finished

from steadytrain.cli import main
from steadytrain.errors import DataError, InputError, RunError
from steadytrain.events import EpochTrained, Evaluated, Event, Started
from steadytrain.interop.logs import LogRun, format_epochs, read_log
from steadytrain.interop.mxnet.speedometer import Speedometer
from steadytrain.reports.charts import charts
from steadytrain.reports.files import find_all
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import comma_separated, facts, markdown, to_json

MXNET = "\n".join(
    f"INFO:root:Epoch[{epoch}] {line}"
    for epoch in range(3)
    for line in (
        f"Batch [20]\tSpeed: 100.00 samples/sec\tTrain-accuracy={0.1 * epoch + 0.1:.6f}",
        f"Batch [40]\tSpeed: 120.00 samples/sec\tTrain-accuracy={0.1 * epoch + 0.2:.6f}",
        f"Train-accuracy={0.1 * epoch + 0.15:.6f}",
        f"Time cost={10 + epoch}.500",
        f"Validation-accuracy={0.2 * epoch + 0.25:.6f}",
    )
)
TIMM = """Model resnet50 created, param count:25557032
Scheduled epochs: 2
Train: 0 [   0/33 (  0%)]  Loss: 8.863 (8.86)  Time: 1.663s,    9.62/s  (1.663s,    9.62/s)  LR: 5.000e-04  Data: 0.460 (0.460)
Train: 0 [  32/33 (100%)]  Loss: 1.336 (4.00)  Time: 0.934s,    8.57/s  (0.218s,   36.68/s)  LR: 5.000e-04  Data: 0.000 (0.014)
Test: [   0/29]  Time: 0.560 (0.560)  Loss:  0.6912 (0.6912)  Acc@1: 87.5000 (87.5000)  Acc@5: 100.0000 (100.0000)
Test: [  29/29]  Time: 0.041 (0.064)  Loss:  0.5951 (0.5882)  Acc@1: 81.2500 (87.5000)  Acc@5: 100.0000 (99.3750)
Current checkpoints:
 ('./output/train/checkpoint-0.pth.tar', 87.5)
Train: 1 [   0/33 (  0%)]  Loss: 0.5741 (0.574)  Time: 0.645s,   24.82/s  (0.645s,   24.82/s)  LR: 1.000e-04  Data: 0.477 (0.477)
Train: 1 [  32/33 (100%)]  Loss: 0.5411 (0.313)  Time: 0.089s,   90.32/s  (0.166s,   48.17/s)  LR: 1.000e-04  Data: 0.000 (0.016)
Test: [  29/29]  Time: 0.043 (0.066)  Loss:  0.1036 (0.1500)  Acc@1: 100.0000 (95.0000)  Acc@5: 100.0000 (100.0000)
Test (EMA): [  29/29]  Time: 0.043 (0.066)  Loss:   0.1036 (0.1400)  Acc@1: 100.000 ( 96.000)  Acc@5: 100.000 (100.000)
*** Best metric: 95.0 (epoch 1)
"""
TORCHVISION = """| distributed init (rank 0): env://
Namespace(data_path='/data/imagenet', model='resnet18', batch_size=32, lr=0.1, epochs=2, momentum=0.9, world_size=8)
Epoch: [0]  [   0/5005]  eta: 4:33:21  lr: 0.1  img/s: 48.85  loss: 7.0812 (7.0812)  acc1: 0.0000 (0.0000)  acc5: 0.0000 (0.0000)  time: 4.0  data: 2.0  max mem: 7031
Epoch: [0]  [5004/5005]  eta: 0:00:00  lr: 0.1  img/s: 60.00  loss: 3.9 (5.1)  acc1: 25.0 (12.5)  acc5: 43.75 (30.0)  time: 0.5  data: 0.1  max mem: 7031
Epoch: [0] Total time: 0:43:12
Test:   [  0/196]  eta: 0:05:12  loss: 3.0 (3.0)  acc1: 40.0 (40.0)  acc5: 60.0 (60.0)  time: 1.6  data: 1.0  max mem: 7031
Test:  Total time: 0:00:20
Test:  Acc@1 38.758 Acc@5 62.078
Epoch: [1]  [5004/5005]  eta: 0:00:00  lr: 0.01  img/s: 61.00  loss: 2.9 (3.1)  acc1: 45.0 (42.5)  acc5: 63.75 (60.0)  time: 0.5  data: 0.1  max mem: 7031
Epoch: [1] Total time: 0:42:12
Test:  Acc@1 51.5 Acc@5 75.25
Training time 1:25:44
"""
EXAMPLE = """Epoch: [0][   1/5005]\tTime  3.27 ( 3.27)\tData  2.02 ( 2.02)\tLoss 7.08e+00 (7.08e+00)\tAcc@1   0.00 (  0.00)\tAcc@5   0.39 (  0.39)
Epoch: [0][5005/5005]\tTime  0.27 ( 0.30)\tData  0.02 ( 0.03)\tLoss 4.08e+00 (5.08e+00)\tAcc@1  20.00 ( 10.00)\tAcc@5  40.39 ( 30.39)
Test: [196/196]\tTime  0.1 ( 0.2)\tLoss 3.2e+00 (3.5e+00)\tAcc@1  30.00 ( 31.00)\tAcc@5  50.00 ( 51.00)
 *   Acc@1 31.758 Acc@5 51.078
"""
DLLOGGER = """DLLL {"timestamp": "1588770840.0", "elapsedtime": "0.1", "type": "LOG", "step": "PARAMETER", "data": {"arch": "resnet50", "epochs": 1, "batch_size": 256, "lr": 2.0}}
DLLL {"timestamp": "1588770840.1", "type": "METADATA", "metric": "train.loss", "metadata": {"unit": null}}
DLLL {"timestamp": "1588770850.0", "type": "LOG", "step": [0, 9], "data": {"train.loss": 7.0, "train.total_ips": 2400.5, "train.lr": 0.25, "train.data_time": 0.1, "train.compute_time": 0.3}}
DLLL {"timestamp": "1588770950.0", "type": "LOG", "step": [0, 4999], "data": {"train.loss": 5.0, "train.total_ips": 2500.5, "train.lr": 0.5}}
DLLL {"timestamp": "1588770960.0", "type": "LOG", "step": [0, 5003, 10], "data": {"val.loss": 4.0, "val.top1": 20.0}}
DLLL {"timestamp": "1588770970.0", "type": "LOG", "step": [0], "data": {"train.loss": 6.1, "val.loss": 4.5, "val.top1": 22.5, "val.top5": 45.0}}
DLLL {"timestamp": "1588770971.0", "type": "LOG", "step": [], "data": {"train.loss": 6.1, "val.top1": 22.5}}
"""
LIGHTNING = """epoch,step,train_loss_step,train_loss_epoch,val_acc,val_loss
0,49,2.5,,,
0,99,1.5,,,
0,99,,2.0,,
0,99,,,0.5,1.25
1,149,1.0,,,
1,199,0.5,,,
1,199,,0.75,,
1,199,,,0.75,0.5
"""
KERAS = "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.25,2.0,0.5,1.5\n1,0.75,1.0,0.625,1.25\n"
SUMMARY = "epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n0,6.5,6.25,0.875,3.5,0.05\n1,3.5,3.25,50.5,75.5,0.01\n"
JSON_LINES = (
    '{"train_lr": 1e-06, "train_loss": 6.5, "test_loss": 6.0, "test_acc1": 5.5, "test_acc5": 12.5, "epoch": 0}\n'
    '{"train_lr": 1e-03, "train_loss": 5.5, "test_loss": 5.0, "test_acc1": 25.5, "test_acc5": 42.5, "epoch": 1}\n'
)
KINDS = {
    "MXNet": MXNET,
    "timm": TIMM,
    "torchvision": TORCHVISION,
    "PyTorch ImageNet example": EXAMPLE,
    "NVIDIA DLLogger": DLLOGGER,
    "Lightning": LIGHTNING,
    "Keras": KERAS,
    "JSON lines": JSON_LINES,
}


def read(tmp_path: Path, text: str | bytes, name: str = "a.log") -> list[LogRun]:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path)


def account(log: LogRun) -> Account:
    return Account.of_log(log)


@pytest.mark.parametrize(
    ("kind", "train_loss", "val_loss", "val_top1", "val_top5", "epochs"),
    [
        ("MXNet", None, None, 0.65, None, 3),
        ("timm", 0.313, 0.14, 0.96, 1.0, 2),
        ("torchvision", 3.1, None, 0.515, 0.7525, 2),
        ("PyTorch ImageNet example", 5.08, 3.5, 0.31758, 0.51078, 1),
        ("NVIDIA DLLogger", 6.1, 4.5, 0.225, 0.45, 1),
        ("Lightning", 0.75, 0.5, 0.75, None, 2),
        ("Keras", 1.0, 1.25, 0.625, None, 2),
        ("JSON lines", 5.5, 5.0, 0.255, 0.425, 2),
    ],
)
def test_each_kind_is_known_by_its_lines(
    tmp_path: Path,
    kind: str,
    train_loss: float | None,
    val_loss: float | None,
    val_top1: float,
    val_top5: float | None,
    epochs: int,
) -> None:
    (log,) = read(tmp_path, KINDS[kind], "named.bin")
    row = account(log).epochs[-1]
    assert log.format == kind
    assert row.epoch == epochs == len(account(log).epochs)
    approx = [None if value is None else pytest.approx(value) for value in (train_loss, val_loss, val_top1, val_top5)]
    assert [row.train_loss, row.val_loss, row.val_top1, row.val_top5] == approx


def test_timms_table_is_in_percents_and_takes_the_arguments_beside_it(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("model: vit_base\nepochs: 2\nbatch_size: 64\naa: rand-m9\nmean: null\n")
    (log,) = read(tmp_path, SUMMARY)
    assert (log.format, log.epochs[0].val["top1"], log.epochs[1].val["top5"]) == ("timm", [0.00875], [0.755])
    assert [point.lr for point in log.points] == [0.05, 0.01]
    assert account(log).summary.setup.model == "vit_base" and account(log).summary.course.status == "finished"


def test_a_value_of_many_brackets_beside_a_log_is_text(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text(f"model: vit_base\nnote: {'[' * 100_000}\n")
    (log,) = read(tmp_path, SUMMARY)
    assert log.settings["model.name"] == "vit_base"


def test_a_batch_of_unknown_devices_has_no_shares(tmp_path: Path) -> None:
    lines = [("global_batch_size", 1664), ("run_start", None), ("epoch_start", 1), ("eval_accuracy", 0.5)]
    text = [json.dumps({"key": key, "value": v, "time_ms": 1, "metadata": {"epoch_num": 1}}) for key, v in lines]
    (log,) = read(tmp_path, "".join(f":::MLLOG {line}\n" for line in text))
    assert facts(account(log).summary)["batch size"] == "1,664"


def test_speeds_times_and_arguments_are_what_the_lines_say(tmp_path: Path) -> None:
    timm, vision, nvidia = (account(read(tmp_path, text)[0]) for text in (TIMM, TORCHVISION, DLLOGGER))
    assert (timm.summary.setup.parameters, timm.summary.setup.batch_size, timm.summary.setup.lr) == (
        25_557_032,
        16,
        None,
    )
    assert timm.epochs[0].seconds == pytest.approx(0.218 * 33)
    assert [event.lr for event in timm.history.logged] == [5e-4, 5e-4, 1e-4, 1e-4]
    assert vision.epochs[0].seconds == 43 * 60 + 12
    assert vision.history.logged[0].images_per_second == pytest.approx(8 * 48.85)  # of eight processes
    assert vision.history.logged[0].wait_share == pytest.approx(0.5)
    assert (vision.summary.setup.batch_size, vision.summary.setup.lr, vision.summary.setup.model) == (
        256,
        0.1,
        "resnet18",
    )
    assert vision.summary.progress.steps == 2 * 5005 and vision.ledger.seconds["evaluation"] == 20
    assert nvidia.summary.speed.images_per_second == pytest.approx(2450.5)
    assert nvidia.summary.course.began == 1588770850.0


@pytest.mark.parametrize("kind", ["MXNet", "timm", "torchvision", "NVIDIA DLLogger"])
def test_text_around_the_lines_changes_nothing(tmp_path: Path, kind: str) -> None:
    text = KINDS[kind]
    plain = markdown([account(read(tmp_path, text)[0])])
    lines = text.splitlines()
    garbage = [f"{line}\nwarnings.warn('x')\n\x00\xff\n[=====>    ] 50%\r\x1b[31mred\x1b[0m" for line in lines]
    variants: dict[str, bytes] = {
        "Windows": "\r\n".join(lines).encode(),
        "PowerShell": "\r\n".join(lines).encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "garbage": "\n".join(garbage).encode("latin-1"),
        "coloured": "\n".join(f"\x1b[32m{line}\x1b[0m" for line in lines).encode(),
        "gzip": gzip.compress(text.encode()),
        "cut last line": (text.rstrip("\n") + "\n" + lines[-1][: len(lines[-1]) // 3]).encode(),
    }
    for name, data in variants.items():
        assert markdown([account(read(tmp_path, data)[0])]) == plain, name


def test_a_damaged_gzip_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    data = gzip.compress("\n".join(f"{MXNET}\nnoise {i}" for i in range(5000)).encode() + b"x" * 100, 1)
    log = read(tmp_path, data[: len(data) // 2])[0]
    assert log.epochs[0].val["top1"] and "cut short or damaged" in log.notices[-1]


@pytest.mark.parametrize(
    "prefix",
    [
        "2018-03-07 05:23:13,528 Node[{}] ",
        "{}: INFO:root:",
        "[1,{}]<stdout>:",
        "gpu{}.example.org 4711{} | 2018-03-07T05:23:13 ",
        "[rank{}]: ",
    ],
)
def test_workers_that_name_themselves_are_counted_and_averaged(tmp_path: Path, prefix: str) -> None:
    lines = [line.removeprefix("INFO:root:") for line in MXNET.splitlines()]
    mixed = [f"{prefix.format(rank, rank)}{line}" for line in lines for rank in range(3)]
    (log,) = read(tmp_path, "\n".join(mixed))
    assert (log.num_workers, sorted(log.epochs)) == (3, [0, 1, 2])
    assert account(log).epochs[2].val_top1 == pytest.approx(0.65)
    assert account(log).history.logged[0].images_per_second == pytest.approx(3 * 100)


def test_several_loggers_of_a_worker_count_once(tmp_path: Path) -> None:
    names = {
        "Batch": "mxnet.Callback$Speedometer",
        "Train": "mxnet.module.BaseModule",
        "Time": "mxnet.module.BaseModule",
    }
    lines = [line.removeprefix("INFO:root:") for line in MXNET.splitlines()]
    text = "\n".join(f"INFO {names.get(line.split()[1][:5].rstrip('-'), 'mxnet.Validation')}: {line}" for line in lines)
    (log,) = read(tmp_path, text)
    assert (log.num_workers, log.points[0].images_per_second) == (1, 100)


def test_metrics_that_are_not_shown_are_named(tmp_path: Path) -> None:
    (log,) = read(
        tmp_path, "INFO:root:Epoch[0] Batch [20]\tSpeed: 6.41 samples/sec\tTrain-RPNAcc=0.78,\tRPNL1Loss=2.6,"
    )
    assert log.notices == ["metrics that are not shown: RPNAcc, RPNL1Loss"]
    assert account(log).summary.course.why == "the log ends within epoch 1"


def test_first_of_several_losses_is_shown_with_its_name(tmp_path: Path) -> None:
    speed = "INFO:root:Epoch[0] Batch [0-20]\tSpeed: 64.00 samples/sec\taccuracy=0.5\tcross-entropy=2.0\tloss=9.0"
    old = "INFO:root:Epoch[0] Batch [40]\tSpeed: 64.00 samples/sec\tTrain-cross-entropy=1.0"
    ends = [f"INFO:root:Epoch[0] Train-{metric}" for metric in ("accuracy=0.5", "cross-entropy=1.5", "loss=7.5")]
    ends += [f"INFO:root:Epoch[0] Validation-{metric}" for metric in ("accuracy=0.5", "cross-entropy=1.25", "loss=8.5")]
    (log,) = read(tmp_path, "\n".join((speed, old, old.replace("cross-entropy=1", "loss=8"), *ends)))
    [row] = account(log).epochs
    assert (row.train_loss, row.val_loss, log.num_workers) == (1.5, 1.25, 1)
    assert [point.loss for point in log.points] == [2.0, 1.0]
    assert log.notices == ["metrics that are not shown: loss (the loss that is shown is cross-entropy)"]
    table = format_epochs(log, ["loss", "cross-entropy"], markdown=False)
    assert table.splitlines()[1].split("\t")[1:5] == ["7.500000", "1.500000", "8.500000", "1.250000"]
    with pytest.raises(InputError, match=r"no metric 'los': it has accuracy, cross-entropy, loss\. Did you"):
        format_epochs(log, ["los"])


def test_missing_epochs_do_not_end_a_run(tmp_path: Path) -> None:
    lines = [line for line in MXNET.splitlines() if "Epoch[1]" not in line]
    for text in ("\n".join(lines), "\n".join(line.replace("INFO:root:", "Node[0] ") for line in lines)):
        (log,) = read(tmp_path, text)
        assert [row.val_top1 for row in account(log).epochs] == [0.25, 0.65]


def test_runs_one_after_the_other_in_one_file_are_several(tmp_path: Path) -> None:
    other = MXNET.replace("Validation-accuracy=0.65", "Validation-accuracy=0.75")
    first, second = read(tmp_path, f"{MXNET}\n{other}")
    assert [account(log).summary.name for log in (first, second)] == ["a.log", "a.log#2"]
    assert [account(log).epochs[2].val_top1 for log in (first, second)] == [pytest.approx(0.65), pytest.approx(0.75)]
    for text in (TIMM, KERAS, TORCHVISION):
        assert len(read(tmp_path, text + text)) == 2


def test_an_epoch_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    lines = MXNET.splitlines()
    again = "\n".join(lines[5:]).replace("Validation-accuracy=0.45", "Validation-accuracy=0.5")
    text = f"{MXNET}\nINFO:root:start with arguments Namespace(load_epoch=1)\n{again}"
    (log,) = read(tmp_path, text)
    assert [facts.val["top1"] for facts in log.epochs.values()] == [[0.25], [0.5], [0.65]]
    assert log.num_workers == 1


@pytest.mark.parametrize(
    "text", ["", "hello\n" * 100, "\x00" * 5000, '{"a": 1}\n', "a,b,c\n1,2,3\n", "Epoch [1/10], Loss: 2\n"]
)
def test_file_that_is_no_log_is_refused_with_the_known_formats(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    assert main(["report", str(path), "-o", "-"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(
        name in err for name in ("x.txt is no training log", "MXNet", "timm", "torchvision", "DLLogger", "Keras")
    )


def test_a_log_stands_beside_a_run_of_ours_in_one_table_and_one_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "runs", "ours")
    Path("old.log").write_text(MXNET)
    Path("metrics.csv").write_text(LIGHTNING)
    assert main(["report", "runs/ours", "old.log", "metrics.csv", "-o", "both.html"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["ours", "old.log", "metrics.csv"]
    assert "65.0 %" in out and "old.log: MXNet log" in err and "metrics.csv: Lightning log" in err
    text = Path("both.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    top1 = next(figure for figure in data["figures"] if figure["id"] == "top1")
    assert {trace["run"] for trace in top1["traces"] if trace["role"] == "val" and trace["y"]} == {0, 1, 2}
    assert main(["report", "runs/ours", "old.log", "--json"]) == 0
    ours, old = json.loads(capsys.readouterr().out)["runs"]
    assert (ours["log"], old["log"]) == ("", "MXNet log") and old["best"]["top1"] == 0.65


def test_a_folder_without_runs_stands_for_the_logs_in_it(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text(MXNET)
    (tmp_path / "a.csv").write_text(KERAS)
    (tmp_path / "c.log.gz").write_bytes(gzip.compress(MXNET.encode()))
    (tmp_path / "d.log").write_bytes(MXNET.encode("utf-16"))
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "checkpoint.pth").write_bytes(bytes(4000) + MXNET.encode())
    sources = find_all([tmp_path])
    assert [run.directory.name for run in sources.runs] == ["a.csv", "b.log", "c.log.gz", "d.log"]
    assert any("left out" in note and "notes.txt" in note for note in sources.notes)


def test_a_run_is_still_named_by_its_folder(tmp_path: Path) -> None:
    run = finished(tmp_path)
    with pytest.raises(RunError, match="name the run's folder"):
        find_all([run.directory / "events.jsonl"])


def test_what_a_run_writes_as_mxnet_did_is_read_back(tmp_path: Path) -> None:
    run = finished(tmp_path / "runs", "ours", epochs=3)
    speedometer = Speedometer()
    lines = [f"2018-03-07 05:23:13,528 Node[0] {line}" for event in run.events() for line in speedometer.lines(event)]
    (log,) = read(tmp_path, "\n".join(lines))
    ours, back = Account.of(run), account(log)
    for name in ("top1", "top5", "loss"):
        scores = [getattr(event, name) for event in ours.history.evaluated]
        assert [getattr(event, name) for event in back.history.evaluated] == pytest.approx(scores, abs=1e-6)
    rates = [line.images_per_second for line in ours.history.logged]
    assert [line.images_per_second for line in back.history.logged] == pytest.approx(rates, abs=0.01)


def _mxnet_log(
    *, steps: int, evaluations: list[int], trained: list[tuple[int, int]], per_epoch: float = 10.0
) -> list[str]:
    """The lines of a run of 40 seconds an epoch, with evaluations of 9 seconds and a start of 30."""
    speedometer, lines, time = Speedometer(), list[str](), 30.0
    events: list[Event] = [Started(time=0, digest="", step=0, steps=steps, steps_per_epoch=per_epoch, batch_size=8)]
    for step in range(steps + 1):
        time += 4.0 * (step > 0)
        for epoch, at in trained:
            if at == step:
                rate = 8 * per_epoch / 40
                n = round(8 * per_epoch)
                events.append(
                    EpochTrained(
                        time=time, step=step, epoch=epoch, n=n, loss=1.0, top1=0.1 * epoch, images_per_second=rate
                    )
                )
        if step in evaluations:
            time += 9.0
            epoch_now = step / per_epoch
            events.append(
                Evaluated(
                    time=time, step=step, epoch=epoch_now, n=50, loss=1.0, top1=0.01 * step, top5=None, seconds=9.0
                )
            )
    for event in events:
        lines += speedometer.lines(event)
    return lines


@pytest.mark.parametrize(
    ("steps", "evaluations", "trained", "per_epoch", "validations"),
    [
        pytest.param(
            20, [0, 10, 20], [(1, 10), (2, 20)], 10.0, [(0, 0.1), (1, 0.2)], id="a probe before the first update"
        ),
        pytest.param(20, [5, 10, 15, 20], [(1, 10), (2, 20)], 10.0, [(0, 0.1), (1, 0.2)], id="two in an epoch"),
        pytest.param(
            20, [10, 20], [(1, 5), (1, 10), (2, 20)], 10.0, [(0, 0.1), (1, 0.2)], id="an epoch told of in parts"
        ),
        pytest.param(19, [10, 19], [(1, 10), (2, 19)], 9.4, [(0, 0.1), (1, 0.19)], id="batches that cross epochs"),
        pytest.param(5, [0, 5], [(1, 5)], 10.0, [(0, 0.05)], id="a run of half an epoch"),
    ],
)
def test_an_epoch_of_mxnets_log_has_one_validation_and_the_time_of_its_updates(
    steps: int,
    evaluations: list[int],
    trained: list[tuple[int, int]],
    per_epoch: float,
    validations: list[tuple[int, float]],
    tmp_path: Path,
) -> None:
    lines = _mxnet_log(steps=steps, evaluations=evaluations, trained=trained, per_epoch=per_epoch)
    assert [line for line in lines if "Validation-accuracy" in line] == [
        f"Epoch[{e}] Validation-accuracy={top1:f}" for e, top1 in validations
    ]
    for name in ("Train-accuracy", "Time cost"):
        assert [line.partition("=")[0] for line in lines if name in line] == [
            f"Epoch[{e}] {name}" for e, _ in validations
        ]
    assert {line.partition("=")[2] for line in lines if "Time cost" in line} <= {"40.000", "39.894"}, (
        "neither start nor evaluation"
    )
    (log,) = read(tmp_path, "\n".join(lines))
    assert [row.val_top1 for row in account(log).epochs] == pytest.approx([top1 for _, top1 in validations])


def everything(logs: list[LogRun]) -> None:
    """All that a report makes of logs, but for the script of its charts."""
    accounts = [Account.of_log(log, f"run {i}") for i, log in enumerate(logs)]
    json.loads(to_json(accounts), parse_constant=pytest.fail)
    assert markdown(accounts) and comma_separated(accounts)
    json.dumps(charts([account.history for account in accounts]), allow_nan=False)


LINES = sorted({line for text in [*KINDS.values(), SUMMARY] for line in text.splitlines()})
TEXTS = st.lists(st.one_of(st.sampled_from(LINES), st.text(max_size=40)), max_size=30).map("\n".join)


@given(text=TEXTS, cut=st.integers(0, 3000), swap=st.tuples(st.characters(), st.characters()))
def test_whatever_a_file_holds_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, cut: int, swap: tuple[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.log"
    path.write_bytes(text[: len(text) - cut].replace(*swap).encode("utf-8", "surrogatepass"))
    try:
        logs = read_log(path)
    except InputError:
        return
    everything(logs)


NUMBERS = st.sampled_from(["nan", "inf", "-1", "0", "1e308", "9" * 40, "1e-05", "0x1", ""])


@given(numbers=st.lists(NUMBERS, min_size=1, max_size=6), kind=st.sampled_from([*KINDS, "SUMMARY"]), seed=st.randoms())
def test_absurd_numbers_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[str], kind: str, seed: Callable[[], float]
) -> None:
    import random
    import re

    chance = random.Random(str(numbers) + kind)
    text = re.sub(
        r"\d+(?:\.\d+)?",
        lambda match: chance.choice(numbers) if chance.random() < 0.3 else match[0],
        KINDS.get(kind, SUMMARY),
    )
    path = tmp_path_factory.getbasetemp() / "absurd.log"
    path.write_text(text)
    try:
        logs = read_log(path)
    except DataError:
        return
    everything(logs)


def test_names_and_notices_of_a_log_cannot_leave_their_place_on_the_page(tmp_path: Path) -> None:
    text = "INFO:root:start with arguments Namespace(network='<script>alert(1)</script>')\n" + MXNET
    html = page([account(read(tmp_path, text)[0])])
    assert "<script>alert(1)" not in html and "&lt;script&gt;alert(1)" in html


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2019-03-07T05:23:13.528123456Z"}),
        lambda line: json.dumps({"timestamp": 1551936193528, "message": line}),
        lambda line: line.replace("\t", "#011"),
        lambda line: f"\x1b[32m{line}\x1b(B\x1b[m\x1b]0;train.py\x07",
    ],
)
def test_a_log_that_another_program_wrapped_is_the_same(tmp_path: Path, wrapped: Callable[[str], str]) -> None:
    text = "\n".join(map(wrapped, MXNET.splitlines()))
    [run], [plain] = read(tmp_path, text + "\n"), read(tmp_path, MXNET + "\n", "b.log")
    assert not run.notices and [(p.images_per_second, p.top1) for p in run.points] == [
        (p.images_per_second, p.top1) for p in plain.points
    ]
    assert {e: (f.train, f.val, f.seconds) for e, f in run.epochs.items()} == {
        e: (f.train, f.val, f.seconds) for e, f in plain.epochs.items()
    }


@pytest.mark.parametrize("cut", [1, 3, 6, 7])
def test_a_figure_that_the_end_of_a_log_cuts_is_left_out(tmp_path: Path, cut: int) -> None:
    [run] = read(tmp_path, MXNET[:-cut])
    assert math.isnan(run.epochs[2].mean("val", "top1")) and len(run.epochs[1].val["top1"]) == 1
    assert any("last line is cut short" in notice for notice in run.notices)
    [whole] = read(tmp_path, MXNET)  # a last line without its end, but whole
    assert whole.epochs[2].mean("val", "top1") == 0.65 and not whole.notices


def test_what_fastai_and_ultralytics_evaluate_is_validation(tmp_path: Path) -> None:
    """fastai's metrics have no phase in their names; Ultralytics' epochs count from 1."""
    tables = {
        "fastai": ["epoch,train_loss,valid_loss,accuracy,time", "0,1.5,1.25,0.55,00:12", "1,1.3,1.1,0.65,00:11"],
        "rate": ["epoch,train_loss,valid_loss,error_rate,time", "0,1.5,1.25,0.45,00:12", "1,1.3,1.1,0.35,00:11"],
        "yolo": [
            "   epoch,  time, train/loss, metrics/accuracy_top1, metrics/accuracy_top5, val/loss, lr/pg0",
            "   1, 12.3, 1.5, 0.55, 0.9, 1.25, 0.01",
            "   2, 24.3, 1.3, 0.65, 0.95, 1.1, 0.005",
        ],
    }
    for name, rows in tables.items():
        [run] = read(tmp_path, "\n".join(rows) + "\n", f"{name}.csv")
        assert sorted(run.epochs) == [0, 1]
        assert [run.epochs[e].mean("val", "top1") for e in (0, 1)] == pytest.approx([0.55, 0.65])
        assert [run.epochs[e].mean("val", "loss") for e in (0, 1)] == [1.25, 1.1]
        assert [run.epochs[e].mean("train", "loss") for e in (0, 1)] == [1.5, 1.3]
        assert math.isnan(run.epochs[0].mean("train", "top1"))


def test_a_columns_name_that_begins_as_another_tools_does_not_change_the_tool(tmp_path: Path) -> None:
    tables = {
        "Keras": "epoch,accuracy,loss,step_time\n0,0.5,1.5,0.1\n",
        "Lightning": "epoch,step,metrics/accuracy\n1,10,0.5\n",
    }
    for tool, text in tables.items():
        [run] = read(tmp_path, text, f"{tool}.csv")
        assert (run.format, [facts.train["top1"] for facts in run.epochs.values()]) == (tool, [[0.5]])
        assert list(run.epochs) == [int(tool == "Lightning")]


def test_errors_in_percents_are_accuracies(tmp_path: Path) -> None:
    [run] = read(tmp_path, "epoch,train_loss,val_error_rate\n0,1.2,45.0\n1,1.0,0.5\n", "a.csv")
    assert [run.epochs[e].mean("val", "top1") for e in (0, 1)] == pytest.approx([0.55, 0.995])


def test_a_row_in_json_may_have_a_message(tmp_path: Path) -> None:
    [run] = read(tmp_path, '{"epoch": 0, "train_loss": 1.5, "test_acc1": 50.0, "message": "saved"}\n', "log.txt")
    assert run.epochs[0].val["top1"] == [0.5]
