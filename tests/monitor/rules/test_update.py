from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from tests.monitor.rules.made import (
    IMAGES,
    UPDATES,
    changed,
    evidence,
    feed,
    find,
    gpu,
    ledger,
    measured,
    on_gpu,
    recipe,
    started,
    threads,
)

from steadytrain.monitor.evidence import PartTimes


def test_a_small_model_is_launch_bound() -> None:
    # Of 65 ms, 40 do not shrink with the batch of 128: at 64 images they would be two thirds of a pass.
    facts = evidence(ledger=ledger(forward=7.0, backward=13.0, host=40.0), measured=measured(full=0.06, fixed=0.04))
    cause = find("launch", facts)
    assert cause is not None and cause.share == pytest.approx(40 / 65)
    assert cause.change == "--batch-size 1024, with a learning rate to match (--lr)"
    assert cause.saves == pytest.approx(45 / 65 * 7 / 8, abs=0.01)
    assert find("batch_size", facts) is None


def test_no_change_to_the_update_saves_more_than_the_feed_allows() -> None:
    # Half of the time goes into calling operations, but the only thread of the feed is busy 90 % of it.
    facts = evidence(
        ledger=ledger(forward=10.0, backward=20.0, host=55.0, input_decode=10.0),
        measured=measured(full=0.06, fixed=0.04, passes={"bf16": 0.03}),
        feed=feed(decode=90.0),
    )
    launch, bf16 = find("launch", facts), find("precision", facts)
    assert launch is not None and launch.share > 0.4 and launch.saves == pytest.approx(0.1, abs=0.01)
    assert bf16 is not None and bf16.saves == pytest.approx(0.1, abs=0.01)
    idle = changed(facts, feed=feed(decode=20.0), ledger=ledger(forward=10.0, backward=20.0, host=65.0))
    launch = find("launch", idle)
    assert launch is not None and launch.saves > 0.4


def test_tiny_batch_is_distinguished_from_a_small_model() -> None:
    # 16 ms an image would be 1 s at 64 images: it is the batch of 4 that is small.
    facts = evidence(
        recipe=recipe(batch_size=4),
        ledger=ledger(forward=5.0, backward=10.0, host=45.0),
        measured=measured(full=0.06, fixed=0.045, batch_size=4),
    )
    cause = find("batch_size", facts)
    assert cause is not None and cause.share == pytest.approx(50 / 65)
    assert cause.change.startswith("--batch-size 256,") or cause.change.startswith("--batch-size 128,")
    assert cause.saves > 0.7
    assert find("launch", facts) is None and find("optimizer", facts) is None


def test_a_batch_so_small_that_one_thread_computes_it_leaves_cores_idle() -> None:
    # 15 ms are fixed, and an image takes 4 ms more with one thread, 2.5 ms with two.
    tiny = evidence(
        recipe=recipe(batch_size=8),
        started=started(compute_threads=1, threads_seconds={"1": 0.047, "2": 0.05}),
        ledger=ledger(forward=15.0, backward=25.0, host=20.0),
        measured=structs.replace(
            measured(full=0.047, fixed=0.015, batch_size=8, passes={"other threads=2": 0.095}), other_batch_size=32
        ),
    )
    cause = find("batch_size", tiny)
    assert cause is not None and cause.share == pytest.approx((20 + 5 + 40 * (1 - 2.5 / 4)) / 65, abs=0.01)
    alone = changed(tiny, measured=measured(full=0.047, fixed=0.015, batch_size=8))
    cause = find("batch_size", alone)
    assert cause is not None and cause.share == pytest.approx(25 / 65, abs=0.01)


def test_a_batch_never_grows_beyond_what_the_data_and_the_device_hold() -> None:
    fixed = ledger(forward=7.0, backward=13.0, host=40.0)
    few = evidence(ledger=fixed, measured=measured(fixed=0.04), started=started(num_train=6000))
    cause = find("launch", few)
    assert cause is not None and cause.change.startswith("--batch-size 256,")
    none = evidence(ledger=fixed, measured=measured(fixed=0.04), started=started(num_train=3000))
    cause = find("launch", none)
    assert cause is not None and cause.change == "" and cause.saves == 0
    full = on_gpu(ledger=fixed, recipe=recipe(parallel__graph=True), devices=(gpu(memory_bytes=3 * 10**10),))
    cause = find("launch", full)
    assert cause is not None and cause.change.startswith("--batch-size 256,")


def test_a_tenth_has_to_be_at_stake_before_a_larger_batch_is_advised() -> None:
    for host, is_told in ((6.0, False), (8.0, True)):
        facts = evidence(ledger=ledger(forward=19.0, backward=38.0, host=host), measured=measured(fixed=0.04))
        assert (find("launch", facts) is not None) == is_told


