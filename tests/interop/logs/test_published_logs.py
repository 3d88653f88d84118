"""The logs that MXNet published in 2015 make the tables that it published beside them, and show where those err."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from steadytrain.cli import main
from steadytrain.interop.logs import LogEpoch, read_log
from steadytrain.reports import accounts
from steadytrain.reports.files import find_all
from steadytrain.reports.tables import to_json

# The README's tables: epoch, training accuracy, validation accuracy, seconds (None: its last version left them out).
PUBLISHED: dict[str, list[tuple[int, str, str, str | None]]] = {
    "cifar10/incept_2": [(10, "0.904931", "0.867488", "71.1"), (20, "0.953142", "0.873598", "70.9")],
    "cifar10/incept_3": [
        (10, "0.905315", "0.867288", "82.3"),
        (20, "0.954310", "0.889022", "82.8"),
        (30, "0.973641", "0.898237", "82.6"),
        (40, "0.982739", "0.899940", "82.9"),  # its summary says 128
    ],
    "cifar10/incept_4": [
        (10, "0.867188", "0.837039", "10.7"),
        (20, "0.931913", "0.869331", "10.7"),
        (30, "0.959867", "0.874098", "10.7"),
        (40, "0.975832", "0.888101", "10.7"),
    ],
    "cifar10/incept_5": [
        (10, "0.828193", "0.804980", "6.9"),
        (20, "0.901002", "0.831250", "6.9"),
        (30, "0.938349", "0.860444", "7.0"),
        (40, "0.953838", "0.859629", "6.9"),
    ],
    "cifar10/incept_6": [
        (10, "0.799032", "0.763262", "6.9"),
        (20, "0.903737", "0.847594", "7.0"),
        (30, "0.945143", "0.854461", "7.0"),
        (40, "0.962789", "0.869531", "7.0"),
    ],
    "cifar10/incept_7": [
        (10, "0.863264", "0.824479", "11.1"),
        (20, "0.923930", "0.858333", "11.5"),
        (30, "0.951104", "0.862540", "11.2"),
        (40, "0.968971", "0.873658", "11.0"),
    ],
    "ilsvrc12/incept_1": [
        (5, "0.532555", "0.526332", "22783.1"),
        (10, "0.596858", "0.568018", "22800.3"),
        (15, "0.621247", "0.578255", "22854.4"),
        (20, "0.634014", "0.588112", "22820.8"),
    ],
    "ilsvrc12/incept_2": [
        (5, "0.547913", "0.535645", "3013.3"),
        (10, "0.647100", "0.600572", "3040.4"),
        (15, "0.693372", "0.621829", "3039.6"),
        (19, "0.717419", "0.631606", "3042.3"),
    ],
    "ilsvrc12/incept_5": [
        (5, "0.548047", "0.531654", "2933.4"),
        (10, "0.646048", "0.589231", "2939.0"),
        (15, "0.691162", "0.609613", "2936.2"),
        (20, "0.718662", "0.615359", "2936.1"),
    ],
    "ilsvrc12/incept_6": [
        (5, "0.517945", "0.509897", "16026.8"),
        (10, "0.579599", "0.548764", "16291.1"),
        (15, "0.604185", "0.570897", None),
    ],
    "ilsvrc12/incept_7": [(5, "0.516417", "0.506337", None)],
}
ASYNCHRONOUS: dict[str, list[tuple[int, str, str, str]]] = {
    "ilsvrc12/incept_3": [
        (5, "0.518088", "0.505218", "2718.2"),
        (10, "0.602544", "0.565539", "2714.5"),
        (15, "0.632609", "0.584213", "2720.2"),
        (20, "0.669050", "0.595749", "2128.7"),
    ],
    "ilsvrc12/incept_4": [
        (5, "0.528214", "0.502539", "2725.1"),
        (10, "0.623501", "0.569418", "2734.7"),
        (15, "0.660391", "0.597289", "2735.3"),
        (20, "0.714859", "0.605626", "2172.0"),
    ],
}


@pytest.fixture
def logs(data_folder: Path) -> Path:
    return data_folder / "logs" / "mxnet_distributed_2015" / "log"


def reported(*paths: Path) -> list[dict[str, Any]]:
    """The runs of a report's JSON document."""
    document: dict[str, list[dict[str, Any]]] = json.loads(to_json(accounts(find_all(paths).runs)))
    return document["runs"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_tables_come_out_to_the_digit(logs: Path, name: str) -> None:
    (run,) = reported(logs / name)
    rows = {row["epoch"]: row for row in run["per_epoch"]}
    for epoch, train, val, seconds in PUBLISHED[name]:
        row = rows[epoch]
        assert (f"{row['train_top1']:.6f}", f"{row['val_top1']:.6f}") == (train, val)
        assert seconds is None or f"{row['seconds']:.1f}" == seconds


@pytest.mark.parametrize("name", ["cifar10/incept_4", "ilsvrc12/incept_2"])
def test_parse_log_prints_the_published_rows_in_the_old_form(
    logs: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mxnet", "parse_log.py", str(logs / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| epoch | train-accuracy | val-accuracy | time |", "| --- | --- | --- | --- |"]
    assert main(["mxnet", "parse_log", str(logs / name), "--format", "none"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "epoch\ttrain-accuracy\tval-accuracy\ttime" and len(plain) == len(lines) - 1
    for epoch, *figures in PUBLISHED[name]:
        assert f"| {epoch:2d} | {' | '.join(map(str, figures))} |" in lines
        assert "\t".join([f"{epoch:2d}", *map(str, figures)]) in plain
    assert not [*tmp_path.iterdir()], "no page is written"


@pytest.mark.peer
@pytest.mark.parametrize("form", ["markdown", "none"])
def test_parse_log_prints_what_mxnets_prints(
    mxnet_python: str, data_folder: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [tool] = Path(mxnet_python).parent.parent.glob("lib/*/site-packages/mxnet/tools/parse_log.py")
    for name in ("mxnet_distributed_2015/log/cifar10/incept_6", "finetune_2018/train-log-demo.log"):
        words = [str(data_folder / "logs" / name), "--format", form, "--metric-names", "accuracy", "top_k_accuracy_5"]
        words = words if "2018" in name else words[:3]
        done = subprocess.run([mxnet_python, str(tool), *words], capture_output=True, text=True, check=False)
        assert main(["mxnet", "parse_log", *words]) == 0
        theirs, ours = done.stdout.splitlines(), capsys.readouterr().out.splitlines()
        assert theirs == ours[: len(theirs)] and len(theirs) > 5, done.stderr  # it fails at an epoch that is cut short


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_asynchronous_tables_took_the_best_worker_and_the_report_says_so(logs: Path, name: str) -> None:
    (log,), (run,) = read_log(logs / name), reported(logs / name)
    rows = {row["epoch"]: row for row in run["per_epoch"]}
    for number, train, val, seconds in ASYNCHRONOUS[name]:
        facts = log.epochs[number - 1]
        assert (f"{max(facts.train['top1']):.6f}", f"{max(facts.val['top1']):.6f}") == (train, val)
        assert f"{facts.training_seconds:.1f}" == seconds
        assert rows[number]["val_top1"] == pytest.approx(fmean(facts.val["top1"]))
        assert rows[number]["val_top1"] < max(facts.val["top1"])
    assert run["log"] == "MXNet log of 5 workers"
    best = f"{100 * float(ASYNCHRONOUS[name][-1][2]):.1f} %"
    assert any(f"that of the best {best}" in notice for notice in run["notices"])
    assert any("as in asynchronous training" in notice for notice in run["notices"])


def test_the_thirteen_logs_are_thirteen_runs_with_their_workers(logs: Path) -> None:
    runs = reported(logs / "cifar10", logs / "ilsvrc12")
    workers = [int(match[1]) if (match := re.search(r"of (\d+) workers", run["log"])) else 1 for run in runs]
    assert workers == [1, 1, 1, 5, 5, 5, 5, 1, 5, 5, 5, 5, 1, 10]
    assert [run["epochs_done"] for run in runs] == [20, 20, 40, 40, 40, 40, 40, 20, 19, 20, 20, 20, 16, 5]
    assert not [run["name"] for run in runs if run["batch_size"] or run["train_loss"] or run["steps"]]


def test_every_run_of_a_file_of_mxnet_1_9_1_has_its_own_lines(data_folder: Path) -> None:
    text = (data_folder / "mxnet-golden" / "fit-1.9.1.log").read_text()
    sections = [part for part in re.split(r"^.*=== .* ===\n", text, flags=re.M) if "Epoch[" in part]
    logs = read_log(data_folder / "mxnet-golden" / "fit-1.9.1.log")
    assert len(logs) == len(sections) == 9

    def values(section: str, name: str) -> dict[int, list[float]]:
        values: dict[int, list[float]] = {}
        for epoch, value in re.findall(rf" Epoch\[(\d+)\] {name}=([\d.]+)$", section, re.M):
            values.setdefault(int(epoch), []).append(float(value))
        return values

    for log, section in zip(logs, sections, strict=True):
        assert {n: facts.train["top1"] for n, facts in log.epochs.items() if facts.train.get("top1")} == values(
            section, "Train-accuracy"
        )
        assert {n: facts.val["top1"] for n, facts in log.epochs.items() if facts.val.get("top1")} == values(
            section, "Validation-accuracy"
        )
        assert {n: facts.seconds for n, facts in log.epochs.items()} == values(section, "Time cost")
        assert log.num_workers == 1
    assert [point.lr for point in logs[0].points][-2:] == pytest.approx([0.01, 0.001])
    assert logs[1].epochs[1].train["loss"] == [0.732165]
    assert sorted(logs[5].epochs) == [7, 8]


def test_every_line_of_speedometer_is_read(data_folder: Path, tmp_path: Path) -> None:
    document = json.loads((data_folder / "mxnet-golden" / "speedometer.json").read_text())
    cases = {name: case["messages"] for name, case in document.items() if name.startswith("Speedometer.")}
    for name, messages in cases.items():
        path = tmp_path / "a.log"
        path.write_text("\n".join(messages))
        log = read_log(path)[0]
        speeds = [float(re.findall(r"Speed: (\S+) ", message)[0]) for message in messages]
        read = [point.images_per_second for point in log.points]
        assert read == pytest.approx([s if s != float("inf") else float("nan") for s in speeds], nan_ok=True), name
        top1 = [re.findall(r"\baccuracy=([\d.]+)", message) for message in messages]
        assert [p.top1 for p in log.points] == pytest.approx(
            [float(v[0]) if v else float("nan") for v in top1], nan_ok=True
        )


def test_a_fine_tuning_log_of_2017_is_read_with_its_times_and_arguments(data_folder: Path) -> None:
    folder = data_folder / "logs" / "finetune_2018"
    first, second = reported(folder / "train-log-demo.log", folder / "train-log-demo2.log")
    assert (first["model"], first["batch_size"], first["lr"]) == ("resnext", 4, 0.01) or first["batch_size"] is None
    rows = [line.split("\t") for line in (folder / "train-log-summary.csv").read_text().splitlines()[1:]]
    for row, epoch in zip(rows, first["per_epoch"], strict=False):  # a table that others made of the same log
        assert (epoch["epoch"], f"{epoch['val_top1']:.6f}", f"{epoch['val_top5']:.6f}") == (
            int(row[0]),
            row[10],
            row[11],
        )
        assert epoch["images_per_second"] == pytest.approx(float(row[12]), rel=1e-3)
        assert epoch["seconds"] == float(row[15])
    rows = [line.split("\t") for line in (folder / "train-log-summary2.csv").read_text().splitlines()[1:]]
    for row, epoch in zip(rows, second["per_epoch"], strict=False):
        assert (f"{epoch['train_top1']:.6f}", f"{epoch['val_top1']:.6f}") == (row[8], row[10])
    assert second["began"] == pytest.approx(1509180257.697)  # 2017-10-28 08:44:17, an epoch before 08:47:21
    assert "evaluation" in second["ledger"]["seconds"] and second["ledger"]["seconds"]["update"] > 0


def test_a_language_models_log_says_what_it_is(data_folder: Path) -> None:
    path = data_folder / "logs" / "f96a.log"
    (run,) = reported(path)
    assert run["best"] is None or run["best"]["top1"] is None
    assert run["per_epoch"][0]["val_loss"] == 3.8857258
    assert any("language model" in notice for notice in run["notices"])
    (log,) = read_log(path)
    assert log.points[0].images_per_second == 168205.97 and log.points[0].loss == 6.0081581


def test_the_mean_of_workers_is_taken_over_what_they_wrote() -> None:
    facts = LogEpoch(3, val={"top1": [0.25, 0.75]}, seconds=[2.0, 4.0])
    assert (facts.mean("val", "top1"), facts.training_seconds) == (0.5, 3.0)
