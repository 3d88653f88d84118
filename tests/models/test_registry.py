"""Names of models: what they mean, what is near them, and what is never imported unasked."""

from __future__ import annotations

import inspect
import warnings

import pytest
import timm
from timm.data.config import resolve_model_data_config

from steadytrain import models
from steadytrain.config import Model
from steadytrain.errors import ModelError


@pytest.mark.parametrize(
    ("name", "kind", "full"),
    [
        ("resnet20", "built-in", "resnet20"),
        ("resnet50", "timm", "timm/resnet50"),
        ("timm/resnet50", "timm", "timm/resnet50"),
        ("resnet18.a1_in1k", "timm", "timm/resnet18.a1_in1k"),
        ("tv_resnet50", "timm", "timm/resnet50.tv_in1k"),
        ("timm/tf_efficientnet_b0_ns", "timm", "timm/tf_efficientnet_b0.ns_jft_in1k"),
        ("tv_resnet50.tv2_in1k", "timm", "timm/resnet50.tv2_in1k"),
        ("hf-hub:timm/resnet18.a1_in1k", "timm", "timm/resnet18.a1_in1k"),
        ("hf_hub:timm/resnet18.a1_in1k@main", "timm", "timm/resnet18.a1_in1k"),
        ("https://huggingface.co/timm/resnet18.a1_in1k", "timm", "timm/resnet18.a1_in1k"),
    ],
)
def test_a_name_means(name: str, kind: str, full: str) -> None:
    source = models.find(name)
    assert (source.kind, source.name) == (kind, full)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resnet5O", "there is no model 'resnet5O'. Did you mean resnet56 or resnet50"),
        ("timm/resnett50", "there is no model 'timm/resnett50'. Did you mean resnet50"),
        ("mlpp", "Did you mean mlp?"),
        ("resnet18.nope", "timm has no weights 'nope' for resnet18: it has a1_in1k, "),
        ("resnet18.", "timm has no weights '' for resnet18: it has a1_in1k, "),
        ("ResNet-50", "Did you mean resnet50?"),
        ("microsoft/resnet-50", "OWNER/NAME, are not known here, except timm's. Did you mean resnet50?"),
        ("google/vit-base-patch16-224", "Did you mean vit_base_patch16_224?"),
        ("hf-hub:microsoft/resnet-50", "fetch its weights (hf download microsoft/resnet-50)"),
        ("hf-hub:timm/resnet18.nope", "timm has no weights 'nope' for resnet18: it has a1_in1k, "),
        ("local-dir:/models/cats", "give --weights /models/cats/model.safetensors and --model NAME"),
        ("timm/quokka", "steady models PATTERN lists what there is"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name: str, text: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.find(name)
    assert text in str(caught.value)


def test_a_factory_is_imported_only_when_it_is_allowed() -> None:
    with pytest.raises(ModelError, match=r"add --model torchvision.models:resnet18 .*allow_import=True"):
        models.find("torchvision.models:resnet18")
    assert models.find("torchvision.models:resnet18", allow_import=True).kind == "import"


DEPRECATED = timm.models.get_deprecated_models()


def test_timm_has_old_names() -> None:
    assert len(DEPRECATED) > 100


@pytest.mark.parametrize("name", sorted(DEPRECATED))
def test_an_old_name_of_timms_means_what_timm_builds_by_it(name: str) -> None:
    called = inspect.getclosurevars(timm.models.model_entrypoint(name)).nonlocals  # what timm calls by the old name
    architecture, tag = called["current_fn"].__name__, called["current_tag"]
    if tag and not timm.models.is_model_pretrained(f"{architecture}.{tag}"):  # weights that timm has no more
        with pytest.raises(ModelError, match=f"timm has no weights {tag!r} for {architecture}"):
            models.find(name)
        return
    theirs = timm.models.get_pretrained_cfg(f"{architecture}.{tag}" if tag else architecture)
    assert theirs is not None
    assert timm.models.get_pretrained_cfg(models.find(name).inner) == theirs
    assert models.find(name).licence == ((theirs.license or "unknown") if theirs.has_weights else "")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224_in21k", "mobilenetv3_large_100_miil"])
def test_an_old_name_brings_the_preprocessing_of_its_weights(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = resolve_model_data_config(timm.create_model(name))  # type: ignore[no-untyped-call]
        built = models.build(Model(f"timm/{name}"), num_classes=10, channels=3, size=None)
    seen = built.input
    assert (seen.mean, seen.std, seen.crop) == (theirs["mean"], theirs["std"], theirs["crop_pct"])
    assert (seen.size, seen.interpolation) == (theirs["input_size"][-1], theirs["interpolation"])
    assert seen.mean != (0.485, 0.456, 0.406)
    assert any(note.startswith(f"{name} is an old name of timm's: it is timm/") for note in built.notes)
