"""Images beside a frozen network: their features, and the labels that these do not believe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.config import Data, Recipe
from steadytrain.data.arrays import Ints
from steadytrain.data.recordio.hashes import HASHES
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.groups import group_images, make_hashes, say_whole_classes
from steadytrain.errors import DataError
from steadytrain.format import OnProgress, Say, print_note
from steadytrain.run import Run
from steadytrain.training.data import DataSets, data_sets, open_named
from steadytrain.training.features.suspects import Suspects, find_suspects
from steadytrain.training.features.table import FeatureTable, feature_table
from steadytrain.training.inference.trained import Trained, frozen_network, restore
from steadytrain.training.inference.views import with_size
from steadytrain.training.loop.defaults import choose_recipe


@dataclass(frozen=True)
class FrozenImages:
    """Images and a frozen network.

    Args:
        trained: the network.
        data: the images; their training images come first, then those that validate.
        progress, say: as of :func:`~steadytrain.training.features.table.feature_table`.
    """

    trained: Trained
    data: DataSets
    progress: OnProgress | None
    say: Say

    @property
    def parts(self) -> tuple[Records, ...]:
        """The record files, open."""
        return tuple(part for part in (self.data.train, self.data.val) if part is not None)

    def tables(self) -> Iterator[FeatureTable]:
        """Yield the features of each part, from the cache, or computed now."""
        for part in self.parts:
            yield feature_table(self.trained, part, progress=self.progress, say=self.say)

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Features of all images, float32 [N, D], mapped; those of two parts from a file that lasts as long as this."""
        tables = list(self.tables())
        if len(tables) == 1:
            return tables[0].values
        with TemporaryFile(dir=tables[0].path.parent) as file:
            for table in tables:
                table.values.tofile(file)
            file.flush()
            return np.memmap(file, np.float32, "r").reshape(-1, tables[0].values.shape[1])

    @cached_property
    def labels(self) -> NDArray[Any]:
        """Labels of all images: int64 [N], or float32 [N, L]."""
        return np.concatenate([part.labels for part in self.parts])

    @cached_property
    def groups(self) -> Ints | None:
        """The group of each image, copies of training images among those that validate included."""
        hashes = [(make_hashes(part), len(part)) for part in self.parts]
        rows = [np.zeros(n, HASHES) if found is None else found for found, n in hashes]
        known = self.data.groups  # of the training images, those of data.group_by too
        keys = None if known is None else [*map(str, known.tolist()), *[None] * (len(self.labels) - len(known))]
        name = list(self.names()).__getitem__
        return group_images(np.concatenate(rows), self.labels, keys=keys, name=name, say=lambda line: None)

    def names(self) -> Iterator[str]:
        """Yield the file that each image was made of."""
        for part in self.parts:
            yield from part.names()

    def place(self, row: int) -> tuple[Records, int]:
        """Return the records that hold an image, and its number there."""
        first = len(self.parts[0])
        return (self.parts[0], row) if row < first else (self.parts[1], row - first)

    def find_suspects(self) -> Suspects:
        """Find labels that may be wrong (:func:`~steadytrain.training.features.suspects.find_suspects`).

        Raises:
            DataError: an image may have several labels, or they are one group.
        """
        if self.labels.ndim > 1:
            raise DataError("these images may have several labels, and suspects are found where each has one class")
        labels, classes = np.asarray(self.labels, np.int64), self.data.classes
        say_whole_classes(labels, self.groups, classes, self.say)
        return find_suspects(self.values, labels, len(classes), groups=self.groups)


@contextmanager
def open_frozen(
    source: str,
    changes: Mapping[str, Any] | None = None,
    *,
    require_licence: Callable[[Recipe], None] = lambda recipe: None,
    say: Say = print_note,
    packing: OnProgress | None = None,
    progress: OnProgress | None = None,
) -> Iterator[FrozenImages]:
    """Open images, packed into the cache if need be, and a network for their features: by default finetune's.

    Args:
        source: a ``.rec`` file, a folder of classes, or whatever else ``steady pack`` takes.
        changes: values of the recipe of ``steady finetune`` by their keys, such as ``model.name``, ``data.size`` or
            ``parallel.device``. ``model.weights`` may be a run's folder: the network is then that run's, as it
            evaluates.
        require_licence: is called with the recipe before weights are fetched.
        say: takes lines for the user.
        packing, progress: called with the images that are packed, and with those whose features are there, and all.

    Raises:
        DataError: the images cannot be used.
        ModelError: no such network, or weights that cannot be had.
    """
    changes = {"data.holdout": 0.0, **(changes or {})}
    weights = str(changes.get("model.weights") or "")
    if weights and "model.name" not in changes and Run.is_run(weights):
        trained = restore(weights, device=changes.get("parallel.device", "auto"), say=say)
        named = {key.removeprefix("data."): value for key, value in changes.items() if key.startswith("data.")}
        data = Data(train=source, **{"size": trained.input.size, **named})
        trained = trained if data.size is None else with_size(trained, data.size)
        trained = replace(trained, input=replace(trained.input, fit=data.fit or trained.input.fit))
        with closing(open_named(data, say=say, remark=say, progress=packing)) as opened:
            say(f"features by the network of {weights} ({trained.chosen})")
            started = Run.open(weights).progress().started
            if started and started.steps > 0 and started.data.get("train_digest") == opened.train.digest:
                say(f"{weights} was trained on these images: it may have learnt labels that are wrong")
            yield FrozenImages(trained, data_sets(opened, replace(data, holdout=0.0), seed=0, say=say), progress, say)
        return
    options: dict[str, Any] = {"require_licence": require_licence, "say": say, "progress": packing}
    choice = choose_recipe(source, {}, changes, finetune=True, **options)
    with closing(choice.opened):
        recipe = choice.recipe()
        sets = data_sets(choice.opened, replace(recipe.data, holdout=0.0), seed=0, say=say)
        network = frozen_network(recipe, sets, allow_import="model.name" in changes, say=say)
        yield FrozenImages(network, sets, progress, say)
