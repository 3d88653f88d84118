"""Sizes and networks, compared by probes of their features out of fold before a run within so many minutes."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from steadytrain import models
from steadytrain.config import Data, Model, Recipe
from steadytrain.config.defaults import FETCHED_MODELS
from steadytrain.errors import ModelError
from steadytrain.events import Tried
from steadytrain.models import fetch_weights
from steadytrain.models.registry import Entry, ModelSource, find, has_local_weights
from steadytrain.training.finetuning import compare as comparing
from steadytrain.training.finetuning.compare import best_of, compare, list_candidates


@pytest.fixture(scope="module")
def start(from_resnet20: Recipe) -> Recipe:
    """Fine-tuning from a network of digits that takes images of any size."""
    return from_resnet20.with_({"model.train": "probe+full"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure for a moment."""
    monkeypatch.setattr(comparing, "MEASURE_SECONDS", 0.1)


def test_sizes_are_compared_by_the_out_of_fold_loss_of_their_probes(
    start: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "SIZES", (2, 8))
    said: list[str] = []
    candidates = list_candidates(start, {"model.name", "model.weights"}, allow_import=False)
    assert [recipe.data.size for recipe in candidates] == [2, 8]
    best = compare(candidates, 60, began=time.perf_counter(), allow_import=False, say=said.append)
    assert [event.size for event in best.tried] == [2, 8] and len(said) == 2
    assert best.recipe.data.size == min(best.tried, key=lambda event: event.loss).size == 8
    assert [event.verdict for event in best.tried] == ["", "chosen"]
    assert best.num_train == 320 and best.num_val == 80 and best.rates.full > 0
    assert all(event.what == "features" and event.loss_error for event in best.tried)


def test_what_the_user_chose_stays(start: Recipe) -> None:
    named = {"model.name", "model.weights"}
    (only,) = list_candidates(start.with_({"data.size": 8}), {*named, "data.size"}, allow_import=False)
    assert only.data.size == 8
    assert list_candidates(start.with_({"model.train": "full"}), named, allow_import=False) == [
        start.with_({"model.train": "full"})
    ]


def test_networks_are_those_whose_free_weights_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, Any] = {"height": 160, "width": 160, "channels": 3, "num_classes": 1000, "weights": "at hand"}
    catalogue = [
        Entry(name="timm/test_vit", licence="cc-by-nc-4.0", **here),
        Entry(name="timm/test_resnet", licence="apache-2.0", **here),
        Entry(name="timm/test_efficientnet", licence="apache-2.0", **{**here, "weights": "hub"}),
    ]
    monkeypatch.setattr(comparing, "catalogue", lambda: catalogue)
    recipe = Recipe(
        data=Data(train="photos"), model=Model("timm/mobilenetv2_100", pretrained=True, train="probe+discriminative")
    )
    names = {each.model.name for each in list_candidates(recipe, set(), allow_import=False)}
    assert names == {"timm/mobilenetv2_100", "timm/test_resnet"}
    chosen = {each.model.name for each in list_candidates(recipe, {"model.name"}, allow_import=False)}
    assert chosen == {"timm/mobilenetv2_100"}


def test_too_few_minutes_for_a_comparison_take_the_fastest(start: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "SIZES", (2, 8))
    candidates = list_candidates(start, {"model.name", "model.weights"}, allow_import=False)
    best = compare(candidates, 1e-4, began=time.perf_counter(), allow_import=False, say=lambda line: None)
    assert best.recipe.data.size == 2 and not best.tried


@pytest.mark.parametrize(
    ("losses", "epochs", "size"),
    [
        ((0.43, 0.30, 0.27), (31, 11, 5), 224),  # more epochs on a smaller size make up for less
        ((0.43, 0.32, 0.27), (31, 11, 5), 224),
        ((0.43, 0.32, 0.27), (31, 11, 2), 160),  # no time for updates
        ((0.90, 0.70, 0.27), (31, 11, 2), 224),  # its probe is better than the updates of others
        ((0.43, 0.32, 0.27), (2, 1, 0), 224),
    ],
)
def test_the_choice_weighs_the_probe_and_the_time_for_updates(
    losses: tuple[float, ...], epochs: tuple[float, ...], size: int
) -> None:
    tried = [
        Tried(
            step=0,
            what="features",
            model="a",
            size=s,
            loss=loss,
            loss_error=0.03,
            top1=0.9,
            seconds=1,
            verdict="",
            epochs=n,
        )
        for s, loss, n in zip((96, 160, 224), losses, epochs, strict=True)
    ]
    assert tried[best_of(tried)].size == size


