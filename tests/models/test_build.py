"""Building: options, sizes, channels, factories, and the hub, each with its one clear line."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from steadytrain import models
from steadytrain.config import Model
from steadytrain.errors import InputError, ModelError
from steadytrain.models import Built, Input
from steadytrain.models.class_names import imagenet_synsets


def build(name: str, *, classes: int = 10, channels: int = 3, size: int | None = 32, **more: Any) -> Built:
    return models.build(Model(name, **more), num_classes=classes, channels=channels, size=size, allow_import=True)


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("mlp", {"options": {"hiden": 1}}, "mlp has no option 'hiden', it has hidden. Did you mean hidden?"),
        ("resnet20", {"options": {"num_classes": 3}}, "model.options.num_classes cannot be set"),
        ("mlp", {"options": {"hidden": 1}}, "mlp cannot be built: hidden is 1; it must be 2 or more"),
        ("resnet20", {"pretrained": True}, "no weights for the built-in resnet20: train it from scratch (steady train"),
        ("lenet", {"size": 8}, "lenet needs images of at least 16 pixels, not 8"),
        ("timm/resnet10t", {"options": {"pad_typ": "same"}}, "unexpected keyword argument 'pad_typ'"),
        ("timm/resnet10t", {"options": {"act_layer": "swsh"}}, "timm/resnet10t cannot be built: KeyError: 'swsh'"),
        ("timm/resnet10t", {"options": {"block": "big"}}, "cannot be built: 'str' object has no attribute 'expansion'"),
        (
            "timm/resnet10t",
            {"options": {"cache_dir": "/a"}},
            "model.options.cache_dir cannot be set: weights come from",
        ),
        (
            "torchvision/resnet18",
            {"options": {"weights": "DEFAULT"}},
            "model.options.weights cannot be set: weights come",
        ),
        ("timm/inception_v3", {"size": 32}, "cannot take images of 32x32 pixels and 3 channels (Calculated padded"),
        ("torchvision.models:resnet18", {"channels": 1}, "32x32 pixels and 1 channel (Given groups=1, weight of size"),
        ("torchvision.models:resnet18", {"options": {"zero": 1}}, "unexpected keyword argument 'zero'"),
        ("torchvision.models:resnet18", {"pretrained": True}, "does not know where torchvision.models:resnet18 keeps"),
        ("torchvision.models:resnet19", {}, "no attribute 'resnet19'"),
        (
            "nowhere.at_all:net",
            {},
            "nowhere.at_all:net cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("torchvision.ops:box_area", {}, "torchvision.ops:box_area cannot be built: "),
    ],
)
def test_what_cannot_be_built_is_one_clear_line(name: str, more: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **more)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def own_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's package ``mynets``."""
    package = ModuleType("mynets")
    monkeypatch.setitem(sys.modules, "mynets", package)
    yield package


def test_a_users_factory_gets_classes_channels_size_and_options(own_package: ModuleType) -> None:
    seen: dict[str, Any] = {}

    def net(num_classes: int, in_chans: int, img_size: int, depth: int = 1) -> nn.Module:
        seen.update(in_chans=in_chans, img_size=img_size, depth=depth)
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * img_size**2, num_classes))

    vars(own_package)["net"] = net
    built = build("mynets:net", channels=1, size=8, options={"depth": 3})
    assert seen == {"in_chans": 1, "img_size": 8, "depth": 3}
    assert (built.name, built.head, built.input) == ("mynets:net", ("1",), Input(channels=1))


def test_a_factory_beside_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_me.py").write_text(
        "from torch import nn\ndef net(num_classes): return nn.LazyLinear(num_classes)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as the command steady has it
    with pytest.raises(ModelError, match="is only done for a model that you name yourself"):
        models.build(Model("beside_me:net"), num_classes=2, channels=3, size=8)
    assert str(tmp_path) not in sys.path
    with pytest.raises(ModelError, match=r"beside_me:net gives a tensor of shape"):
        build("beside_me:net")


