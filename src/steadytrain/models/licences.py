"""What the licence of downloaded weights allows, as far as its name says it."""

from __future__ import annotations

from typing import Literal

from steadytrain.models.lookup import find

_FREE = {"apache-2.0", "mit", "bsd-3-clause", "bsd-2-clause", "cc-by-4.0", "cc0-1.0"}
_NON_COMMERCIAL = ("-nc", "noncommercial", "non-commercial", "apple-amlr", "seer-license")

Kind = Literal["free", "non-commercial", "unknown", "own"]


def kind(licence: str) -> Kind:
    """What sort of licence it is.

    >>> kind("apache-2.0"), kind("cc-by-nc-4.0"), kind("unknown"), kind("dinov3-license")
    ('free', 'non-commercial', 'unknown', 'own')
    """
    if licence in _FREE:
        return "free"
    if any(mark in licence for mark in _NON_COMMERCIAL):
        return "non-commercial"
    return "unknown" if licence == "unknown" else "own"


def of_pretrained(name: str) -> str:
    """The licence of the weights that the hub has for a model, ``unknown`` where they do not say it; empty for none.

    Args:
        name: as for :func:`steadytrain.models.find`.
    """
    source = find(name, allow_import=True)
    if source.kind != "timm":
        return ""
    import timm.models

    config = timm.models.get_pretrained_cfg(source.inner)
    return (config.license or "unknown") if config and config.has_weights else ""


def remark(licence: str) -> str | None:
    """A line for the user about a licence that restricts, or may restrict, the use of weights; None for a free one.

    >>> remark("apache-2.0")
    >>> remark("cc-by-nc-4.0")
    'NON-COMMERCIAL weights (licence cc-by-nc-4.0): they may not be used in products or services'
    """
    match kind(licence):
        case "free":
            return None
        case "non-commercial":
            return f"NON-COMMERCIAL weights (licence {licence}): they may not be used in products or services"
        case "unknown":
            return "the licence of these weights is unknown: ask their authors before you publish what you make of them"
        case "own":
            return (
                f"these weights have a licence of their own ({licence}): read it before you use what you make of them"
            )
