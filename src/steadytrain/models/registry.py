"""Models by name: what builds them, what is known of each without building it, and the licences of their weights.

timm takes seconds to import, so it is imported only when a name may be one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlparse

from steadytrain.config.factories import FACTORY, OBJECT, checkpoint_format
from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.nets import BUILTINS, CHANNELS, SIZES
from steadytrain.models.objects import find_given

BUILT_IN = tuple(BUILTINS)
"""Names of the built-in nets."""

HUB = re.compile(
    r"(?:hf-hub:|hf_hub:|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<repository>[^?#]*)", re.IGNORECASE
)
"""Spellings of a repository of the Hugging Face hub by timm's users and by browsers."""


@dataclass(frozen=True)
class ModelSource:
    """A model's name, parsed.

    Args:
        kind: who makes it; ``checkpoint``: a checkpoint of another framework, whose files hold the network.
        name: in full, such as ``timm/resnet50``.
        inner: its name there: ``resnet50``.
    """

    kind: Literal["built-in", "timm", "torchvision", "checkpoint", "import", "object"]
    name: str
    inner: str

    @property
    def licence(self) -> str:
        """The licence of its weights on the hub: ``unknown`` where none is stated, empty without weights."""
        if self.kind != "timm":
            return ""
        import timm.models

        config = timm.models.get_pretrained_cfg(self.inner)
        return (config.license or "unknown") if config and config.has_weights else ""


def find(name: str, *, allow_import: bool = False) -> ModelSource:
    """Find out what a model's name means. A name that timm has replaced by another one means that one.

    Args:
        name: ``timm/NAME`` or ``timm/NAME.TAG``, a built-in, a plain name that only timm has, ``torchvision/NAME``,
            ``mxnet:FILES`` (a checkpoint of another framework), ``pkg.mod:factory``, a repository of timm's on the hub
            (``hf-hub:timm/NAME.TAG``), or an object that was given (:mod:`steadytrain.models.objects`).
        allow_import: whether a factory may be imported; so only if the user named it on this command line.

    Raises:
        ModelError: no such model (with the nearest names), or a factory that may not be imported.
    """
    prefix, colon, inner = name.partition(":")
    if colon and checkpoint_format(f"{prefix}:"):
        return ModelSource("checkpoint", name, inner)
    if name.startswith(OBJECT):
        find_given(name)
        return ModelSource("object", name, inner)
    if hub := HUB.fullmatch(name):
        repository = hub["repository"].strip("/").partition("@")[0]
        owner, _, inner = repository.partition("/")
        if owner != "timm" or not inner:
            raise ModelError(
                f"{name} is no repository of timm's own (hf-hub:timm/NAME), and steadytrain does not fetch from others:"
                f" fetch its weights (hf download {repository or 'OWNER/NAME'}), and give the file with --weights FILE"
                " and its network with --model NAME"
            )
        name = f"timm/{inner}"
    if FACTORY.fullmatch(name):
        if not allow_import:
            raise ModelError(
                f"{name} would import code, which is only done for a model that you name yourself: if you trust it, add"
                f" --model {name} (in Python: allow_import=True to train, model={name!r} to restore)"
            )
        return ModelSource("import", name, name)
    if name in BUILTINS:
        return ModelSource("built-in", name, name)
    if name.startswith("torchvision/"):
        inner, names = name.removeprefix("torchvision/"), torchvision_names()
        if inner not in names:
            raise ModelError(f"torchvision has no classifier {inner!r}.{did_you_mean(inner, names)}")
        return ModelSource("torchvision", name, inner)
    import timm.models

    inner = current_name(name.removeprefix("timm/"))
    architecture, dot, tag = inner.partition(".")
    if not timm.models.is_model(architecture) or (dot and name.endswith(_WEIGHT_FILES)):
        raise ModelError(f"there is no model {name!r}.{_hint(name)}")
    if dot:
        tags = [full.partition(".")[2] for full in timm.models.list_pretrained(f"{architecture}.*")]
        if tag not in tags:
            raise ModelError(f"timm has no weights {tag!r} for {architecture}: it has {', '.join(tags) or 'none'}")
    return ModelSource("timm", f"timm/{inner}", inner)


