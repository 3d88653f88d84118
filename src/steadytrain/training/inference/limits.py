"""The limits of a model: whether an image is like its training images, and how sure an answer must be to be trusted.

Two figures tell unlike images: the distance to the tenth nearest training image, of all features, normalised (Sun et
al. 2022, "Out-of-Distribution Detection with Deep Nearest Neighbors"), and the energy of the logits (Liu et al. 2020,
"Energy-based Out-of-distribution Detection"). Their limits keep 95 % of images that the model has not seen. What they
follow from lies beside the weights (``best.limits.safetensors``), with the answers about those images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.data.arrays import Ints
from steadytrain.data.results.scores import Promise, promise
from steadytrain.errors import DataError, ModelError, first_line
from steadytrain.format import Say, percent, print_note
from steadytrain.intervals import wilson
from steadytrain.models import exported
from steadytrain.models.tensor_file import read_tensors
from steadytrain.training import checkpoints
from steadytrain.training.evaluation import logits_of
from steadytrain.training.inference.classifier import classifier_of, features_and_logits
from steadytrain.training.inference.trained import Trained
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import exact

NEIGHBOUR = 10
"""The distance is to the training image that is so near, in order: a single odd one among them does not count."""

KEPT = 0.95
"""Share of held-out images that the limits of distance and energy let pass together."""

_ROWS = 4096
_ARRAYS, _ABOUT = ("ids", "distances", "logits", "labels"), {"held_out", "num_train", "head"}


@dataclass(frozen=True)
class Judgement:
    """Judgement of an image by a model's limits.

    Args:
        distance: to the tenth nearest training image, 0 to 2; None where the network gives no features.
        energy: log of the sum of exponentials of its logits: the lower, the less the network has seen of the kind.
        distance_limit, energy_limit: the largest distance and the least energy of images like the training images.
        is_sure: enough for the answers kept to be right as often as was asked; None where nothing was.
    """

    distance: float | None
    energy: float
    distance_limit: float | None
    energy_limit: float
    is_sure: bool | None = None

    @property
    def is_far(self) -> bool:
        """Return whether no training images are near."""
        return self.distance is not None and self.distance_limit is not None and self.distance > self.distance_limit

    @property
    def is_unlike(self) -> bool:
        """Return whether the image is unlike the training images, by its distance or its energy."""
        return self.is_far or self.energy < self.energy_limit

    @property
    def document(self) -> dict[str, float | bool]:
        """Return it as the answers of programs hold it, without what is not known."""
        values = {"unlike": self.is_unlike, **vars(self), "sure": self.is_sure}
        return {name: value for name, value in values.items() if value is not None and name != "is_sure"}

    @property
    def words(self) -> str:
        """Say what to keep in mind; empty where there is nothing."""
        by = f"energy {self.energy:.3g}, least {self.energy_limit:.3g}"
        by = f"distance {self.distance:.3g}, most {self.distance_limit:.3g}" if self.is_far else by
        remarks = ["not sure"] * (self.is_sure is False) + [f"unlike the training images ({by})"] * self.is_unlike
        return ", ".join(remarks)


@dataclass(frozen=True, eq=False)
class Limits:
    """Contents of a file of limits: features of training images, and figures of images that were held out.

    Args:
        features: float16 [M, D] of training images, each of length 1.
        ids: int64 [M], their records.
        distances: float32 [m] of held-out images.
        logits: float32 [m, K] of these, before temperature and prior.
        labels: int64 [m]; of several labels [m, K].
        about: ``held_out``: what these images are, in words; ``num_train``; ``head``: a digest of the classifier that
            the features are for; ``neighbours``: the nearest training images of validation images taken wrongly.
    """

    features: Tensor
    ids: Ints
    distances: NDArray[np.float32]
    logits: NDArray[np.float32]
    labels: NDArray[Any]
    about: Mapping[str, Any]

    @cached_property
    def energies(self) -> NDArray[np.float64]:
        return energy_of(torch.from_numpy(self.logits), is_multi_label=self.labels.ndim > 1).numpy()

    @cached_property
    def thresholds(self) -> tuple[float, float]:
        """The largest distance and the least energy of images that pass."""
        return joint_limits(self.distances, self.energies)

    @property
    def effective_n(self) -> float | None:
        """Number of independent images that those held out are worth, by how they are answered; None: all."""
        return self.about.get("effective_n")

    @property
    def words(self) -> str:
        """Say what passes, and by how many images that is known."""
        distance, energy = self.thresholds
        passes = (self.distances <= distance) & (self.energies >= energy)
        interval = wilson(float(passes.mean()), self.effective_n or len(passes))
        return (
            f"{percent(float(passes.mean()), 1)} of {self.about['held_out']} pass ({100 * interval.low:.1f} to"
            f" {percent(interval.high, 1)}): distance up to {distance:.3g}, energy from {energy:.3g} on"
        )

    @property
    def document(self) -> dict[str, float | str]:
        """Return the limits as programs read them: a larger distance, or a lower energy, is unlike."""
        distance, energy = self.thresholds
        held_out = str(self.about["held_out"])
        return {"distance": distance, "energy": energy, "kept": KEPT, "neighbour": NEIGHBOUR, "held_out": held_out}

    def promise(self, trained: Trained, target: float) -> Promise:
        """Return the probability from which on answers are right in a share of ``target``. Raises DataError."""
        if trained.is_multi_label:
            raise DataError(f"an image may have several of {trained.title}'s labels: --threshold is for these")
        if trained.prior:
            raise DataError(
                f"held-out images have the class frequencies of the training images, and answers are by the prior"
                f" {trained.prior}: what is right in {percent(target)} there need not be here; drop one of the two"
            )
        p, likeliest = trained.probabilities(torch.from_numpy(self.logits)).max(1)
        return promise(
            p.numpy(), likeliest.numpy() == self.labels, target, str(self.about["held_out"]), self.effective_n
        )


def limits_path(weights: Path) -> Path:
    """Return where the limits of a weights file lie.

    >>> limits_path(Path("runs/a/best.safetensors")).name
    'best.limits.safetensors'
    """
    return weights.with_name(f"{weights.stem}.limits.safetensors")


def write_limits(path: Path, limits: Limits) -> None:
    """Write limits, whole or not at all. Raises StorageError."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(getattr(limits, name))) for name in _ARRAYS}
    checkpoints.write_weights(path, {"features": limits.features.contiguous(), **tensors}, limits.about)


