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

ESTIMATOR = "\n".join(
    f"""[Epoch {e}] Begin, current learning rate: 0.{e + 1}000
[Epoch {e}][Batch 0][Samples {640 * e + 32}] time/interval: 0.016s training accuracy: 0.0500, training softmaxcrossentropyloss: 2.5, validation accuracy: nan
[Epoch {e}][Batch 20][Samples {640 * e + 640}] time/interval: 0.016s training accuracy: 0.0600, training softmaxcrossentropyloss: 2.4, validation accuracy: 0.9999
Validation Begin
[Epoch 0] Finished in 0.080s, validation accuracy: {0.1 + e / 10:.4f}
[Epoch {e}] Finished in {40 + e}.500s, training accuracy: {0.1 + e / 10:.4f}, training softmaxcrossentropyloss: 2.0000, validation accuracy: {0.1 + e / 10:.4f}"""
    for e in EPOCHS
)
ESTIMATOR = f"""Training begin: using optimizer SGD with current learning rate 0.1000
Train for 3 epochs.
{ESTIMATOR}
Train finished using total 125s with 3 epochs. training accuracy: 0.3000, validation accuracy: 0.3000
"""


FIT = lines(
    "2020-06-26 00:0{e}:01,000 Node[0] Epoch[{e}] Batch [0-20]\tSpeed: 5600.00 samples/sec\taccuracy=0.1",
    "2020-06-26 00:0{e}:41,500 Node[0] Epoch[{e}] Time cost={s}",
    "2020-06-26 00:0{e}:45,000 Node[0] Epoch[{e}] Validation-accuracy=0.818182",
    "2020-06-26 00:0{e}:45,000 Node[0] Epoch[{e}] Validation-total-count=33.000000",
)


def mll(at: float, key: str, value: object = None, **metadata: object) -> str:
    """A line of MLPerf 0.6."""
    return f":::MLL {at:.3f} {key}: {json.dumps({'value': value, 'metadata': {**metadata, 'file': 'fit.py', 'lineno': 7}})}"


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


def test_mlperfs_accuracy_of_all_images_goes_before_one_workers_share(tmp_path: Path) -> None:
    start = "2020-06-26 00:00:00,000 Node[0] start with arguments Namespace(batch_size=104, gpus='3', network='resnet-v1b-fl', num_layers=50)"
    whole = [mll(1, "global_batch_size", 832), mll(2, "run_start"), mll(200, "eval_accuracy", 0.76068, epoch_num=3)]
    end = mll(201, "run_stop", status="success")
    for text in ("\n".join([start, *whole, FIT, end]), "\n".join([start, FIT, *whole, end])):
        run = account(tmp_path, text)
        best = run.summary.quality.best
        assert best is not None and (best.top1, best.epoch) == (0.76068, 3)
        assert [row.val_top1 for row in run.epochs] == [None, None, 0.76068], "no share of another epoch is left"
        assert [row.seconds for row in run.epochs] == [40.5, 41.5, 42.5] and run.epochs[0].images_per_second == 5600
        setup = run.summary.setup
        assert (setup.batch_size, setup.devices, setup.batch_per_device, setup.model) == (
            832,
            8,
            104,
            "resnet-v1b-fl-50",
        )
        assert run.summary.course.status == "finished" and not [
            n for n in run.summary.course.notices if "left out" in n
        ]


@pytest.mark.parametrize(
    ("end", "status", "why"),
    [
        (mll(400, "run_stop", status="success"), "finished", ""),
        (mll(400, "run_stop", status="aborted"), "failed", "aborted after epoch 3"),
        (mll(400, "epoch_start", epoch_num=4), "interrupted", "the log ends within epoch 4"),
    ],
)
def test_version_0_6_of_mlperf_is_read_without_other_lines(tmp_path: Path, end: str, status: str, why: str) -> None:
    text = [
        mll(0, "submission_benchmark", "resnet"),
        mll(1, "global_batch_size", 100),
        mll(2, "train_samples", 1000),
        mll(10, "run_start"),
    ]
    for e in (1, 2, 3):
        text += [mll(100 * e, "epoch_start", epoch_num=e), mll(100 * e + 50, "epoch_stop", epoch_num=e)]
        text += [mll(100 * e + 60, "eval_accuracy", e / 10, epoch_num=e)]
    run = account(tmp_path, "\n".join([*text, end]))
    assert [(row.seconds, row.val_top1) for row in run.epochs][:3] == [(50, 0.1), (50, 0.2), (50, pytest.approx(0.3))]
    assert (run.summary.course.status, run.summary.course.why) == (status, why)
    assert (run.summary.setup.batch_size, run.summary.setup.num_train, run.summary.speed.images_per_second) == (
        100,
        1000,
        20,
    )