def current_name(inner: str) -> str:
    """Return the name that timm has now for one of its models or weights; another name as it is.

    timm still builds a model by a name of earlier releases, but knows its weights' configuration and licence by the
    current one only.

    Args:
        inner: without ``timm/``, with or without a tag.

    Raises:
        ModelError: timm has removed the model.

    >>> current_name("tf_efficientnet_b0_ns"), current_name("resnet50"), current_name("tv_resnet50.tv2_in1k")
    ('tf_efficientnet_b0.ns_jft_in1k', 'resnet50', 'resnet50.tv2_in1k')
    """
    import timm.models

    architecture, dot, tag = inner.partition(".")
    deprecated = timm.models.get_deprecated_models()
    if architecture not in deprecated:
        return inner
    current = deprecated[architecture]
    if current is None:
        raise ModelError(f"timm has removed {architecture} and names no other model for it: choose one (steady models)")
    return f"{current.partition('.')[0]}.{tag}" if dot else current


_WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".safetensors", ".params", ".h5", ".keras")


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classifiers; none where it is not installed."""
    try:
        import torchvision
    except ImportError:
        return []
    return list(torchvision.models.list_models(module=torchvision.models))


def _hint(name: str) -> str:
    """A hint on a name that is no model: what it is elsewhere, and the nearest names."""
    import timm.models

    if name.startswith("local-dir:"):
        folder = name.partition(":")[2]
        return f" For a folder of weights, give --weights {Path(folder) / 'model.safetensors'} and --model NAME"
    if name.endswith(_WEIGHT_FILES):
        return f" A file of weights: --weights {name} and --model NAME"
    owner, slash, inner = name.removeprefix("torchvision.").removeprefix("models.").rpartition("/")
    if not slash and inner in torchvision_names():
        return f" Did you mean torchvision/{inner}?"
    choices = [*(() if owner == "timm" else BUILT_IN), *timm.models.list_models()]
    plain = (inner if slash else name).partition(".")[0].casefold()
    same = [choice for choice in choices if _letters(choice) == _letters(plain)]
    near = f" Did you mean {' or '.join(same)}?" if same else did_you_mean(plain, choices)
    if slash and owner not in ("timm", "torchvision"):
        return f" Names of the hub, OWNER/NAME, are not known here, except timm's.{near}"
    return near or " steady models PATTERN lists what there is"


_FREE = {"apache-2.0", "mit", "bsd-3-clause", "bsd-2-clause", "cc-by-4.0", "cc0-1.0"}
_NON_COMMERCIAL = ("-nc", "noncommercial", "non-commercial", "apple-amlr", "seer-license")

LicenceKind = Literal["free", "non-commercial", "unknown", "own"]


def licence_kind(licence: str) -> LicenceKind:
    """Sort a licence by what it allows, as far as its name says it.

    >>> licence_kind("apache-2.0"), licence_kind("cc-by-nc-4.0"), licence_kind("dinov3-license")
    ('free', 'non-commercial', 'own')
    """
    if licence in _FREE:
        return "free"
    if any(mark in licence for mark in _NON_COMMERCIAL):
        return "non-commercial"
    return "unknown" if licence == "unknown" else "own"


def licence_note(licence: str) -> str | None:
    """Return a note on a licence that restricts, or may restrict, the use of weights; None for a free one.

    >>> licence_note("apache-2.0")
    >>> licence_note("cc-by-nc-4.0")
    'NON-COMMERCIAL weights (licence cc-by-nc-4.0): they may not be used in products or services'
    """
    return {
        "free": None,
        "non-commercial": f"NON-COMMERCIAL weights (licence {licence}): they may not be used in products or services",
        "unknown": "the licence of these weights is unknown: ask their authors before you publish what you make of"
        " them",
        "own": f"these weights have a custom licence ({licence}): read it before you use them",
    }[licence_kind(licence)]


Weights = Literal["at hand", "hub", "none"]

_CLASSES = 10  # classes of MNIST and CIFAR-10, which the built-in nets are meant for


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the catalogue.

    Args:
        name: as ``--model`` takes it: ``resnet20``, ``timm/resnet50``, ``timm/resnet50.a1_in1k``.
        height, width: of the images that its weights were trained for (or that the net is meant for), in pixels.
        channels: of these images.
        num_classes: of these weights' classifier; 0 where they have none.
        weights: ``at hand`` on this machine, to be fetched from the ``hub``, or ``none``.
        tag: which of the model's weights are meant (a name without a tag means its default ones); empty without any.
        licence: of these weights, ``unknown`` where they do not say it; empty without any.
    """

    name: str
    height: int
    width: int
    channels: int
    num_classes: int
    weights: Weights = "none"
    tag: str = ""
    licence: str = ""


