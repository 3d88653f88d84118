"""The recipe that a user gets who chooses nothing, for the data at hand."""

from __future__ import annotations

from steadytrain.config import Budget, Data, Model, Optim, Precision, Recipe
from steadytrain.data.loader import SMALL
from steadytrain.errors import RecipeError
from steadytrain.training.data import Facts


def default_recipe(train: str, facts: Facts, *, model: str | None, finetune: bool) -> Recipe:
    """Defaults for training from scratch or fine-tuning on data of this size.

    Args:
        train: the data's path.
        facts: what was seen of them.
        model: the model's name, if the user chose one.
        finetune: start from pretrained weights.

    Raises:
        RecipeError: fine-tuning without a model.
    """
    if finetune:
        return _finetune(train, model)
    small = facts.largest_side <= SMALL
    return _small(train, model) if small else _large(train, model)


def _small(train: str, model: str | None) -> Recipe:
    # CIFAR's recipe: He et al. 2016, section 4.2, with a cosine instead of two drops.
    return Recipe(
        data=Data(train=train),
        model=Model(model or "resnet20"),
        optim=Optim("sgd", lr=0.1, base_batch_size=128, weight_decay=5e-4, warmup_epochs=0.5),
        precision=_precision(),
        budget=Budget(epochs=30),
        batch_size=128,
    )


def _large(train: str, model: str | None) -> Recipe:
    # ImageNet's: Goyal et al. 2017, with the cosine and label smoothing of He et al. 2019.
    return Recipe(
        data=Data(train=train),
        model=Model(model or "timm/resnet50"),
        optim=Optim("sgd", lr=0.1, base_batch_size=256, weight_decay=5e-5, warmup_epochs=5, label_smoothing=0.1),
        precision=_precision(),
        budget=Budget(epochs=90),
        batch_size=128,
    )


def _finetune(train: str, model: str | None) -> Recipe:
    # What served MobileNetV2 best on 640 photographs of ten classes: rates that fall from the head down (Howard & Ruder
    # 2018), the weights' own batch statistics at this small batch, and crops that keep most of the image.
    if model is None:
        raise RecipeError("name the model to fine-tune: --model timm/mobilenetv3_large_100, for example")
    return Recipe(
        data=Data(train=train, area=(0.4, 1.0)),
        model=Model(model, pretrained=True, train="discriminative", decay=0.8, batch_norm="frozen"),
        optim=Optim("adamw", lr=1e-3, weight_decay=0.05, warmup_epochs=0.5, label_smoothing=0.1, ema=0.99),
        precision=_precision(),
        budget=Budget(epochs=8),
        batch_size=16,
    )


def _precision() -> Precision:
    """bf16 where the hardware multiplies it natively, fp32 elsewhere."""
    import torch

    if torch.cuda.is_available():
        return Precision("bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp32")
    return Precision("bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32")