@pytest.fixture(params=["with arithmetic", "by shapes alone"])
def tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks are tried as small ones are, or as large ones."""
    if request.param == "by shapes alone":
        monkeypatch.setattr(sys.modules["steadytrain.models.build"], "LARGE", 0)


@pytest.mark.usefixtures("tried")
def test_a_factory_must_give_a_classifier(own_package: ModuleType) -> None:
    class TwoInTraining(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x.flatten(1))
            return (logits, logits) if self.training else logits

    vars(own_package)["text"] = lambda num_classes: "a net"
    vars(own_package)["features"] = lambda num_classes: nn.AdaptiveAvgPool2d(1)
    vars(own_package)["two"] = lambda num_classes: TwoInTraining(3072, num_classes)
    with pytest.raises(ModelError, match=r"mynets:text gave a str; .* gives a torch.nn.Module"):
        build("mynets:text")
    with pytest.raises(ModelError, match=r"gives a tensor of shape \[2, 3, 1, 1\] .* for 10 classes gives \[2, 10\]"):
        build("mynets:features")
    with pytest.raises(ModelError, match=r"mynets:two gives a tuple for two images in training"):
        build("mynets:two")


@pytest.mark.usefixtures("tried")
def test_a_net_that_looks_at_values_is_tried_on_zeros(own_package: ModuleType) -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            return super().forward(flat if float(flat.sum()) >= 0 else -flat)

    vars(own_package)["net"] = lambda num_classes: Looks(3072, num_classes)
    assert build("mynets:net").head == ()  # the module itself has no name to train it by
    with pytest.raises(ModelError, match=r"cannot take images of 16x16 pixels"):
        build("mynets:net", size=16)


@pytest.mark.usefixtures("tried")
def test_trying_a_net_leaves_no_trace(own_package: ModuleType) -> None:
    def net(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3072), nn.Dropout(), nn.Linear(3072, num_classes))

    vars(own_package)["net"] = net
    torch.manual_seed(0)
    tried = build("mynets:net").module
    drawn = torch.rand(1)
    torch.manual_seed(0)
    fresh = net(10)
    assert torch.equal(torch.rand(1), drawn)
    assert tried.training and all(parameter.grad is None for parameter in tried.parameters())
    assert all(torch.equal(a, b) for a, b in zip(tried.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_the_input_is_the_pretrained_configurations() -> None:
    shape = build("timm/vit_tiny_patch16_224", size=64, options={"depth": 1}).input
    assert shape == Input(size=224, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9, interpolation="bicubic", channels=3)
    grey = build("timm/resnet10t", channels=1).input
    assert grey.channels == 1
    assert [*(grey.mean or ()), *(grey.std or ())] == pytest.approx([0.449, 0.226])
    assert build("resnet20").input == Input(size=32)


@pytest.mark.parametrize("name", ["timm/efficientnet_b0", "timm/inception_v3", "torchvision/inception_v3", "resnet20"])
def test_the_size_is_known_without_building(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(name, classes=2, size=None)
    monkeypatch.setattr("timm.create_model", None)
    assert models.usual_size(Model(name)) == built.input.size


def test_the_size_is_what_our_weights_state_and_of_a_users_network_not_known(
    tmp_path: Path,
) -> None:
    file = tmp_path / "weights.safetensors"
    about = {"steadytrain": json.dumps({"model": {"name": "timm/resnet18"}, "input": {"size": 96}})}
    save_file({"weight": torch.zeros(1)}, file, about)
    assert models.usual_size(Model("timm/resnet18", weights=str(file))) == 96
    assert models.usual_size(Model("nowhere.at_all:net")) is None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that cannot be reached, and an empty cache of its files."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_without_a_network_the_hub_is_given_up_at_once(hub: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"cannot fetch the weights of timm/resnet10t \(.*refused\): .*--weights FILE"):
        build("timm/resnet10t", pretrained=True)
    assert time.monotonic() - began < 20  # the hub's own client tries for 45 seconds


class _HangsUp(BaseHTTPRequestHandler):
    """A hub that is there, and ends the connection when it is asked for a file."""

    def do_HEAD(self) -> None:
        if self.path == "/":
            self.send_response(200)
            self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *value: Any) -> None:
        """Say nothing."""


def test_a_hub_that_hangs_up_is_one_clear_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), _HangsUp) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/{revision}/{filename}")
        try:
            with pytest.raises(ModelError, match=r"cannot fetch the weights of timm/resnet10t \(.*\): connect to a"):
                build("timm/resnet10t", pretrained=True)
        finally:
            server.shutdown()
            thread.join()


def test_a_model_without_hub_weights_says_so(hub: Path) -> None:
    import timm.models

    name = next(name for name in timm.models.list_models("vit_*") if not timm.models.is_model_pretrained(name))
    with pytest.raises(ModelError, match=rf"timm has no weights for timm/{name}: train it from scratch \("):
        build(f"timm/{name}", pretrained=True)


def fetched_before(hub: Path) -> Path:
    """Where the hub's client looks for the weights of resnet10t."""
    snapshot = hub / "models--timm--resnet10t.c3_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    return snapshot / "model.safetensors"


