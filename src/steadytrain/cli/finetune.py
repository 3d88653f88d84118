"""``steady finetune``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.choices import Choices


def finetune(
    data: Annotated[str | None, Parameter(help="A .rec, or whatever steady pack takes.")] = None,
    /,
    *,
    choices: Choices = Choices(),  # noqa: B008
) -> int:
    """Adapt a pretrained model to your classes; the same command again resumes it.

    Examples
    --------
    steady finetune photos/ --model timm/mobilenetv3_large_100 --epochs 6
    steady finetune photos/ --model timm/resnet50 --weights resnet50.safetensors --set model.train=head
    """
    from steadytrain.cli.running import begin

    return begin(data, choices, finetune=True)
