"""Names of models: what they mean, what is near them, and what is never imported unasked."""

from __future__ import annotations

import pytest

from steadytrain import models
from steadytrain.errors import ModelError


@pytest.mark.parametrize(
    ("name", "kind", "full"),
    [
        ("resnet20", "built-in", "resnet20"),
        ("resnet50", "timm", "timm/resnet50"),
        ("timm/resnet50", "timm", "timm/resnet50"),
        ("resnet18.a1_in1k", "timm", "timm/resnet18.a1_in1k"),
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
