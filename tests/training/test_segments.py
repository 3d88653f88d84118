"""A GPU's memory grows in place, unless the user, the driver or a recorded graph says otherwise."""

from __future__ import annotations

import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.training import segments

ANY = torch.device("cpu")  # nothing but one tensor is put on it
NO_GPU = torch.device("cuda", 99)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch was told; there is a torch for NVIDIA's GPUs, and nobody has set anything."""
    for name in segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("sys.platform", "linux")
    words: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", words.append, raising=False)
    return words


def test_where_nobody_says_otherwise_segments_grow(recipe: Recipe, told: list[str]) -> None:
    assert segments.settle(recipe, ANY) == "growing"
    assert told == ["expandable_segments:True"]


@pytest.mark.parametrize("name", segments.VARIABLES)
def test_what_a_user_tells_torch_stays(
    recipe: Recipe, told: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert segments.settle(recipe, ANY) == name
    assert told == []


@pytest.mark.parametrize(
    "changes", [{"parallel.graph": True}, *({"precision.compile": mode} for mode in segments.RECORDING)]
)
def test_the_memory_of_a_graph_stays_where_it_is(recipe: Recipe, told: list[str], changes: dict[str, object]) -> None:
    segments.settle(recipe, ANY)
    assert segments.settle(recipe.with_(changes), ANY) == "fixed"
    assert told[-1] == "expandable_segments:False"


@pytest.mark.skipif(torch.cuda.device_count() > 99, reason="there is a GPU of that number")
def test_where_nothing_can_be_had_that_way_it_is_as_torch_has_it(recipe: Recipe, told: list[str]) -> None:
    assert segments.settle(recipe, NO_GPU) == "fixed"
    assert told == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch knows no GPU, and not the words for its memory")
def test_torch_understands_what_it_is_told() -> None:
    try:
        assert segments._grow(True)
        with pytest.raises((RuntimeError, ValueError)):
            torch._C._accelerator_setAllocatorSettings("growing_segments:True")
    finally:
        segments._grow(False)