def test_unmeasured_fixed_costs_are_not_named() -> None:
    assert find("launch", evidence()) is None and find("batch_size", evidence()) is None


def test_gpu_that_waits_for_launches_is_found_by_the_ledger_alone() -> None:
    waits = ledger(forward=7.0, backward=13.0, host=40.0)
    cause = find("launch", on_gpu(ledger=waits))
    assert cause is not None and cause.change == "--graph" and cause.saves == pytest.approx(40 / 65)
    assert "waits 40.0 ms for the host" in cause.evidence[0]
    other = find("launch", on_gpu(ledger=waits, recipe=recipe(optim__name="rmsprop")))
    assert other is not None and other.change == "--compile reduce-overhead" and other.saves == 0
    graph = find("launch", on_gpu(ledger=waits, recipe=recipe(parallel__graph=True)))
    assert graph is not None and graph.change.startswith("--batch-size 512")
    tiny = on_gpu(ledger=ledger(forward=10.0, backward=10.0, host=40.0), recipe=recipe(batch_size=8))
    assert find("batch_size", tiny) is not None and find("launch", tiny) is None
    assert find("launch", on_gpu(ledger=ledger(host=3.0))) is None


def test_bf16_that_is_slower_than_fp32_is_useless() -> None:
    facts = evidence(recipe=recipe(precision__name="bf16"), measured=measured(full=0.06, passes={"fp32": 0.03}))
    cause = find("precision", facts)
    assert cause is not None and cause.change == "--precision fp32"
    assert cause.share == pytest.approx(60 / 65 / 2, abs=0.01)


def test_emulated_bf16_is_found_without_a_measured_pass() -> None:
    bf16 = recipe(precision__name="bf16")
    cause = find("precision", evidence(recipe=bf16, started=started(isa="AVX2")))
    assert cause is not None and cause.change == "--precision fp32" and "about" in cause.sentence
    assert find("precision", evidence(recipe=bf16, started=started(isa="AVX512"))) is None
    assert find("precision", on_gpu(recipe=bf16, started=started(isa="AVX2", device="H100"))) is None


def test_bf16_that_was_measured_faster_is_advised() -> None:
    cause = find("precision", evidence(measured=measured(full=0.06, passes={"bf16": 0.04})))
    assert cause is not None and cause.change == "--precision bf16"
    assert find("precision", evidence(measured=measured(full=0.06, passes={"bf16": 0.07}))) is None
    assert find("precision", evidence(measured=measured(full=0.06, passes={"bf16": 0.057}))) is None, (
        "within what is noise"
    )


def test_passes_that_were_measured_beside_others_prove_little() -> None:
    facts = evidence(measured=measured(full=0.06, passes={"bf16": 0.04}), threads=threads(ran=25.0, queued=40.0))
    assert find("precision", facts) is None, "a third less is what the neighbours do"


def test_idle_tensor_cores_ask_for_bf16_where_the_gpu_is_busy() -> None:
    cause = find("precision", on_gpu(devices=(gpu(tensor_active=0.0, sm_active=0.9),)))
    assert cause is not None and cause.change == "--precision bf16"
    assert find("precision", on_gpu(devices=(gpu(tensor_active=0.0, sm_active=0.2),))) is None, "the GPU waits"
    assert find("precision", on_gpu(devices=(gpu(),))) is None, "the driver does not tell"
    idle, busy = gpu(tensor_active=0.0, sm_active=0.9), gpu(index=1, tensor_active=0.4, sm_active=0.9)
    assert find("precision", on_gpu(devices=(idle, busy))) is None, "those of another rank work"
    assert find("precision", on_gpu(devices=(idle, gpu(index=1, tensor_active=0.0, sm_active=0.9)))) is not None


def test_a_giant_optimizer_is_named_with_its_parameters() -> None:
    facts = evidence(ledger=ledger(forward=10.0, backward=20.0, optimizer=50.0), recipe=recipe(batch_size=16))
    cause = find("optimizer", facts)
    assert cause is not None and cause.share == pytest.approx(50 / 80)
    assert "272,474 trained parameters" in cause.evidence[0]
    assert cause.change.startswith("--batch-size ") and cause.saves > 0.5
    assert find("optimizer", evidence()) is None, "5 s of 65 are usual"


