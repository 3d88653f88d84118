"""From a model's name to what builds it: a built-in net, timm, or a factory of the user's own.

timm takes seconds to import, so it is imported only when a name may be one of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.nets import BUILTINS

BUILT_IN = tuple(BUILTINS)
"""Names of the built-in nets."""

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Source:
    """Where a model comes from: ``built-in``, ``timm`` or ``import``, and its name there."""

    kind: Literal["built-in", "timm", "import"]
    inner: str

    @property
    def name(self) -> str:
        """The full name, such as ``timm/resnet50``."""
        return f"timm/{self.inner}" if self.kind == "timm" else self.inner


def find(name: str, *, allow_import: bool = False) -> Source:
    """Say what a model's name means.

    Args:
        name: ``timm/NAME`` or ``timm/NAME.TAG``, a built-in, a plain name that only timm has, ``pkg.mod:factory``.
        allow_import: whether a factory may be imported; so only if the user named it on this command line.

    Raises:
        ModelError: no such model (with the nearest names), or a factory that may not be imported.
    """
    if _FACTORY.fullmatch(name):
        if not allow_import:
            raise ModelError(
                f"{name} would import code, which is only done for a model named on the command line:"
                f" add --model {name} if you trust it"
            )
        return Source("import", name)
    if name in BUILTINS:
        return Source("built-in", name)
    return _find_in_timm(name.removeprefix("timm/"), name)


def _find_in_timm(inner: str, name: str) -> Source:
    import timm.models

    architecture, dot, tag = inner.partition(".")
    if not timm.models.is_model(architecture):
        choices = timm.models.list_models()
        if not name.startswith("timm/"):
            choices = [*BUILT_IN, *choices]
        near = did_you_mean(architecture, choices)
        raise ModelError(f"there is no model {name!r}.{near}")
    if dot:
        tags = [full.partition(".")[2] for full in timm.models.list_pretrained(f"{architecture}.*")]
        if tag not in tags:
            known = ", ".join(tags) or "none"
            raise ModelError(f"timm has no weights {tag!r} for {architecture}: it has {known}")
    return Source("timm", inner)