def test_epochs_that_are_not_evaluated_have_their_times_and_images(tmp_path: Path) -> None:
    """Version 0.5 states the batch of one GPU; the speed follows from the images of an epoch."""
    v05 = [
        ":::MLPv0.5.0 resnet 1000.0 (u.py:49) run_start",
        ":::MLPv0.5.0 resnet 1000.1 (u.py:49) input_batch_size: 208",
    ]
    v05 += [":::MLPv0.5.0 resnet 1000.2 (u.py:49) preproc_num_train_examples: 1200"]
    at = 1000
    for e in range(8):
        v05, at = [*v05, f":::MLPv0.5.0 resnet {at} (u.py:49) train_epoch: {e}"], at + 100
        if e % 4 == 3:
            v05 += [f":::MLPv0.5.0 resnet {at} (u.py:49) eval_start: {e}"]
            at += 5
            v05 += [f':::MLPv0.5.0 resnet {at} (u.py:49) eval_accuracy: {{"epoch": {e}, "value": 0.{e}}}']
    run = account(tmp_path, "\n".join([*v05, f":::MLPv0.5.0 resnet {at} (u.py:49) run_stop"]))
    assert [row.seconds for row in run.epochs] == [100] * 8 and run.epochs[3].val_top1 == 0.3
    assert (run.summary.speed.images_per_second, run.summary.speed.median_seconds_per_epoch) == (12, 100)
    assert run.summary.setup.batch_size is None and not run.summary.tells_steps
    assert any("input_batch_size is 208: of one device in some" in notice for notice in run.summary.course.notices)


def test_blocks_of_epochs_share_their_time(tmp_path: Path) -> None:
    """Google's logs have evaluations and blocks alone, whose lines of one moment are in any order."""
    text = [mll(0, "global_batch_size", 100), mll(0, "num_train_examples", 1000), mll(100, "run_start")]
    for block in range(3):
        start = mll(100 + 40 * block, "block_start", first_epoch_num=4 * block + 4, epoch_count=4)
        stop = mll(100 + 40 * block, "block_stop", first_epoch_num=4 * block)
        text += [start, stop] if block % 2 else [stop, start]
        text += [mll(140 + 40 * block, "eval_accuracy", 0.1 + block / 10, epoch_num=4 * block + 4)]
    run = account(tmp_path, "\n".join(text))
    assert [(row.epoch, row.seconds) for row in run.epochs if row.val_top1] == [(4, 10), (8, 10), (12, 10)]
    assert (run.summary.speed.images_per_second, run.summary.speed.seconds) == (100, 120)


GLUED = {
    "blanks": " ",
    "logger": " INFO:root: ",
    "prefix": " 2018-03-07 05:2{}:13,528 Node[0] ",
    "rank": " [1,0]<stderr>:INFO:root:",
}


@pytest.mark.parametrize("glue", GLUED.values(), ids=GLUED)
@pytest.mark.parametrize("text", [CIFAR, GLUON, GLUONCV, HOROVOD_MNIST], ids=["CIFAR", "Gluon", "GluonCV", "Horovod"])
def test_lines_that_were_joined_are_cut_at_each_epoch(tmp_path: Path, text: str, glue: str) -> None:
    """Mails, slides and PDFs lose the ends of lines."""
    wanted = [(row.train_top1, row.val_top1, row.seconds) for row in account(tmp_path, text).epochs]
    bare = [line.removeprefix("INFO:root:") for line in text.splitlines()]
    run = account(
        tmp_path,
        "".join(
            glue.format(i % 10).lstrip() * (not i) + glue.format(i % 10) * bool(i) + line for i, line in enumerate(bare)
        ),
    )
    assert [(row.train_top1, row.val_top1, row.seconds) for row in run.epochs] == wanted
    assert run.summary.log == "MXNet log", "one worker"
    assert not [notice for notice in run.summary.course.notices if "understood" in notice]