def catalogue(pattern: str = "", *, tags: bool = False) -> list[Entry]:
    """List all models whose name matches, built-in nets first, then timm's in natural order.

    Args:
        pattern: a piece of a name, or a glob (``*``, ``?``, ``[...]``) for the whole of it, with or without ``timm/``;
            capitals do not matter; empty: everything.
        tags: list weights (``timm/resnet50.a1_in1k``) instead of architectures; a pattern with a dot does it too.

    Raises:
        ModelError: nothing matches; with the nearest names.
    """
    import timm.models

    if (plain := pattern.removeprefix("timm/")) != (current := current_name(plain)):
        pattern = current
    tags = tags or "." in pattern
    of_timm = timm.models.list_pretrained() if tags else timm.models.list_models()
    names = [*(() if tags else BUILTINS), *(f"timm/{name}" for name in of_timm)]
    matching = [name for name in names if matches(name, pattern)]
    if not matching:
        near = _near(pattern, [name.removeprefix("timm/") for name in names]) or " Without a pattern all are listed."
        raise ModelError(f"no {'weights match' if tags else 'model matches'} {pattern!r}.{near}")
    entries = []
    for name in matching:
        if name in BUILTINS:
            side = SIZES[name]
            entries.append(Entry(name=name, height=side, width=side, channels=CHANNELS[name], num_classes=_CLASSES))
            continue
        config: Any = timm.models.get_pretrained_cfg(name.removeprefix("timm/")) or timm.models.PretrainedCfg()
        channels, height, width = map(int, config.input_size)
        entry = Entry(name=name, height=height, width=width, channels=channels, num_classes=int(config.num_classes))
        if config.has_weights:
            weights: Weights = "hub" if fetched_file(config) is None else "at hand"
            entry = replace(entry, weights=weights, tag=config.tag or "", licence=config.license or "unknown")
        entries.append(entry)
    return entries


def matches(name: str, pattern: str) -> bool:
    """Return whether a full name matches a part of it or a glob.

    >>> matches("timm/resnet50", "net5"), matches("timm/resnet50", "net5*"), matches("timm/resnet50", "timm/RES*")
    (True, False, True)
    """
    name, pattern = name.casefold(), pattern.casefold()
    if any(mark in pattern for mark in "*?["):
        return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix("timm/"), pattern)
    return pattern in name


def _near(pattern: str, names: Sequence[str]) -> str:
    """A hint: names that begin so, written with other separators; else the nearest ones, and beginnings of names."""
    plain = re.sub(r"[*?\[\]]", "", pattern.casefold()).removeprefix("timm/")
    if "." in plain:
        return did_you_mean(plain, names)
    architectures = list(dict.fromkeys(name.partition(".")[0] for name in names))
    letters = _letters(plain)
    begin_so = [name for name in architectures if letters and _letters(name).startswith(letters)]
    if begin_so:  # the shortest: what is longer is a variant of it
        return f" Did you mean {' or '.join(sorted(begin_so, key=len)[:3])}?"
    return did_you_mean(plain, dict.fromkeys([*architectures, *(re.split(r"[\d_]", name)[0] for name in names)]))


def _letters(name: str) -> str:
    """Reduce a name to its letters and digits: resnet-50 and ResNet50 are the same."""
    return re.sub(r"[^0-9a-z]", "", name.casefold())


def has_local_weights(name: str) -> bool:
    """Return whether the weights of one of timm's models were fetched to this machine."""
    import timm.models

    config = timm.models.get_pretrained_cfg(current_name(name.removeprefix("timm/")))
    return config is not None and fetched_file(config) is not None


def fetched_file(config: Any) -> Path | None:
    """Find the weights of timm's ``PretrainedCfg`` in the cache of either hub; None where they were not fetched."""
    import torch.hub
    from huggingface_hub import try_to_load_from_cache

    if config.hf_hub_id:
        files = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
        paths = (try_to_load_from_cache(config.hf_hub_id, file) for file in files)
        return next((Path(path) for path in paths if isinstance(path, str)), None)
    name = PurePosixPath(urlparse(config.url).path).name
    file = Path(config.file or Path(torch.hub.get_dir(), "checkpoints", name))
    return file if file.is_file() else None
