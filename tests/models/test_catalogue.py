"""The catalogue: which models a pattern means, where their weights are, and counts that agree with others' tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torchvision.models import get_model_weights
from torchvision.models.inception import InceptionAux

from steadytrain.errors import ModelError
from steadytrain.models.counts import ModelCounts, count, counts
from steadytrain.models.registry import BUILT_IN, Entry, catalogue, find


@pytest.fixture(autouse=True)
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the caches of both hubs, ``hf`` and ``torch``, begin empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def names(pattern: str, *, tags: bool = False) -> list[str]:
    return [entry.name for entry in catalogue(pattern, tags=tags)]


def entry(name: str) -> Entry:
    """The one entry of exactly this name."""
    return next(entry for entry in catalogue(name) if entry.name == name)


def test_an_old_name_lists_what_timm_calls_it_now() -> None:
    assert names("tv_resnet50") == names("timm/tv_resnet50") == ["timm/resnet50.tv_in1k"]


def test_without_a_pattern_everything_is_listed_once_and_can_be_found_by_its_name() -> None:
    models = names("")
    assert tuple(models[: len(BUILT_IN)]) == BUILT_IN
    assert len(models) == len(set(models)) > 1000
    assert [find(name).name for name in models] == models


def test_a_piece_of_a_name_matches_wherever_it_stands() -> None:
    models = names("ResNet50")
    assert {"timm/resnet50", "timm/wide_resnet50_2"} <= set(models)
    assert all("resnet50" in name for name in models)


@pytest.mark.parametrize("pattern", ["timm/resnet1?", "resnet1?", "TIMM/resnet1[0-9]"])
def test_a_glob_is_for_the_whole_name_with_or_without_where_it_is_from(pattern: str) -> None:
    assert names(pattern) == ["timm/resnet18"]


def test_built_in_nets_come_first_and_numbers_in_their_order() -> None:
    models = names("resnet[2-9]*")
    assert models[:4] == ["resnet20", "resnet32", "resnet44", "resnet56"]
    assert models.index("timm/resnet26") < models.index("timm/resnet50")
    assert names("timm/resnet[0-9]*").index("timm/resnet50") < names("timm/resnet[0-9]*").index("timm/resnet101")


def test_a_dot_or_a_wish_lists_weights_instead_of_architectures() -> None:
    models = names("resnet18.*")
    assert "timm/resnet18.a1_in1k" in models
    assert models == names("timm/resnet18.") == names("timm/resnet18.*", tags=True)
    assert [entry.weights for entry in catalogue("resnet18.*")] == ["hub"] * len(models)
    assert "resnet20" not in names("resnet", tags=True)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("resnett50", "no model matches 'resnett50'. Did you mean resnet50"),
        ("timm/vittt*", "no model matches 'timm/vittt*'. Did you mean vit or "),
        ("resnet18.a1_in2k", "no weights match 'resnet18.a1_in2k'. Did you mean resnet18.a1_in1k"),
        ("lennet", "Did you mean lenet"),
        ("ResNet-50", "Did you mean resnet50 or "),
        ("mobilenet_v3_large", "Did you mean mobilenetv3_large_"),
        ("vit-base", "Did you mean vit_base_"),
        ("inceptionv3", "Did you mean inception_v3?"),
        ("qqqqqqqqq", "Without a pattern all are listed."),
        ("a[", "no model matches 'a['"),
        ("\x1b[2J", "no model matches '\\x1b[2J'"),
    ],
)
def test_what_matches_nothing_gets_the_nearest_names(pattern: str, text: str) -> None:
    with pytest.raises(ModelError) as caught:
        catalogue(pattern)
    assert text in str(caught.value)


def test_the_default_weights_are_told_with_their_tag_input_and_licence() -> None:
    network = entry("timm/convnextv2_tiny")
    assert (network.height, network.width, network.channels, network.num_classes) == (224, 224, 3, 1000)
    assert network.licence == "cc-by-nc-4.0"
    assert f"{network.name}.{network.tag}" in names("timm/convnextv2_tiny.")


def test_what_has_no_weights_has_no_licence_of_any() -> None:
    for name in ("resnet20", "timm/mobilenetv2_035"):
        network = entry(name)
        assert (network.weights, network.tag, network.licence) == ("none", "", "")


def test_every_weight_has_a_licence_if_only_unknown() -> None:
    assert all(entry.licence for entry in catalogue(tags=True))
    assert "unknown" in {entry.licence for entry in catalogue(tags=True)}


def test_images_need_not_be_square_or_coloured() -> None:
    assert (entry("timm/vit_base_patch16_sapiens2").height, entry("timm/vit_base_patch16_sapiens2").width) == (
        1024,
        768,
    )
    assert entry("lenet").channels == 1


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_what_the_hubs_client_has_fetched_is_at_hand(hubs: Path, file: str) -> None:
    repository = hubs / "hf" / "models--timm--resnet18.a1_in1k"
    place = repository / "snapshots" / "0123abcd" / file
    place.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert entry("timm/resnet18").weights == "hub"
    place.write_bytes(b"")
    assert entry("timm/resnet18").weights == "at hand"  # whose default weights these are
    at_hand = [entry.name for entry in catalogue("timm/resnet18.") if entry.weights == "at hand"]
    assert at_hand == ["timm/resnet18.a1_in1k"]


def test_what_torchs_hub_has_fetched_is_at_hand(hubs: Path) -> None:
    assert entry("timm/legacy_seresnet18").weights == "hub"
    place = hubs / "torch" / "hub" / "checkpoints" / "seresnet18-4bb0ce65.pth"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert entry("timm/legacy_seresnet18").weights == "at hand"


OF_OTHER_KINDS = [
    ("timm/resnet50", "resnet50"),
    ("timm/resnext50_32x4d", "resnext50_32x4d"),
    ("timm/wide_resnet50_2", "wide_resnet50_2"),
    ("timm/densenet121", "densenet121"),
    ("timm/mobilenetv2_100", "mobilenet_v2"),
    ("timm/efficientnet_b0", "efficientnet_b0"),
    ("timm/regnety_080_tv", "regnet_y_8gf"),
    ("timm/convnext_tiny", "convnext_tiny"),
]


@pytest.mark.parametrize(
    ("ours", "torchvisions"),
    [
        ("timm/resnet18", "resnet18"),
        ("timm/vgg16", "vgg16"),
        ("timm/mobilenetv3_large_100", "mobilenet_v3_large"),
        ("timm/vit_base_patch16_224", "vit_b_16"),
        ("timm/swin_tiny_patch4_window7_224", "swin_t"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OF_OTHER_KINDS),
    ],
)
def test_counts_agree_with_torchvisions_published_tables(ours: str, torchvisions: str) -> None:
    published = get_model_weights(torchvisions).DEFAULT.meta
    counted = count(replace(entry(ours), height=224, width=224))
    assert counted.parameters == published["num_params"]
    assert counted.macs == pytest.approx(published["_ops"] * 1e9, abs=0.6e6)  # three decimals are published


def test_inception_counts_without_the_classifier_that_only_training_uses() -> None:
    published = get_model_weights("inception_v3").DEFAULT.meta
    auxiliary = sum(parameter.numel() for parameter in InceptionAux(768, 1000).parameters())
    counted = count(entry("timm/inception_v3"))
    assert counted.parameters == published["num_params"] - auxiliary
    assert counted.macs == pytest.approx(published["_ops"] * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"),
    [
        ("resnet20", 0.27, 0.041),  # He et al. 2016, table 6, and the tables that followed it
        ("resnet56", 0.85, 0.125),
        ("resnet110", 1.7, 0.253),
        ("lenet", 0.431, 0.0023),  # of MNIST: 431,080 parameters, as Caffe's and MXNet's example
    ],
)
def test_built_in_nets_count_as_their_papers_do(name: str, millions: float, gmacs: float) -> None:
    counted = count(entry(name))
    assert counted.parameters is not None and counted.macs is not None
    assert counted.parameters / 1e6 == pytest.approx(millions, rel=0.02)
    assert counted.macs / 1e9 == pytest.approx(gmacs, rel=0.03)


def test_the_products_of_attention_are_counted() -> None:
    tokens, dim = 197, 192
    block = 12 * tokens * dim**2 + 2 * tokens**2 * dim
    assert count(entry("timm/vit_tiny_patch16_224")).macs == 12 * block + 196 * 768 * dim + dim * 1000


def test_weights_without_a_classifier_are_counted_without_one() -> None:
    full, bare = entry("timm/vit_small_patch16_224"), entry("timm/vit_small_patch16_224.dino")
    classifier = 384 * 1000 + 1000
    assert (full.num_classes, bare.num_classes) == (1000, 0)
    assert (count(full).parameters or 0) - (count(bare).parameters or 0) == classifier


def test_a_network_that_cannot_take_its_images_says_why() -> None:
    counted = count(replace(entry("timm/vit_tiny_patch16_224"), height=100, width=100))
    assert counted.macs is None
    assert counted.parameters == 5_717_416
    assert "224" in (counted.error or "")


def test_counting_leaves_no_random_number_drawn() -> None:
    before = torch.random.get_rng_state()
    count(entry("timm/vit_tiny_patch16_224"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_counts_are_remembered_and_shared_by_weights_of_one_network(tmp_path: Path) -> None:
    pairs: list[tuple[int, int]] = []
    some = catalogue("timm/resnet18.*")
    first = counts(some, cache=tmp_path, progress=lambda done, total: pairs.append((done, total)))
    networks = {(entry.height, entry.num_classes) for entry in some}
    assert first is not None
    assert pairs == [(n + 1, len(networks)) for n in range(len(networks))]
    assert len(networks) < len(some) == len(first)
    pairs.clear()
    assert counts(some, cache=tmp_path, most=0, progress=lambda done, total: pairs.append((done, total))) == first
    assert not pairs


def test_nothing_is_counted_where_too_much_would_be(tmp_path: Path) -> None:
    some = catalogue("resnet*")
    assert counts(some, most=60, cache=tmp_path) is None
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"lenet 1x28x28 10": 1}', '{"lenet 1x28x28 10": ["x", 1]}', "\x00"])
def test_a_damaged_cache_is_counted_anew(tmp_path: Path, text: str) -> None:
    some = [entry("lenet")]
    right = counts(some, cache=tmp_path)
    (file,) = tmp_path.rglob("counts-*.json")
    file.write_text(text)
    assert counts(some, cache=tmp_path) == right
    assert json.loads(file.read_text()) == {"lenet 1x28x28 10": [431_080, 2_293_000]}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    numbers = counts([entry("resnet20")], cache=tmp_path / "file")
    assert numbers is not None
    assert numbers["resnet20"] == ModelCounts(269_722, 40_551_040)


def test_what_was_counted_before_an_interruption_stays_counted(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    some = [entry("resnet20"), entry("lenet")]
    with pytest.raises(KeyboardInterrupt):
        counts(some, cache=tmp_path, progress=interrupt)
    assert counts(some[:1], cache=tmp_path, most=0) is not None
    assert counts(some, cache=tmp_path, most=0) is None