def read_limits(path: Path) -> Limits:
    """Read limits. Raises ModelError for a file that cannot be read, or holds something else."""
    try:
        tensors, about = read_tensors(path)
        limits = Limits(tensors["features"], **{name: tensors[name].numpy() for name in _ARRAYS}, about=about)
        of_training = {limits.features.shape[:1], limits.ids.shape}
        of_held_out = {limits.distances.shape, limits.logits.shape[:1], limits.labels.shape[:1]}
        is_whole = len(of_training) == len(of_held_out) == 1 and limits.features.dim() == limits.logits.ndim == 2
        if not (is_whole and limits.features.numel() and limits.logits.size and set(about) >= _ABOUT):
            raise ValueError("its parts do not belong together")
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelError(f"{path} holds no limits of a model ({first_line(error)})") from error
    return limits


def unit_rows(values: Tensor) -> Tensor:
    """Return features [N, D] as float32 rows of length 1."""
    return functional.normalize(values.float(), dim=1)


def nearest(
    known: Tensor, queries: Tensor, k: int, *, groups: Ints | None = None, own: Ints | None = None
) -> tuple[Tensor, Tensor]:
    """Find the ``k`` nearest of known images for each query.

    Args:
        known: [M, D], of any float type, of length 1.
        queries: float32 [B, D], of length 1.
        k: is at most M.
        groups: int64 [M], of the known images; those of a query's own group do not count.
        own: int64 [B], the group of each query.

    Returns:
        Euclidean distances, float32 [B, k], the nearest first, and int64 [B, k], rows of ``known``. Where too few are
        left, the distance is infinite.

    >>> distances, rows = nearest(torch.eye(3), torch.eye(3)[:1], 2)
    >>> rows[0, 0].item(), distances.tolist()
    (0, [[0.0, 1.4142135381698608]])
    """
    best = queries.new_full((len(queries), k), -torch.inf)
    rows = torch.zeros(len(queries), k, dtype=torch.int64, device=queries.device)
    for first in range(0, len(known), _ROWS):
        part = known[first : first + _ROWS].to(queries)
        likeness = queries @ part.T
        if groups is not None and own is not None:
            same = own[:, None] == groups[first : first + _ROWS]
            likeness[torch.from_numpy(same).to(likeness.device)] = -torch.inf
        numbers = torch.arange(first, first + len(part), device=rows.device).expand(len(queries), -1)
        best, at = torch.cat([best, likeness], 1).topk(k)
        rows = torch.cat([rows, numbers], 1).gather(1, at)
    return (2 - 2 * best).clamp(min=0).sqrt(), rows


def energy_of(logits: Tensor, *, is_multi_label: bool = False) -> Tensor:
    """Return the energy of each image, float64 [B]: the higher, the more like what the network learned.

    Of several labels the sum of theirs (Wang et al. 2021, "Can multi-label classification networks know what they don't
    know?").
    """
    logits = exact(logits)
    return functional.softplus(logits).sum(1) if is_multi_label else logits.logsumexp(1)


