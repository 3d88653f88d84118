from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.rules.made import evidence, feed, ledger, machine, measured, on_gpu, started, threads
from tests.reports.runs import finished, recipe

import steadytrain
from steadytrain.errors import RunError
from steadytrain.events import Ceilings, ThreadStats
from steadytrain.monitor import Cause, Evidence, diagnose
from steadytrain.monitor.evidence import Stretch
from steadytrain.monitor.ledger import BUCKETS
from steadytrain.monitor.rules import LEAST, find_causes, rules
from steadytrain.monitor.rules.diagnose import order
from steadytrain.reports.verdict import ceiling_line
from steadytrain.run import Run


def names(evidence: Evidence) -> list[str]:
    return [cause.name for cause in diagnose(evidence).causes]


def test_sound_run_gets_no_cause_and_its_distance_from_the_limit() -> None:
    diagnosis = diagnose(evidence(ledger=ledger(input_decode=0.65)))
    assert [cause.name for cause in diagnosis.causes] == ["nothing"]
    assert diagnosis.ceiling is not None and diagnosis.ceiling.limit == "compute" and not diagnosis.ceiling.probed
    assert diagnosis.causes[0].sentence.startswith("No bottleneck found: 1,950 images/s in the steady state, 99 %")


def test_what_every_run_has_never_hides_that_nothing_is_wrong() -> None:
    parts = {"process": 10.0, "model": 2.0}
    assert names(evidence(ledger=ledger(startup=12.0), started=started(startup=parts))) == ["nothing", "startup"]


def test_the_costlier_cause_comes_first() -> None:
    facts = evidence(ledger=ledger(evaluation=40.0, checkpoint=20.0), evaluations=(8, 40.0), checkpoints=(200, 20.0))
    assert names(facts) == ["evaluation", "checkpoint"]


def test_a_symptom_stands_behind_the_cause_that_explains_it() -> None:
    # One core of two: it is no wonder that decoding takes it from the update.
    facts = evidence(
        ledger=ledger(input_decode=60.0),
        feed=feed(seconds=125.0, decode=120.0),
        machine=machine(cores=1, machine_cores=2, cpu=0.99, idle=0.01),
    )
    causes = diagnose(facts).causes
    assert [(cause.name, cause.because) for cause in causes] == [("affinity", ""), ("decode", "affinity")]


def test_a_small_root_does_not_explain_a_large_symptom() -> None:
    causes = order(
        [Cause(name="noisy_neighbour", share=0.1, sentence=""), Cause(name="decode", share=0.6, sentence="")]
    )
    assert [cause.name for cause in causes] == ["decode", "noisy_neighbour"] and not causes[0].because


def test_little_unexplained_time_stands_behind_what_takes_most_of_it() -> None:
    def order_of(unexplained: float, other: float) -> list[str]:
        causes = [Cause(name=name, share=share, sentence="") for name, share in [("noisy_neighbour", other)]]
        return [cause.name for cause in order([*causes, Cause(name="unexplained", share=unexplained, sentence="")])]

    assert order_of(0.3, 0.5) == ["unexplained", "noisy_neighbour"]
    assert order_of(0.15, 0.65) == ["noisy_neighbour", "unexplained"]


def test_the_ceiling_is_the_probes_where_there_was_one() -> None:
    probed = Ceilings(
        step=10,
        feed_images_per_second=3000.0,
        compute_images_per_second=2200.0,
        both_images_per_second=2100.0,
        seconds=15.0,
    )
    ceiling = diagnose(evidence(ceilings=probed)).ceiling
    assert ceiling is not None and ceiling.probed and ceiling.limit == "compute" and ceiling.most == 2200.0
    assert ceiling.near == pytest.approx(128_000 / 65 / 2200)


def test_the_updates_of_a_measured_run_are_compared_with_what_the_device_can_compute() -> None:
    diagnosis = diagnose(evidence(measured=measured(forward_flops=40e6, peak_flops=0.5e12)))
    assert diagnosis.ceiling is not None and diagnosis.ceiling.mfu == pytest.approx(3 * 40e6 * 128_000 / 65 / 0.5e12)
    assert diagnosis.causes[0].evidence[-1] == "the updates use 47 % of what the device can compute (MFU)"


def test_what_cannot_be_measured_is_named_and_never_a_cause() -> None:
    diagnosis = diagnose(evidence(machine=None, feed=None))
    assert "the machine: the run recorded no samples of it" in diagnosis.not_measurable
    assert "the data loader's stages: no figures from it yet" in diagnosis.not_measurable
    diagnosis = diagnose(evidence(machine=machine(missing=("pressure.io", "steal")), measured=measured()))
    assert "waiting for the disks: this system does not report it" in diagnosis.not_measurable
    assert not any(reason.startswith("what a step") for reason in diagnosis.not_measurable)