def test_fetched_weights_that_are_damaged_are_named(hub: Path) -> None:
    fetched_before(hub).write_text("<html>busy</html>")
    with pytest.raises(ModelError, match=rf"are damaged \(.*\): delete {hub}/models--timm--resnet10t.c3_in1k and run"):
        build("timm/resnet10t", pretrained=True)


class _Mirror(BaseHTTPRequestHandler):
    """A hub with one file, which states a digest."""

    content, digest = b"", ""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path in ("/", "/weights") else 404)
        self.send_header("content-length", str(len(self.content)))
        self.send_header("etag", f'"{self.digest}"')
        self.send_header("x-repo-commit", "0" * 40)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path == "/weights":
            self.wfile.write(self.content)

    def log_message(self, *value: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("is_right", [True, False])
def test_weights_of_another_digest_than_the_hub_states_are_refused(
    hub: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    import tqdm
    from huggingface_hub import constants

    whole = models.build(Model("timm/resnet10t"), num_classes=1000, channels=3, size=64)
    content = save(whole.module.state_dict())
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would stay
    monkeypatch.setattr(_Mirror, "content", content if is_right else content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(_Mirror, "digest", hashlib.sha256(content).hexdigest())
    with ThreadingHTTPServer(("127.0.0.1", 0), _Mirror) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/weights")
        try:
            if is_right:
                build("timm/resnet10t", pretrained=True, size=64)
            words = r"are damaged \(sha256 .*, the hub stated .*\): delete .* and run"
            for _ in range(0 if is_right else 2):  # what is in the cache by then is no more right
                with pytest.raises(ModelError, match=words):
                    build("timm/resnet10t", pretrained=True, size=64)
        finally:
            server.shutdown()
            thread.join()


def test_weights_fetched_once_need_no_network(hub: Path) -> None:
    whole = models.build(Model("timm/resnet10t"), num_classes=1000, channels=3, size=64)
    save_file(whole.module.state_dict(), fetched_before(hub))

    built = build("timm/resnet10t", pretrained=True, size=64)
    old, new = whole.module.state_dict(), built.module.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in new if not name.startswith("fc."))
    assert new["fc.weight"].shape[0] == 10
    assert built.licence == "apache-2.0"
    assert built.notes == ("the classifier of 1,000 classes was replaced by a fresh one for 10",)


def test_a_thousand_classes_of_other_names_do_not_get_imagenets_rows(hub: Path) -> None:
    whole = models.build(Model("timm/resnet10t"), num_classes=1000, channels=3, size=64)
    save_file(whole.module.state_dict(), fetched_before(hub))
    shape: dict[str, Any] = {"num_classes": 1000, "channels": 3, "size": 64}
    synsets = list(reversed(imagenet_synsets(1000)))
    built = models.build(Model("timm/resnet10t", pretrained=True), classes=synsets, **shape)
    assert torch.equal(built.module.get_parameter("fc.weight"), whole.module.get_parameter("fc.weight").flip(0))
    names = [f"kind {number}" for number in range(1000)]
    built = models.build(Model("timm/resnet10t", pretrained=True), classes=names, **shape)
    assert built.module.get_parameter("fc.weight").abs().max() < 0.06
    assert "was replaced by a fresh one for kind 0, kind 1" in built.notes[0]


class _Counting(nn.Sequential):
    """A network that keeps more than tensors in its state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_state_that_no_file_of_weights_can_hold_is_refused() -> None:
    name = models.name_model(_Counting(nn.Flatten(), nn.Linear(12, 2)))
    with pytest.raises(ModelError, match=r"has a dict in it \(_extra_state\), and files of weights hold tensors alone"):
        build(name, classes=2, size=2)


def test_a_size_that_a_network_refuses_is_refused_without_its_values() -> None:
    tiny: dict[str, Any] = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    source = models.find("timm/xcit_nano_12_p16_224")
    with pytest.raises(ModelError, match="should divide image dimensions evenly"):
        models.require_size(source, tiny, 200)
    models.require_size(source, tiny, 208)
    models.require_size(models.find("timm/resnet10t"), {}, 201)