def test_values_asked_for_in_each_step_cost_on_a_gpu_only() -> None:
    passes = measured(syncs=("net.py:12",))
    cause = find("sync", evidence(measured=passes))
    assert cause is not None and cause.share == 0 and "costs nothing on a CPU" in cause.sentence
    cause = find("sync", on_gpu(measured=passes, ledger=ledger(host=20.0)))
    assert cause is not None and cause.share == pytest.approx(20 / 85) and "net.py:12" in cause.change
    waits = measured(syncs=("net.py:12",), full=0.06, fixed=0.03)
    cause = find("sync", on_gpu(measured=waits, devices=(gpu(utilisation=0.5),)))
    passes_share = ledger().share("forward", "backward")
    assert cause is not None and cause.share == pytest.approx(passes_share / 2), "its gaps lie in the passes"
    assert "GPU 0 was busy 50 % of the time" in cause.evidence


def stretches(*forward: float, backward: float = 0.04) -> tuple[PartTimes, ...]:
    """Of 1,000 updates, as long as told."""
    each, images = UPDATES // len(forward), IMAGES // len(forward)
    return tuple(
        PartTimes(step=each * number, images=images, seconds={"forward": seconds, "backward": backward})
        for number, seconds in enumerate(forward, 1)
    )


def test_a_forward_pass_that_grows_from_step_to_step_is_named_with_its_steps() -> None:
    cause = find("growth", evidence(parts=stretches(0.01, 0.013, 0.017, 0.02, 0.023)))
    assert cause is not None and cause.share == pytest.approx(200 * 5 * 0.0033 * 2.5 / 65), "3.3 ms more in each fifth"
    assert "by step 1,000 the forward pass takes 2.3 times as long as by step 200" in cause.sentence
    assert cause.evidence[0].startswith("the forward pass takes 10.0 ms by step 200, 13.0 ms by step 400")


def test_growth_that_gets_faster_costs_what_is_beyond_its_beginning() -> None:
    cause = find("growth", evidence(parts=stretches(0.02, 0.024, 0.032, 0.05, 0.1)))
    assert cause is not None and "the forward pass takes 5.0 times as long" in cause.sentence
    assert cause.share == pytest.approx(200 * (0.226 - 5 * 0.018) / 65, rel=0.02), "18 ms at the first update"


def test_growth_may_begin_slowly() -> None:
    cause = find("growth", evidence(parts=stretches(0.0401, 0.0406, 0.0494, 0.0589, 0.0654)))
    assert cause is not None and "the forward pass takes 1.6 times as long" in cause.sentence


@pytest.mark.parametrize(
    "forward",
    [
        (0.02,) * 5,
        (0.01, 0.01, 0.04, 0.04, 0.04),
        (0.01, 0.0105, 0.03, 0.04, 0.041),
        (0.01, 0.02, 0.03, 0.015, 0.04),
        (0.04, 0.03, 0.02, 0.01, 0.01),
    ],
    ids=["steady", "once", "once, in the middle of a fifth", "up and down", "faster"],
)
def test_what_does_not_grow_steadily_is_no_growth(forward: tuple[float, ...]) -> None:
    assert find("growth", evidence(parts=stretches(*forward))) is None


def test_growing_waits_for_a_core_are_no_growth_of_the_model() -> None:
    parts = stretches(0.01, 0.013, 0.017, 0.02, 0.023)
    waits = threads(ran=30.0, queued=25.0)
    assert find("growth", evidence(parts=parts, threads=waits)) is not None, "its backward pass does not grow"
    everything = tuple(
        replace(part, seconds={"forward": part.seconds["forward"], "backward": 2 * part.seconds["forward"]})
        for part in parts
    )
    assert find("growth", evidence(parts=everything, threads=waits)) is None
    assert find("growth", evidence(parts=everything)) is not None, "nothing kept a core from it"


def test_growth_is_timed_by_a_part_that_does_not_grow_where_the_cores_became_fewer() -> None:
    times = ((0.03, 0.05), (0.11, 0.1), (0.15, 0.1), (0.19, 0.1), (0.23, 0.1))
    parts = tuple(
        replace(part, seconds={"forward": forward / 4, "backward": backward / 4})
        for part, (forward, backward) in zip(stretches(*(0.01,) * 5), times, strict=True)
    )
    cause = find("growth", evidence(parts=parts))
    # Timed by the backward pass it grows from 21.5 ms by 21 in each fifth; on one core both take twice that.
    assert cause is not None and cause.share == pytest.approx(200 * (0.71 - 9 * 0.0215) / 4 / 65)


def test_images_that_grow_by_the_recipe_are_no_growth() -> None:
    facts = evidence(parts=stretches(0.01, 0.013, 0.017, 0.02, 0.023))
    assert find("growth", changed(facts, recipe=recipe(data__grow_size=("16@0.5", "32@1")))) is None


def test_layers_that_are_trained_one_after_another_are_no_growth() -> None:
    facts = evidence(parts=stretches(0.01, 0.013, 0.017, 0.02, 0.023))
    assert find("growth", changed(facts, recipe=recipe(model__train="gradual:2"))) is None