def test_a_gpu_whose_driver_tells_nothing_is_named_too() -> None:
    missing = diagnose(on_gpu(devices=())).not_measurable
    assert any(line.startswith("the GPU's use, clock, power") and "no samples" in line for line in missing)


def test_document_is_json_with_the_whole_verdict() -> None:
    diagnosis = diagnose(evidence(ledger=ledger(evaluation=40.0), evaluations=(8, 40.0)))
    document = json.loads(json.dumps(diagnosis.to_dict()))
    assert document["causes"][0]["name"] == "evaluation" and document["causes"][0]["evidence"]
    assert set(document["ledger"]["seconds"]) == set(BUCKETS)
    assert document["ceiling"]["near"] == 1.0


def test_a_run_is_judged_from_its_folder_and_printed_in_a_few_lines(tmp_path: Path) -> None:
    diagnosis = steadytrain.diagnose(finished(tmp_path))
    assert str(diagnosis).startswith("No bottleneck found in the log: ")
    assert diagnosis.ledger.steps > 1000


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no events yet"):
        diagnose(Run.create(tmp_path / "a", recipe()))


SECONDS = st.floats(0, 1000)
CORES = st.floats(0, 2)
SHARES = st.floats(0, 1)


@st.composite
def looks(draw: st.DrawFn) -> ThreadStats:
    """Looks at any training thread, and another Python thread beside it."""
    places = [
        (draw(st.sampled_from(["forward", "evaluation", "startup"])), what, "act (net.py:3)", draw(st.floats(0, 20)))
        for what in ("sleeps", "runs", "python", "disk")
    ]
    ran = draw(st.floats(0, 65))
    others = [{"name": "reporter", "ran": draw(st.floats(0, 100)), "place": "spin (net.py:9)"}]
    return threads(*places, ran=ran, queued=draw(st.floats(0, 65 - ran)), others=others[: draw(st.integers(0, 1))])


@st.composite
def anything(draw: st.DrawFn) -> Evidence:
    """Evidence of any run, however strange."""
    held = {bucket: draw(SECONDS) for bucket in BUCKETS}
    cpu = draw(CORES)
    stages: dict[str, Any] = {name: draw(SECONDS) for name in ("read", "decode", "augment", "batch")}
    facts = evidence(
        ledger=ledger(**held),
        feed=draw(st.none() | st.just(feed(seconds=sum(held.values()), asleep=draw(SHARES), **stages))),
        machine=machine(
            cpu=cpu,
            idle=max(0.0, 2 - cpu - draw(CORES)),
            others=draw(CORES),
            cores=draw(st.sampled_from([1, 2])),
            throttled_seconds=draw(st.sampled_from([0.0, 40.0])),
            major_faults=draw(st.floats(0, 1e5)),
            minor_faults=draw(st.floats(0, 1e6)),
            system_share=draw(SHARES),
            pressure={"memory": draw(SHARES)},
        ),
        evaluations=(draw(st.integers(0, 100)), held["evaluation"]),
        checkpoints=(draw(st.integers(0, 100)), held["checkpoint"]),
        attempts=draw(st.integers(1, 5)),
        stopped=draw(st.sampled_from([0.0, 0.3])) * sum(held.values()),
        threads=draw(st.none() | looks()),
        started=started(
            startup={name: draw(SECONDS) for name in ("data", "model")},
            startup_waits={"model": draw(SECONDS)},
            startup_disk_bytes=draw(st.sampled_from([None, 0, 10**10])),
            compute_threads=draw(st.sampled_from([1, 2, 4, 16])),
        ),
        measured=draw(st.none() | st.just(measured(full=0.1, fixed=draw(st.floats(0, 0.1)), operations=300))),
    )
    if draw(st.booleans()):
        return facts
    first, later = draw(SHARES), draw(SHARES)
    return replace(
        facts,
        first=Stretch(shares={"input_decode": first, "forward": 1 - first}, feed=feed(images=50_000, **stages)),
        steady=replace(facts.steady, shares={"input_decode": later, "forward": 1 - later}),
        first_part=draw(SHARES),
    )


@given(anything())
def test_any_evidence_gives_one_verdict_in_any_order_of_the_rules(evidence: Evidence) -> None:
    diagnosis = diagnose(evidence)
    assert diagnosis.causes and diagnosis == diagnose(evidence)
    assert all(0 <= cause.share <= 1 and 0 <= cause.saves <= 1 for cause in diagnosis.causes)
    assert all(cause.sentence.endswith(".") and "  " not in cause.sentence for cause in diagnosis.causes)
    assert len({cause.name for cause in diagnosis.causes}) == len(diagnosis.causes)
    assert diagnosis.ceiling is None or 0 <= diagnosis.ceiling.near <= 1
    for cause in diagnosis.causes:  # a larger batch spares the optimizer too
        assert cause.saves <= cause.share + 1e-9 or cause.name == "launch"
    causes = find_causes(evidence)
    assert order(causes) == order(causes[::-1]) == order(order(causes))


