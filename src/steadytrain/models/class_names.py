"""Names of classes: those of ImageNet's classifiers, and which class of a model each class of a data set is.

ImageNet's classes are WordNet synsets. Their numbers (``n02124075``) and names (``Egyptian cat``) come with timm.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from steadytrain.format import whole_number

_SYNSET = re.compile(r"n\d{8}(?!\d)")


def imagenet_synsets(num_classes: int) -> tuple[str, ...]:
    """List the synsets of the ImageNet classifiers with so many outputs, in their order; empty where there are none.

    There are 1,000 classes of ImageNet-1k, and five larger sets with 11,221 to 21,843 classes.

    >>> imagenet_synsets(1000)[285], imagenet_synsets(10)
    ('n02124075', ())
    """
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": num_classes})
    info: Any = ImageNetInfo(subset) if subset else None
    return tuple(info.label_names()) if info else ()


def names_of_synsets(synsets: Sequence[str]) -> tuple[str, ...]:
    """Name each synset by its first synonym, with its number where several of them share that.

    >>> names_of_synsets(["n02124075", "n02012849", "n03126707"])
    ('Egyptian cat', 'crane (n02012849)', 'crane (n03126707)')
    """
    first = [_synonyms(synset)[0] for synset in synsets]
    uses = Counter(first)
    return tuple(name if uses[name] == 1 else f"{name} ({synset})" for name, synset in zip(first, synsets, strict=True))


@dataclass(frozen=True)
class OutputNames:
    """Names of a classifier's outputs, in their order.

    Args:
        names: of the classes; empty where nothing says them.
        synsets: of the same classes; empty where they have none.
    """

    names: tuple[str, ...] = ()
    synsets: tuple[str, ...] = ()


def imagenet_names(num_classes: int) -> OutputNames:
    """Name the outputs of an ImageNet classifier; empty where no set of ImageNet's classes has so many."""
    synsets = imagenet_synsets(num_classes)
    return OutputNames(names_of_synsets(synsets), synsets)


@dataclass(frozen=True)
class Match:
    """The model's class for one class of a data set.

    Args:
        name: of the data set's class.
        output: number of the model's class; None where there is none, or where there are several.
        how: ``name``, ``synset``, ``synonym`` or ``number``; empty without an output.
        candidates: numbers of the classes that it could be, where there are several.
    """

    name: str
    output: int | None = None
    how: str = ""
    candidates: tuple[int, ...] = ()


def match_classes(names: Sequence[str], classes: Sequence[str], *, synsets: Sequence[str] = ()) -> tuple[Match, ...]:
    """Find the model's class for each class of a data set.

    A class is the one of the same name, else of the same synset, else of a name that differs only in case, blanks,
    underscores and hyphens, else of a synonym of that synset. The first of these that fits decides: where it fits
    several classes, there is no match. Where all names are whole numbers that are no names of the model's classes,
    they are numbers of its outputs; where its classes are called by numbers, names of the same value (``1``, ``001``).

    Args:
        names: of the data set's classes.
        classes: of the model's, in the order of its outputs.
        synsets: of the model's classes; without them, those that ``classes`` begin with, such as ``n02085936-Maltese``.

    >>> [match.output for match in match_classes(["Dog", "ca_t", "cow"], ["cat", "dog"])]
    [1, 0, None]
    >>> [match.output for match in match_classes(["1", "2"], ["001", "002"])]
    [0, 1]
    >>> match_classes(["n02124075"], ["tiger", "egyptian_cat"])[0]
    Match(name='n02124075', output=1, how='synset', candidates=())
    """
    places = {name: number for number, name in enumerate(classes)}
    is_numbers = all(name.isascii() and name.isdigit() for name in names) and not set(names) & places.keys()
    if is_numbers and all(name.isascii() and name.isdigit() for name in classes):
        values = _group((name.lstrip("0"),) for name in classes)
        outputs_of = {name: tuple(sorted(values.get(name.lstrip("0"), ()))) for name in names}
        return tuple(
            Match(name, outputs[0], "name") if len(outputs) == 1 else Match(name, candidates=outputs)
            for name, outputs in outputs_of.items()
        )
    if is_numbers:
        numbers = [whole_number(name, below=len(classes)) for name in names]
        return tuple(
            Match(name) if number is None else Match(name, number, "number")
            for name, number in zip(names, numbers, strict=True)
        )
    synsets = synsets or [_synset_of(name) for name in classes]
    of_model = [_synonyms(synset) for synset in synsets]
    by_synset = _group((synset,) for synset in synsets)
    by_name = _group(
        {_plain(name), _plain(", ".join(words)), *map(_plain, words[:1])}
        for name, words in zip(classes, of_model, strict=True)
    )
    by_synonym = _group(map(_plain, words) for words in of_model)

    def match(name: str) -> Match:
        if name in places:
            return Match(name, places[name], "name")
        synset = _synset_of(name)
        words = _synonyms(synset)
        attempts = [("synset", by_synset.get(synset)), ("name", by_name.get(_plain(name)))]
        attempts += [("synonym", by_synonym.get(_plain(name)))]
        attempts += [("synset", by_name.get(_plain(word))) for word in words]
        for how, numbers in attempts:
            if numbers:
                several = tuple(sorted(numbers))
                return Match(name, candidates=several) if len(several) > 1 else Match(name, several[0], how)
        return Match(name)

    return tuple(match(name) for name in names)


def _synset_of(name: str) -> str:
    match = _SYNSET.match(name)
    return match[0] if match else ""


@cache
def _imagenet() -> Any:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo()


def _synonyms(synset: str) -> tuple[str, ...]:
    """The names of a synset, the usual one first; none of what is no synset that timm knows."""
    try:
        return tuple(_imagenet().label_name_to_description(synset).split(", ")) if synset else ()
    except KeyError:
        return ()


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", unicodedata.normalize("NFC", name).casefold())


def _group(keys_of_each: Iterable[Iterable[str]]) -> Mapping[str, set[int]]:
    """The numbers of all classes that have a key; no key is empty."""
    groups: dict[str, set[int]] = {}
    for number, keys in enumerate(keys_of_each):
        for key in keys:
            if key:
                groups.setdefault(key, set()).add(number)
    return groups