def joint_limits(distances: NDArray[Any], energies: NDArray[Any]) -> tuple[float, float]:
    """Return the largest distance and the least energy that together let a share of held-out images pass.

    A fifth of the others is for the energy to stop: the distance tells unlike images far better, and equal parts let
    up to twice as many of them pass (``benchmarks/results/limits.json``).

    >>> joint_limits(np.arange(100.0), -np.arange(100.0))
    (94.0, -98.0)
    """
    n = len(distances)
    least = float(np.sort(energies)[int((1 - KEPT) / 5 * n + 1e-9)])
    near = np.sort(distances[energies >= least])
    return float(near[min(len(near), int(np.ceil(KEPT * n - 1e-9))) - 1]), least


def head_digest(head: nn.Module) -> str:
    """Return a digest of a classifier's weights, which a prior leaves as they are."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return hashlib.sha256(weight.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


class Judge:
    """Answers images with what a model's limits say of them.

    Args:
        trained: the model.
        limits: of its weights.
        head: its classifier; None: it gives no features, and only the energy tells unlike images.
        threshold: the probability from which on an answer is sure; None: none was asked for.
    """

    def __init__(self, trained: Trained, limits: Limits, head: nn.Module | None, threshold: float | None) -> None:
        self._trained, self.limits, self._head, self.threshold = trained, limits, head, threshold
        device = trained.policy.device
        self._known = limits.features.to(device)
        self._shift = torch.tensor(trained.prior_shift or 0.0, device=device)
        self.distance_limit: float | None = None
        self.energy_limit = float(np.quantile(limits.energies, 1 - KEPT))
        if head is not None:
            self.distance_limit, self.energy_limit = limits.thresholds

    @property
    def document(self) -> dict[str, float | str | None]:
        """Return what it judges by, as programs read it."""
        limits = {"distance": self.distance_limit, "energy": self.energy_limit, "sure": self.threshold}
        return {**self.limits.document, **limits}

    def answer(self, images_BHWC: Tensor, limit: PassLimit) -> tuple[Tensor, list[Judgement]]:
        """Return logits [B, K] of images, uint8 [B, H, W, C] on the model's device, and a judgement of each."""
        trained, distances = self._trained, list[float | None]([None] * len(images_BHWC))
        if self._head is None:
            logits = logits_of(trained.module, images_BHWC, trained.policy, trained.input, limit)
        else:
            features, logits = features_and_logits(self._head, trained, images_BHWC, limit)
            distances = nearest(self._known, unit_rows(features), min(NEIGHBOUR, len(self._known)))[0][:, -1].tolist()
        energies = energy_of(logits - self._shift, is_multi_label=trained.is_multi_label).tolist()
        rows = zip(distances, energies, trained.probabilities(logits).amax(1).tolist(), strict=True)
        by, least = (self.distance_limit, self.energy_limit), self.threshold
        return logits, [Judgement(far, energy, *by, None if least is None else p >= least) for far, energy, p in rows]


def open_judge(trained: Trained, abstain_at: float | None = None, *, say: Say = print_note) -> Judge | None:
    """Open what lies beside a model's weights; None where nothing does that can be used.

    Args:
        trained: the model, as ``restore`` returns it.
        abstain_at: the share of answers that are to be right; the others are not sure.
        say: takes a line on limits that are damaged, or for other weights or images, and on what is promised.

    Raises:
        DataError: ``abstain_at`` cannot be promised, or nothing is known of held-out images.
    """
    path, limits, head = limits_path(trained.path), None, None
    if path.is_file():
        with suppress(ModelError):
            head = None if exported.is_exported(trained.path) else classifier_of(trained)
        try:
            limits = read_limits(path)
            _require_match(path, limits, trained, head)
        except ModelError as error:
            limits = None
            remedy = "steady evaluate RUN --limits makes that of a run again, and steady export that of a file"
            say(f"{error}, and is not used: {remedy}")
    if limits is None:
        if abstain_at is not None:
            raise DataError(
                f"nothing is known of images that {trained.path} has not seen: steady evaluate RUN --limits makes"
                f" {path.name}, from which --abstain-at follows"
            )
        return None
    if head is None:
        say(f"{trained.path} gives no features: unlike images are told by the energy alone, which misses more of them")
    promised = None if abstain_at is None else limits.promise(trained, abstain_at)
    if promised is not None:
        say(promised.words)
    return Judge(trained, limits, head, None if promised is None else promised.threshold)


def _require_match(path: Path, limits: Limits, trained: Trained, head: nn.Module | None) -> None:
    """Raise ModelError for limits of other weights, or of images of another size."""
    size = limits.about.get("size")
    if exported.is_exported(trained.path):
        fault = "another file" if limits.document != trained.limits else ""
    elif head is None or head_digest(head) != limits.about["head"]:
        fault = "other weights"
    else:
        fault = f"images of {size} pixels" if size != trained.input.size else ""
    if fault:
        raise ModelError(f"{path} is for {fault}")