def test_joined_lines_of_a_long_training_are_all_read(tmp_path: Path) -> None:
    run = account(tmp_path, "".join(f"[Epoch {e}] train=0.{e:03} val=0.{e:03} loss=1.5 time: 6.5 " for e in range(300)))
    assert [row.val_top1 for row in run.epochs] == [e / 1000 for e in range(300)]


def test_what_stands_once_before_joined_lines_is_no_worker(tmp_path: Path) -> None:
    """A document of slides, each of which shows another optimizer."""
    slides = [
        f"Slide {12 + i}: {name} " + " ".join(f"[Epoch {e}] train=0.5 val=0.{i + 1}{e} time: 6.5" for e in range(4))
        for i, name in enumerate(("SGD", "NAG", "LBSGD"))
    ]
    (tmp_path / "a.log").write_text("\n".join(slides))
    runs = [Account.of_log(run) for run in read_log(tmp_path / "a.log")]
    assert [[row.val_top1 for row in run.epochs] for run in runs] == [
        [(10 * i + e) / 100 for e in range(4)] for i in (1, 2, 3)
    ]


def test_moments_of_joined_lines_are_their_own(tmp_path: Path) -> None:
    stamps = [line.replace("2020", "> 2020", 1) for line in FIT.splitlines()]
    one, many = account(tmp_path, " ".join(stamps)), account(tmp_path, "\n".join(stamps))
    assert one.epochs == many.epochs and one.summary.speed == many.summary.speed


def test_joined_records_of_other_programs_are_cut(tmp_path: Path) -> None:
    for text in (MLPERF_TEXT, MLPERF_JSON):
        assert account(tmp_path, text.replace("\n", " ")).epochs == account(tmp_path, text).epochs


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


GLUON_START = "Namespace(batch_size=128, dtype='float16', lr=0.4, model='resnet50_v1', num_epochs=3, num_gpus=8)\n"


def test_gluons_batch_is_that_of_each_gpu_and_all_of_them_are_paid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = account(tmp_path, GLUON_START + GLUONCV).summary.setup
    assert (setup.batch_size, setup.devices, setup.batch_per_device, setup.model) == (1024, 8, 128, "resnet50_v1")
    assert main(["report", str(tmp_path / "a.log"), "-o", "-"]) == 0
    out = capsys.readouterr().out
    assert "| batch size | 1,024 (128 on each of 8 ranks) |" in out and "| device | 8 devices |" in out
    assert main(["cost", str(tmp_path / "a.log"), "--price", "1", "--json"]) == 0
    [cost] = json.loads(capsys.readouterr().out)["runs"]
    assert cost["device_seconds"] == pytest.approx(8 * (40.5 + 41.5 + 42.5))


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ("network='resnet', num_layers=152", "resnet-152"),
        ("network='resnext', num_layers=101", "resnext-101"),
        ("network='inception-v3', num_layers=50", "inception-v3"),
        ("network='mlp', num_layers=None", "mlp"),
    ],
)
def test_depth_belongs_to_the_name_of_a_family(tmp_path: Path, arguments: str, model: str) -> None:
    assert account(tmp_path, f"start with arguments Namespace({arguments})\n{FIT}").summary.setup.model == model


