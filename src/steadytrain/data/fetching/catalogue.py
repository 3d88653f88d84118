"""The public data sets that can be fetched by name, from the table ``datasets.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from steadytrain.data.fetching.download import WebFile
from steadytrain.errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A public data set; fields as in ``datasets.toml``."""

    name: str
    title: str
    images: int
    classes: int
    licence: str
    source: str
    layout: str
    splits: str
    checked: str
    files: tuple[WebFile, ...]
    inner: str = ""
    clutter: str = ""
    clutter_images: int = 0
    train_per_class: int | None = None
    val_fraction: float | None = None
    has_test: bool = False
    also: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """About how many are fetched."""
        return sum(file.bytes for file in self.files)


@cache
def catalogue() -> Mapping[str, DataSet]:
    """Return every data set by its name, in the order of the table."""
    text = resources.files("steadytrain.data.fetching").joinpath("datasets.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return {name: _data_set(name, {**entries.get(entry.get("like"), {}), **entry}) for name, entry in entries.items()}


def _data_set(name: str, entry: Mapping[str, Any]) -> DataSet:
    known = {field.name for field in fields(DataSet)}
    files = tuple(WebFile(**file, urls=tuple(f"{at}/{file['name']}" for at in entry["at"])) for file in entry["files"])
    return DataSet(name=name, files=files, **{key: value for key, value in entry.items() if key in known - {"files"}})


def find_data_set(name: str) -> DataSet:
    """Return a data set by its name, spelt as anyone might.

    Raises:
        InputError: there is none, with the nearest.

    >>> find_data_set("Fashion_MNIST").classes, find_data_set("caltech-256").train_per_class
    (10, 60)
    """
    if _plain(name) in ("imagenet", "imagenet1k", "ilsvrc2012"):
        raise InputError(_IMAGENET)
    spelt = {other: data_set for known, data_set in catalogue().items() for other in (_plain(known), *data_set.also)}
    if (data_set := spelt.get(_plain(name))) is not None:
        return data_set
    hint = did_you_mean(name.lower(), catalogue()) or f" There are: {', '.join(catalogue())}."
    raise InputError(f"there is no data set {name} to fetch.{hint}")


_IMAGENET = (
    "ImageNet is handed out to registered users alone: register at https://image-net.org (an address of a university"
    " helps), agree to its terms, download ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and"
    " ILSVRC2012_devkit_t12.tar.gz into one folder, unchanged; then run steady pack FOLDER imagenet --shorter-side 256"
)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