class Hub(http.server.BaseHTTPRequestHandler):
    """Files of the hub, as its own client asks for them; those of names with ``slow`` never come."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.files.get(self.path, b""))

    def _answer(self, body: bytes) -> None:
        data = self.files.get(self.path)
        self.send_response(200 if data is not None or self.path == "/" else 404)
        if data is not None:
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0123456789" * 4)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub on this machine that has one network, and an empty cache; for this process and its children."""
    import timm
    from huggingface_hub import constants

    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "file")
    monkeypatch.setattr(Hub, "files", {PLACE: (tmp_path / "file").read_bytes()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name, value in (
            ("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}"),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
            ("HF_HUB_OFFLINE", "0"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield tmp_path / "hub"
        server.shutdown()
        thread.join()


PLACE = "/timm/test_resnet.r160_in1k/resolve/main/model.safetensors"


def test_networks_are_fetched_for_a_comparison_where_the_user_allows_it(
    start: Recipe, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "SIZES", (32,))
    recipe = start.with_({"model.name": "timm/test_efficientnet", "model.weights": None, "model.train": "probe+full"})
    own = list_candidates(recipe, {"model.name"}, allow_import=False)
    pretrained = own[0].with_({"model.pretrained": True})
    fetched = [pretrained.with_({"model.name": f"timm/test_{name}"}) for name in ("resnet", "byobnet")]
    said: list[str] = []
    best = compare([*own, *fetched], 60, began=time.perf_counter(), allow_import=False, say=said.append)
    assert {event.model for event in best.tried} == {"timm/test_efficientnet", "timm/test_resnet"}
    assert has_local_weights("timm/test_resnet") and not has_local_weights("timm/test_byobnet")
    assert any(line.startswith("timm/test_byobnet is not compared: cannot fetch the weights") for line in said), said
    assert any(hub.rglob("model.safetensors"))


def test_what_may_be_fetched_is_a_candidate_only_where_the_user_says_so() -> None:
    recipe = Recipe(
        data=Data(train="photos"), model=Model("timm/mobilenetv2_100", pretrained=True, train="probe+discriminative")
    )
    for fetches in (False, True):
        names = {each.model.name for each in list_candidates(recipe, set(), allow_import=False, fetches=fetches)}
        assert (set(FETCHED_MODELS) <= names) == fetches
    named = list_candidates(recipe, {"model.name"}, allow_import=False, fetches=True)
    assert {each.model.name for each in named} == {"timm/mobilenetv2_100"}


def test_weights_that_come_too_slowly_are_given_up(hub: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch the weights of timm/test_resnet \(not within"):
        fetch_weights(find("timm/test_resnet"), seconds=0)


def test_no_network_is_asked_for_once_the_time_for_fetching_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = list[str](), list[str]()

    def fetch(source: ModelSource, *, seconds: float) -> None:
        asked.append(source.name)
        time.sleep(seconds)

    monkeypatch.setattr(models, "fetch_weights", fetch)
    names = ["timm/test_resnet", "timm/test_vit"]
    assert comparing._fetch(names, 0.05, said.append) == {"timm/test_vit"}
    assert asked == ["timm/test_resnet"]
    assert said[1:] == ["timm/test_vit is not compared: the time for fetching is over"]


@pytest.mark.parametrize("name", list(FETCHED_MODELS))
def test_networks_that_may_be_fetched_are_free_and_as_costly_as_is_said(name: str) -> None:
    import timm
    from torch.utils.flop_counter import FlopCounterMode

    assert find(name).licence == "apache-2.0"
    options: dict[str, Any] = {"img_size": 224} if "vit" in name else {}
    with torch.device("meta"), torch.no_grad():
        network = timm.create_model(name.removeprefix("timm/"), **options).eval()
        with FlopCounterMode(display=False) as counter:
            network(torch.zeros(1, 3, 224, 224))
    cost = counter.get_total_flops() / 2e9, sum(p.numel() for p in network.parameters()) / 1e6
    assert cost == pytest.approx(FETCHED_MODELS[name], abs=0.06)
