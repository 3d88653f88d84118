"""Measurements in processes of their own: a crash, no memory and a hang are results, and the next one is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.tuning.probes import ProbeCache, ProbeOutcome, Prober, What

NET = """
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, does):
        super().__init__()
        self.head = nn.Linear(3, num_classes)
        self.does = does

    def forward(self, images):
        if self.training and torch.is_grad_enabled():
            if self.does == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.does == "exhaust":
                torch.empty(2**50)
            if self.does == "hang":
                time.sleep(600)
            if self.does == "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.does == "raise":
                raise KeyError("swsh")
        return self.head(images.mean((2, 3))[:, [0, 0, 0]])

def net(num_classes, does="work"):
    return Net(num_classes, does)
"""


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prober]:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "strange.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with Prober() as entered:
            yield entered


Ask = Callable[..., ProbeOutcome]


@pytest.fixture
def ask(prober: Prober, recipe: Recipe) -> Ask:
    def measure(does: str, what: What = "updates", *, limit_seconds: float = 60.0, by: Prober = prober) -> ProbeOutcome:
        changed = recipe.with_({"model.name": "strange:net", "model.options": {"does": does}})
        return by.ask(what, changed, seconds=0.1, limit_seconds=limit_seconds)

    return measure


def test_updates_loading_and_both_are_measured(ask: Ask) -> None:
    for what in ("updates", "both", "loading"):
        outcome = ask("work", what)
        assert outcome.trouble is None and outcome.images_per_second > 0, outcome
    outcome = ask("work", "updates")
    assert outcome.figures["memory_bytes"] > 1e7


@pytest.mark.parametrize(
    ("does", "trouble", "words"),
    [
        ("crash", "crash", "the process crashed (SIGSEGV)"),
        ("exhaust", "memory", "can't allocate memory"),
        ("be killed", "memory", "killed by the system"),
        ("raise", "failed", "KeyError: 'swsh'"),
    ],
)
def test_what_goes_wrong_is_recorded_and_the_next_measurement_is_made(
    ask: Ask, does: str, trouble: str, words: str
) -> None:
    outcome = ask(does)
    assert (outcome.trouble, outcome.images_per_second) == (trouble, 0.0)
    assert words in outcome.error
    assert ask("work").trouble is None


def test_a_hang_is_ended_in_time_and_the_next_measurement_is_made(ask: Ask) -> None:
    with Prober() as other:
        outcome = ask("hang", limit_seconds=2.0, by=other)
        assert (outcome.trouble, outcome.error, outcome.limit_seconds) == ("timeout", "not done in 2 s", 2.0)
        assert ask("work", by=other).trouble is None


def test_a_recipe_that_cannot_be_is_refused_in_its_own_words(prober: Prober, recipe: Recipe) -> None:
    outcome = prober.ask("updates", recipe.with_({"precision.name": "tf32"}), seconds=0.1, limit_seconds=60)
    assert outcome.trouble == "refused" and "which a CPU does not have" in outcome.error


def test_a_rank_measures_with_its_part_of_the_machine(prober: Prober, recipe: Recipe) -> None:
    with Prober(World(rank=1, size=2, local_rank=1, local_size=2)) as rank:
        part = rank.ask("facts", recipe, seconds=0, limit_seconds=60).figures
        whole = prober.ask("facts", recipe, seconds=0, limit_seconds=60).figures
    assert part["memory_bytes"] == whole["memory_bytes"] // 2 and part["cores"] == max(1, whole["cores"] // 2)


def test_the_cache_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a" / "cache.jsonl"
    cache = ProbeCache(path)
    cache.put("one", ProbeOutcome({"images_per_second": 5.0}))
    cache.put("two", ProbeOutcome({}, "timeout", "not done in 3 s", 3.0))
    with path.open("a") as file:
        file.write(json.dumps({"key": "three", "outcome": {"figures": {}}})[:-9])
    again = ProbeCache(path)
    assert again.get("one") == ProbeOutcome({"images_per_second": 5.0})
    assert again.get("two") == ProbeOutcome({}, "timeout", "not done in 3 s", 3.0)
    assert again.get("three") is None
