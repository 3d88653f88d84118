"""What the tables say is what the events say."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.reports.runs import Clock, evaluated, finished, logged, recipe, restarted, started, step, write

from steadytrain.cli import main
from steadytrain.cost.bill import Bill, BillPart
from steadytrain.cost.prices import Price
from steadytrain.events import DeviceStats, Event, Failed
from steadytrain.format import NONE
from steadytrain.monitor import Interruption
from steadytrain.reports import accounts as report_accounts
from steadytrain.reports.files import find_all
from steadytrain.reports.summary import Account, Summary, summarise
from steadytrain.reports.tables import (
    best_epoch,
    comma_separated,
    efficiencies,
    epoch_table,
    facts,
    markdown,
    speed_table,
    to_json,
    to_text,
)
from steadytrain.run import Run


def accounts(*runs: Run) -> list[Account]:
    return [Account.of(run) for run in runs]


def test_numbers_in_the_csv_are_the_events_to_the_last_bit(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    scores = [evaluated(352, 1 / 3, loss=0.1 + 0.2), evaluated(704, 2 / 3)]
    write(run, [started(), *map(step, range(1, 705)), logged(352, loss=math.pi), logged(704), *scores], Clock())
    first, second = csv.DictReader(comma_separated(accounts(run)).splitlines())
    assert first["run"] == "run"
    assert (float(first["val_top1"]), float(first["val_loss"])) == (1 / 3, 0.1 + 0.2)
    assert float(first["train_loss"]) == pytest.approx(math.pi, rel=1e-15)
    assert (second["epoch"], float(second["val_top1"]), second["n"]) == ("2", 2 / 3, "5000")


def test_a_last_accuracy_above_the_best_says_that_its_loss_is_higher(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    best = structs.replace(evaluated(352, 0.83, loss=0.6), figure="top1-loss", is_best=True)
    last = structs.replace(evaluated(704, 0.85, loss=0.9), figure="top1-loss", is_best=False)
    write(run, [started(), *map(step, range(1, 705)), best, last], Clock())
    (account,) = accounts(run)
    assert facts(account.summary)["last top-1"] == "85.0 % (84.0 to 86.0) at epoch 2, of a higher loss"


def test_epochs_without_an_evaluation_have_empty_cells(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), *map(step, range(1, 41)), logged(40)], Clock())
    (row,) = csv.DictReader(comma_separated(accounts(run)).splitlines())
    assert (row["val_top1"], row["n"]) == ("", "")
    assert row["train_top1"] == "0.5"


def test_json_is_strict_and_holds_summary_and_epochs(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), *map(step, range(1, 21)), logged(20, loss=math.nan)], Clock())
    document = json.loads(to_json(accounts(run)), parse_constant=pytest.fail)
    assert document["runs"][0]["train_loss"] is None
    assert document["runs"][0]["not_finite"] == 1
    assert document["runs"][0]["per_epoch"][0]["train_top1"] == 0.5
    assert document["runs"][0]["machine"]["isa"] == "avx2"


def test_json_of_a_summary_alone_has_no_epochs(tmp_path: Path) -> None:
    document = json.loads(to_json([summarise(finished(tmp_path))]))
    assert document["runs"][0]["best"]["top1_95"]["low"] < document["runs"][0]["best"]["top1"]
    assert "per_epoch" not in document["runs"][0]


def test_markdown_has_a_column_for_each_run_and_a_row_for_each_epoch(tmp_path: Path) -> None:
    lines = markdown(accounts(finished(tmp_path), restarted(tmp_path))).splitlines()
    assert "|  | baseline | restarted |" in lines
    assert "| restarts | 0 | 1 (96 steps repeated) |" in lines
    rows = [line for line in lines if line.startswith(("| 1 |", "| 2 |", "| 3 |"))]
    assert len(rows) == 6
    assert all(line.count("|") == 9 for line in rows)


def test_markdown_begins_with_what_held_each_run_back(tmp_path: Path) -> None:
    text = markdown(accounts(finished(tmp_path)))
    assert "**What held it back:** No bottleneck found" in text.partition("| status |")[0]
    text = markdown(accounts(finished(tmp_path / "b"), restarted(tmp_path)))
    assert text.count("**What held baseline back:** ") == 1 == text.count("**What held restarted back:** ")


def test_a_name_cannot_break_a_markdown_table(tmp_path: Path) -> None:
    run = finished(tmp_path, "a|b <script>*x*")
    assert r"|  | a\|b \<script\>\*x\* |" in markdown(accounts(run)).splitlines()


def test_the_terminal_gets_aligned_columns_and_no_control_characters(tmp_path: Path) -> None:
    alone = to_text([summarise(finished(tmp_path))])
    assert alone.splitlines()[0].split() == ["run", "baseline"]
    text = to_text([summarise(finished(tmp_path)), summarise(finished(tmp_path, "a\x1b[2Jb", lr=0.2))])
    head, first, second = text.partition("\n\n")[0].splitlines()
    assert head.index("status") == first.index("finished") == second.index("finished")
    assert "a?[2Jb" in second
    assert max(map(len, (alone + "\n" + text).splitlines())) <= 80


def test_runs_on_the_same_images_stand_together(tmp_path: Path) -> None:
    runs = [summarise(finished(tmp_path, name)) for name in ("a", "b", "c")]
    runs[1] = replace(runs[1], setup=replace(runs[1].setup, data_set="others"))
    text = to_text(runs).partition("\n\n")[0]
    assert [line.split()[0] for line in text.splitlines()] == ["run", "a", "c", "b"]


def test_means_of_repeats_are_in_every_format(tmp_path: Path) -> None:
    runs = []
    for seed, top1 in enumerate((0.90, 0.92, 0.91)):
        runs.append(Run.create(tmp_path / "a" / f"seed-{seed}", recipe(seed=seed)))
        write(runs[-1], [started(), *map(step, range(1, 1056)), evaluated(1055, top1)], Clock(), end=True)
    text = "91.0 % ± 1.0 (88.5 to 93.5)"  # t(0.975, 2) = 4.302653, of any table
    head, best, last, *_ = to_text([summarise(run) for run in runs]).partition("\n\n")[2].splitlines()
    assert head == "a: 3 seeds, mean ± standard deviation (95 % interval of the mean)"
    assert best.split(maxsplit=2) == ["best", "top-1", text] and last.split(maxsplit=2) == ["last", "top-1", text]
    assert f"| a: 3 seeds | {text} | {text} |" in markdown(accounts(*runs))
    (group,) = json.loads(to_json(accounts(*runs)))["repeats"]
    assert (group["seeds"], group["last_top1"]["n"], group["last_top1"]["mean"]) == ([0, 1, 2], 3, pytest.approx(0.91))


def test_no_epoch_is_marked_as_the_best_where_the_probe_was(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    scores = [evaluated(0, 0.9), *map(step, range(1, 352)), evaluated(351, 0.8)]
    write(run, [started(), *scores], Clock(), end=True)
    (account,) = accounts(run)
    assert account.summary.quality.best is not None and account.summary.quality.best.when == "by the probe"
    assert best_epoch(account) is None and len(epoch_table(account)[1]) == 1


def test_repeats_that_were_stopped_early_have_no_rows_of_dashes(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path / "a" / f"seed-{seed}", recipe(seed=seed)) for seed in range(2)]
    write(runs[0], [started(), *map(step, range(1, 1056)), evaluated(1055, 0.9)], Clock(), end=True)
    write(runs[1], [started(), *map(step, range(1, 20))], Clock())
    text = to_text([summarise(run) for run in runs])
    assert "90.0 %" in text and "±" not in text and NONE not in text.partition("\n\n")[2]
    assert "## Repeats" not in markdown(accounts(*runs))


def test_repeats_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        for seed in range(2):
            run = Run.create(tmp_path / name / "run" / f"seed-{seed}", recipe(seed=seed).with_({"optim.lr": lr}))
            write(run, [started(), *map(step, range(1, 41)), evaluated(40, 0.5 + lr)], Clock(), end=True)
    runs = [
        account.summary for account in report_accounts(find_all([tmp_path / "a" / "run", tmp_path / "b" / "run"]).runs)
    ]
    titles = ["a/run: 2 seeds", "b/run: 2 seeds"]
    assert [line[0] for line in speed_table(runs)[1:]] == titles
    assert all(f"{title}, mean" in to_text(runs) for title in titles)


def test_repeats_on_other_devices_are_another_row(tmp_path: Path) -> None:
    for seed in range(4):
        _on_gpus(tmp_path / "run" / f"seed-{seed}", 1 + seed // 2, 0.5, 0.8, seed)
    lines = speed_table([account.summary for account in report_accounts(find_all([tmp_path / "run"]).runs)])
    assert [(line[0], line[2]) for line in lines] == [("run", "devices"), *(("run: 2 seeds", n) for n in "12")]


def _on_gpus(folder: Path, ranks: int, seconds: float, top1: float, seed: int = 0) -> Run:
    """A run on GPUs of which samples say how busy they were."""
    run = Run.create(folder, recipe(seed=seed))
    machine = {**started().machine, "device": "cuda", "ranks": ranks, "images_per_rank": [128 // ranks] * ranks}
    events: list[Event] = [structs.replace(started(steps=40), machine=machine)]
    for number in range(1, 41):
        events.append(step(number, seconds=seconds))
        if number % 10 == 0:
            used = {10: 0.0, 20: 0.65, 30: 0.87, 40: 0.97}[number]  # nothing, until the first log line
            events += [DeviceStats(seconds=1, index=i, name="V100", utilisation=used) for i in range(ranks)]
            events.append(logged(number, rate=128 / seconds))
    write(run, [*events, evaluated(40, top1)], Clock(), end=True)
    return run


def test_runs_are_compared_by_devices_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _on_gpus(tmp_path / "one", 1, 0.5, 0.84)
    for seed, top1 in enumerate((0.83, 0.85, 0.87)):
        _on_gpus(tmp_path / "eight" / f"seed-{seed}", 8, 0.0625 / 0.96, top1, seed)
    failed = Run.create(tmp_path / "full", recipe())
    failure = Failed(error="FailedError", message="the memory of the GPU is not enough for batch_size=128")
    write(failed, [structs.replace(started(), machine={**started().machine, "device": "cuda"}), failure], Clock())
    folders = [tmp_path / name for name in ("one", "eight", "full")]
    heads, one, eight, full = speed_table([account.summary for account in report_accounts(find_all(folders).runs)])
    assert heads[:6] == ["run", "outcome", "device", "devices", "model", "batch/device"]
    assert heads[6:] == ["batch", "s/epoch", "images/s", "GPU use", "best", "efficiency"]
    assert one[:7] == ["one", NONE, "V100", "1", "resnet20", "128", "128"]
    assert eight[:7] == ["eight: 3 seeds", NONE, "V100", "8", "resnet20", "16", "128"]
    assert full[:4] == ["full", "out of memory", "cuda", "1"] and full[7:] == [NONE] * 5
    assert (one[11], eight[11], one[8]) == ("100 %", "96 %", "256.0")
    assert one[9].endswith("(65 to 97)") and eight[10].startswith("85.0 % ± 2.0 (")
    words = list(map(str, folders))
    for output in ("r.md", "r.html"):
        assert main(["report", *words, "-o", output, "--force"]) == 0
        text = Path(output).read_text()
        assert all(cell in text for cell in (*heads, *one, *eight, *full))
    capsys.readouterr()
    assert main(["report", *words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["devices"] for run in runs] == [1, 8, 8, 8, 1] and runs[0]["batch_per_device"] == 128
    assert runs[1]["efficiency"] == pytest.approx(0.96, abs=0.01) and runs[0]["device_use"]["least"] == 0.65
    assert main(["scale", words[0], str(tmp_path / "eight" / "seed-0")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["96", "%"]


def test_only_comparable_runs_have_an_efficiency(tmp_path: Path) -> None:
    def run(name: str, devices: int, batch: int, size: int, rate: float) -> Summary:
        summary = summarise(finished(tmp_path, name))
        setup = replace(summary.setup, devices=devices, batch_size=batch, size=size)
        return replace(summary, setup=setup, speed=replace(summary.speed, images_per_second=rate))

    one, weak, strong = run("one", 1, 32, 224, 100), run("weak", 8, 256, 224, 760), run("strong", 8, 32, 224, 600)
    assert efficiencies([one, weak, strong]) == {"one": 1.0, "weak": pytest.approx(0.95), "strong": pytest.approx(0.75)}
    other_size, other_batch = run("large", 8, 256, 320, 400), run("other", 8, 64, 224, 700)
    assert efficiencies([one, other_size, other_batch]) == {}
    two = run("two", 2, 256, 224, 190)  # comparable with eight devices alone, which are so with one
    assert efficiencies([one, weak, two])["weak"] == pytest.approx(0.95)


def test_short_epochs_have_digits(tmp_path: Path) -> None:
    runs = [summarise(finished(tmp_path, name)) for name in ("a", "b")]
    runs = [replace(run, speed=replace(run.speed, median_seconds_per_epoch=0.0431)) for run in runs]
    heads, first, _ = speed_table(runs)
    assert first[heads.index("s/epoch")] == "0.0431"


def test_columns_without_figures_are_left_out(tmp_path: Path) -> None:
    runs = [summarise(finished(tmp_path, name)) for name in ("a", "b")]
    assert speed_table(runs)[0] == ["run", "device", "devices", "model", "batch", "s/epoch", "images/s", "best"]
    assert speed_table(runs[:1]) == []


def test_top_5_of_five_classes_is_left_out(tmp_path: Path) -> None:
    account = Account.of(finished(tmp_path))
    assert facts(account.summary)["best top-5"] and "val top-5" in epoch_table(account)[0]
    setup = replace(account.summary.setup, num_classes=5)
    five = replace(account, summary=replace(account.summary, setup=setup))
    assert "top-5" not in " ".join(facts(five.summary)) + markdown([five])
    assert {len(row) for row in epoch_table(five)[1]} == {len(epoch_table(five)[0])}


@pytest.mark.parametrize("width", [80, 120])
def test_six_runs_of_long_names_fit_a_terminal_and_nothing_is_cut_off(tmp_path: Path, width: int) -> None:
    names = [f"2026-11-23-convnextv2-nano-clothing-lr-0.00{i}-cosine-ema-0.9999" for i in range(6)]
    text = to_text([summarise(finished(tmp_path, name, lr=0.1 * (i + 1))) for i, name in enumerate(names)], width)
    assert max(map(len, text.splitlines())) <= width
    text = text.partition("\n\n")[0]
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and all(name in text for name in names)
    assert text.count("finished") == 6 and len(lines) == 14
    assert lines[1].index("wall time") == lines[3].index("4 min")


def test_facts_are_the_same_for_every_run(tmp_path: Path) -> None:
    empty = Run.create(tmp_path / "empty", recipe())
    write(empty, [started()], Clock())
    assert list(facts(summarise(empty))) == list(facts(summarise(finished(tmp_path))))


def test_what_a_restart_cost_stands_in_the_report(tmp_path: Path) -> None:
    words = facts(replace(summarise(restarted(tmp_path)), cost=None))
    assert re.fullmatch(r"[\d.]+ % \(1 interruption: 1 h \d\d min lost\)", words["goodput"])
    assert words["interruption 1"].startswith("killed at step 800: ")
    assert words["interruption 1"].endswith(" to start, 1 h 00 min away")
    priced = Price(name="", per_hour=3600.0)
    part = BillPart(began=0.0, seconds=100.0, attempt=1, price=priced)
    whole = summarise(Run.open(tmp_path / "restarted"))
    killed = Interruption(attempt=1, how="killed", step=9, again_seconds=2.0, start_seconds=3.0, away_seconds=60.0)
    summary = replace(
        whole,
        course=replace(whole.course, interruptions=(killed,)),
        cost=Bill(parts=(part,), price=priced, so_far=100.0, at_end=None),
    )
    assert facts(summary)["interruption 1"] == (
        "killed at step 9: 2.00 s done again, 3.00 s to start, 1 min 00 s away, 5.00 USD"
    )


def test_score_is_shown_with_its_interval(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), *map(step, range(1, 353)), evaluated(352, 0.9)], Clock())
    assert facts(summarise(run))["best top-1"] == "90.0 % (89.1 to 90.8) at epoch 1"


def test_the_batch_of_each_rank_is_shown(tmp_path: Path) -> None:
    for shares, words in (([8, 8], " (8 on each of 2 ranks)"), ([3, 3, 6], " (3 to 6 on each of 3 ranks)"), (None, "")):
        run = Run.create(tmp_path / f"run-{words}", recipe())
        machine = {"ranks": 2, "images_per_rank": shares} if shares else {}
        write(run, [structs.replace(started(), machine=machine), *map(step, range(1, 41)), logged(40)], Clock())
        assert facts(summarise(run))["batch size"] == f"{started().batch_size}{words}"