def test_old_table_comes_out_of_old_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slides of 2017: ResNet-152, images of a GPU and of all, seconds, images/s, accuracy, and memory that ran out."""
    monkeypatch.chdir(tmp_path)
    for gpus, rate, seconds in ((1, 21, 770), (8, 160, 102)):
        names = ",".join(map(str, range(gpus)))
        Path(f"{gpus}.log").write_text(
            f"start with arguments Namespace(batch_size={32 * gpus}, gpus='{names}', network='resnet', num_epochs=1, num_examples=15420, num_layers=152)\n"
            f"Epoch[0] Batch [{400 // gpus}]\tSpeed: {rate} samples/sec\taccuracy=0.1\nEpoch[0] Time cost={seconds}\nEpoch[0] Validation-accuracy=0.836\n"
        )
    Path("full.log").write_text(
        "start with arguments Namespace(batch_size=512, gpus='0,1,2,3,4,5,6,7', network='resnet', num_epochs=1, num_examples=15420, num_layers=152)\n"
        "mxnet.base.MXNetError: [08:39:45] src/storage/./pooled_storage_manager.h:107: cudaMalloc failed: out of memory\n"
    )
    heads = ["run", "outcome", "devices", "model", "batch/device", "batch", "s/epoch", "images/s", "best", "efficiency"]
    rows = [
        ["1.log", NONE, "1", "resnet-152", "32", "32", "770.0", "21.0", "83.6 %", "100 %"],
        ["8.log", NONE, "8", "resnet-152", "32", "256", "102.0", "160.0", "83.6 %", "95 %"],
        ["full.log", "out of memory", "8", "resnet-152", "64", "512", NONE, NONE, NONE, NONE],
    ]
    assert main(["report", "1.log", "8.log", "full.log", "-o", "-"]) == 0
    markdown = capsys.readouterr().out
    for row in (heads, *rows):
        assert f"| {' | '.join(row)} |" in markdown
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["report", "1.log", "8.log", "full.log", "-o", "r.html"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert [" ".join(line.split()) for line in table] == [" ".join(row) for row in (heads, *rows)]
    html = Path("r.html").read_text()
    assert all(f"<td>{cell}</td>" in html for row in rows for cell in row)
    assert main(["report", "1.log", "8.log", "full.log", "--json"]) == 0
    one, eight, full = json.loads(capsys.readouterr().out)["runs"]
    assert [run["efficiency"] for run in (one, eight, full)] == [1, pytest.approx(160 / 8 / 21), None]
    assert (eight["devices"], eight["batch_per_device"], eight["median_seconds_per_epoch"]) == (8, 32, 102)
    assert (full["status"], full["why"]) == ("failed", "out of memory within epoch 1 of 1")


def test_memory_that_was_short_for_a_moment_is_no_end(tmp_path: Path) -> None:
    start = "start with arguments Namespace(batch_size=32, network='resnet', num_layers=50)\n"
    warning = "cudaMalloc failed: out of memory, trying another algorithm\n"
    assert account(tmp_path, start + warning + FIT).summary.course.status == "finished"
    assert account(tmp_path, start + FIT + "\n" + warning).summary.course.why == "out of memory after epoch 3"


def test_logs_that_differ_in_their_seed_are_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        text = f"start with arguments Namespace(network='resnet', num_layers=50, seed={seed})\n{CIFAR}"
        (tmp_path / f"{seed}.log").write_text(text.replace("val=0.300000", f"val=0.{30 + seed}"))
    (tmp_path / "z.log").write_text(f"start with arguments Namespace(network='resnet', num_layers=18, seed=9)\n{CIFAR}")
    assert main(["report", str(tmp_path), "-o", "-"]) == 0
    assert "| 0.log, 1.log, 2.log: 3 seeds | resnet-50 | 41.5 | 31.0 % ± 1.0 (" in capsys.readouterr().out


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
        (["one.log"], "one.log is compared with another run or log: name that too"),
        (["unsaid.log", "one.log"], "write it behind the name, such as unsaid.log@8"),
        (["one.log", "one.log"], "all runs have 1 device:"),
        (["one.log", "eight.log", "--procs", "2"], "--procs belongs to a prediction"),
    ):
        assert main(["scale", *words]) == 2
        assert message in capsys.readouterr().err


def test_every_training_of_gluons_estimator_has_its_own_figures(tmp_path: Path) -> None:
    """Lines within an epoch repeat the validation before it, and an evaluation's own line is always of epoch 0."""
    (tmp_path / "a.log").write_text(ESTIMATOR * 2)
    runs = read_log(tmp_path / "a.log")
    assert len(runs) == 2 and not any(run.notices for run in runs)
    for run in runs:
        assert run.num_workers == 1 and [epoch.training_seconds for epoch in run.epochs.values()] == [40.5, 41.5, 42.5]
        for part in ("train", "val"):
            assert [run.epochs[e].mean(part, "top1") for e in EPOCHS] == pytest.approx([0.1, 0.2, 0.3])
        assert [point.batch for point in run.points] == [0, 20] * 3
        assert run.points[0].loss == 2.5 and run.points[3].top1 == 0.06