def test_what_slowed_the_updates_is_left_out_of_what_computing_alone_allows() -> None:
    facts = evidence(machine=machine(cpu=0.5, others=1.5, idle=0.0), feed=None)
    diagnosis = diagnose(facts)
    cause = diagnosis.causes[0]
    assert cause.name == "noisy_neighbour" and diagnosis.ceiling is not None
    assert diagnosis.ceiling.without == "noisy_neighbour"
    assert diagnosis.ceiling.near == pytest.approx(1 - cause.share, abs=0.01)
    assert "allow (estimated from the run, without the noisy neighbour)" in ceiling_line(diagnosis)


def test_what_updates_do_besides_computing_is_not_what_computing_alone_allows() -> None:
    near = diagnose(evidence(ledger=ledger(communication=35.0))).ceiling
    assert near is not None and near.near == pytest.approx(0.65)


def test_a_run_far_below_its_ceiling_is_not_called_without_a_bottleneck() -> None:
    probed = Ceilings(
        step=10,
        feed_images_per_second=9000.0,
        compute_images_per_second=4000.0,
        both_images_per_second=3900.0,
        seconds=15.0,
    )
    cause = diagnose(evidence(ceilings=probed, started=started(device="H100"))).causes[0]
    assert cause.sentence.startswith(
        "Nothing that was measured holds it back: 1,969 images/s in the steady state, only 49"
    )


def figures(text: str, pattern: str) -> list[float]:
    """The numbers in a text that stand where the pattern has its group."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


@given(anything())
def test_no_cause_says_what_its_own_figures_contradict(evidence: Evidence) -> None:
    diagnosis = diagnose(evidence)
    for cause in diagnosis.causes:
        if cause.name in ("nothing", "sync"):
            continue
        assert evidence.feed is None or cause.change != f"--threads {evidence.feed.threads}", "it has them already"
        text = " ".join((cause.sentence, *cause.evidence))
        percents = figures(cause.sentence, r"([\d.,]+) %")
        if "another" in cause.sentence:  # a sentence each, for the loop's waits and for the others
            assert sum(percents[:2]) == pytest.approx(100 * cause.share, abs=1.1), text
        elif cause.name not in ("compile", "recompile"):
            assert any(quoted == pytest.approx(100 * cause.share, abs=0.51) for quoted in percents), text
        assert 0.0 not in percents or cause.name == "waiting", text
        assert not re.search(r"(?<![\d.,])(0|0\.0) (cores?|evaluations?|checkpoints?|threads?)\b", cause.sentence), text
        assert 0.0 not in figures(text, r"([\d.]+) times as long"), text
        for seconds in figures(cause.sentence, r"(?:took|waited|stopped for) ([\d.]+) s\b"):
            if "another" not in cause.sentence:
                assert seconds == pytest.approx(cause.share * evidence.ledger.wall_seconds, rel=0.01), text
        if cause.name == "noisy_neighbour":
            counted = figures(cause.sentence, r"take ([\d.]+) cores?")
            assert counted or "take longer meanwhile" in cause.sentence, text
            assert all(cause.share <= cores + 0.05 for cores in counted), text
        if cause.name == "busy_thread":
            (used,) = figures(cause.evidence[0], r"processor ([\d.]+) %")
            assert 100 * cause.share <= used + 1, text
        if cause.name == "quota" and "throttled" not in text:
            assert evidence.machine is not None and evidence.machine.cores < evidence.machine.machine_cores, text
        if cause.name == "memory" and " reading " in cause.sentence:
            assert figures(text, r"([\d,]+) pages")[0] > 0, text
        if cause.sentence.startswith("The loop waits") and evidence.first.shares is None:
            waited = evidence.ledger.share(*(name for name in BUCKETS if name.startswith(("input", "epoch"))))
            assert cause.share <= waited + LEAST / 3 + 1e-9 or "storage" in cause.name, text
    slows = {name for rule in rules() for name in rule.slows}
    slowed = [cause.share for cause in diagnosis.causes if cause.name in slows and cause.share >= LEAST]
    if diagnosis.ceiling is not None and slowed and diagnosis.ceiling.limit == "compute":
        assert diagnosis.ceiling.near <= 1 - max(slowed) + 0.05 + 1e-9, "what was lost is no part of what it reaches"
