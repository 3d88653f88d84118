"""What a recipe that was read from a file may not do by itself: a row of the table, a test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.config.strangers import GATES, Gate
from steadytrain.errors import RecipeError
from steadytrain.machine.web import is_inner
from steadytrain.training.data import open_data

RECIPE = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
VALUES = {
    "model.name": "pkg.mod:net",
    "optim.name": "pkg.mod:optimizer",
    "optim.loss": "pkg.mod:loss",
    "data.transforms": ["pkg.mod:transform"],
    "every.upload": "s3://bucket/run",
    "every.notices": "aws",
    "parallel.ray_address": "192.0.2.2:6379",
}
PLACES = [gate for gate in GATES if gate.part == "data" and gate.key != "transforms"]
INNER = "http://169.254.169.254/latest/x.rec"


def test_the_page_has_the_rows_of_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trust.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (.*) \| (.*) \|$", page, re.M)
    assert [Gate(*row) for row in rows] == list(GATES)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.part}.{gate.key}")
def test_a_value_of_a_file_is_known_as_one_until_the_command_names_it(gate: Gate) -> None:
    name = f"{gate.part}.{gate.key}"
    value = VALUES.get(name, INNER)
    more = {"parallel.engine": "async"} if gate.part == "parallel" else {}
    named = RECIPE.with_({name: value, **more})
    assert gate.key not in getattr(named, gate.part).from_file
    read = Recipe.from_json(named.to_json())
    assert gate.key in getattr(read, gate.part).from_file
    assert gate.key in getattr(read.with_(seed=3), gate.part).from_file
    assert gate.key not in getattr(read.with_({name: value}), gate.part).from_file


@pytest.mark.parametrize("gate", PLACES, ids=lambda gate: gate.key)
def test_an_address_of_this_machine_in_a_file_is_not_asked(gate: Gate) -> None:
    name = f"data.{gate.key}"
    read = Recipe.from_json(RECIPE.with_({name: INNER}).to_json())
    message = rf"^{name} of the recipe file leads to {INNER}, .*; to read it, add --set {name}={INNER}$"
    with pytest.raises(RecipeError, match=message):
        open_data(read.data, seed=0)


def test_several_sources_of_a_file_are_each_looked_at(tmp_path: Path) -> None:
    values = {**RECIPE.to_dict(), "data": {"train": f"{tmp_path}/a.rec,{INNER}"}}
    with pytest.raises(RecipeError, match="leads to http://169"):
        open_data(Recipe.from_json(json.dumps(values)).data, seed=0)


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:8080/a.rec",
        "https://localhost/a.rec",
        "http://metadata.google.internal/a",
        "http://10.1.2.3/a",
        "http://192.168.0.1/a",
        "http://[::1]/a",
        "http://[fe80::1%25eth0]/a",
        "http://[::ffff:169.254.169.254]/a",
        "http://0x7f000001/a",
        "http://127.1/a",
        "http://user:word@169.254.169.254/a",
        "HTTP://LOCALHOST./a",
        "http://printer/a",
        "http:///a",
        "http://0/a",
        "http://[a",
    ],
)
def test_addresses_within_this_machine_or_its_network(uri: str) -> None:
    assert is_inner(uri)


@pytest.mark.parametrize("uri", ["https://example.com/a.rec", "http://93.184.216.34/a", "s3://bucket/a", "a.rec"])
def test_other_addresses(uri: str) -> None:
    assert not is_inner(uri)