def _stamped(template: str, *stamps: str) -> str:
    return "".join(
        f"{template.format(stamp)}Epoch[{e}] {line}\n"
        for e, stamp in enumerate(stamps)
        for line in ("Train-accuracy=0.3", "Time cost=80.000", f"Validation-accuracy=0.{e + 4}")
    )


@pytest.mark.parametrize(
    "text",
    [
        _stamped("[{} INFO 140310] ", "03/07/2018 23:58:13", "03/08/2018 00:05:13"),
        _stamped("{} ", "07.03.2018 11:58:13 AM", "07.03.2018 12:05:13 PM"),
        _stamped("{} gpu1 train[12]: ", "Mar  7 23:58:13", "Apr 18 00:05:13"),
        _stamped("[{}] ", "Wed Mar  7 23:58:13 2018", "Thu Mar  8 00:05:13 2018"),
        _stamped("{} fit.py:12] ", "I0307 23:58:13.528123", "I0308 00:58:13.9"),
        _stamped("{} INFO:root:", "1520400193.528", "1520400293.1"),
        _stamped("[{}] ", "   12.345", "  112.345"),
        _stamped("{} ", "0:12:33.123", "10:22:33.1"),
        _stamped("{} stdout F INFO:root:", "2019-03-07T05:23:13.528123456Z", "2019-03-08T07:23:13.1+02:00"),
    ],
)
def test_clocks_of_any_country_are_no_names_of_workers(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.log").write_text(text)
    [run] = read_log(tmp_path / "a.log")
    assert run.num_workers == 1 and [run.epochs[e].mean("val", "top1") for e in (0, 1)] == [0.4, 0.5]


def test_addresses_and_ranks_are_names_of_workers(tmp_path: Path) -> None:
    pairs = [
        ("10.0.0.1: ", "10.0.0.2: "),
        ("10.0.0.1:9091 ", "10.0.0.2:9091 "),
        ("[1,0]<stderr>:", "[1,1]<stderr>:"),
        ("ip-10-0-1-5: ", "ip-10-0-2-5: "),
        ("node-1.4: ", "node-1.5: "),
        ("vm-0123456789: ", "vm-0123456788: "),
        ("Saturn: ", "Sunny: "),
    ]
    for number, names in enumerate(pairs):
        path = tmp_path / f"{number}.log"
        path.write_text("".join(_stamped(name, "", "") for name in names))
        assert [run.num_workers for run in read_log(path)] == [2], names


def test_two_runs_of_two_epochs_without_arguments_are_two(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(_stamped("INFO:root:", "", "") + _stamped("INFO:root:", "", ""))
    assert [(run.num_workers, len(run.epochs)) for run in read_log(tmp_path / "a.log")] == [(1, 2), (1, 2)]


def test_asynchronous_workers_without_names_stay_one_run(tmp_path: Path) -> None:
    """The slow one is in the first epoch when the other has ended the second."""
    epochs = _stamped("INFO:root:", "", "")
    slow = "INFO:root:Epoch[0] Train-accuracy=0.2\nINFO:root:Epoch[0] Time cost=90.000\n"
    lines = epochs.splitlines(keepends=True)
    (tmp_path / "a.log").write_text("".join([*lines[:4], slow.splitlines(keepends=True)[0], *lines[4:], slow]))
    assert [len(run.epochs) for run in read_log(tmp_path / "a.log")] == [2]
