"""Exact evaluation: every sample of a data set once, counted on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from steadytrain.data.loader import Batch
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import write_label_predictions, write_predictions
from steadytrain.data.results.scores import ClassScore, macro, mean_over_classes, score_of
from steadytrain.models import Input
from steadytrain.training.data import load
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import Policy, exact
from steadytrain.training.state import in_mode


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model on a whole data set.

    ``n`` images; mean cross-entropy ``loss``; ``top1`` and ``top5`` as fractions (top5 is 1 for five classes or
    fewer); ``right``, ``total`` and ``predicted`` for each class: of its images those predicted as it, all of them, and
    the images predicted as it. ``outputs``, if it was asked for, float32[n, 4] by position:
    predicted class, its probability, loss, and rank of the true class (1 where it is predicted).

    Where an image may have several labels, a label is predicted if its probability is above 0.5; ``loss`` is the
    binary cross-entropy, the mean over images and labels; ``top1`` the images of which every label is right (exact
    match), and ``top5`` None; ``right`` and ``total``: of the images that have a label, those for which it is
    predicted; ``mean_ap``: the mean over the labels that any image has of their average precisions
    (:mod:`steadytrain.data.results.scores`).

    ``other_right``: as ``right``, by the logits of other class frequencies, if these were asked for.

    ``logits`` float32[n, K], and ``labels`` int64[n] or float32[n, K], by position: of several labels, or if they were
    asked for.
    """

    n: int
    loss: float
    top1: float
    top5: float | None
    right: tuple[int, ...]
    total: tuple[int, ...]
    predicted: tuple[int, ...] = ()
    other_right: tuple[int, ...] = ()
    outputs: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    mean_ap: float | None = None
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    labels: NDArray[np.int64] | NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    @property
    def score(self) -> float:
        """The score that evaluations are ranked by: top-1; of several labels, mAP."""
        return self.top1 if self.mean_ap is None else self.mean_ap

    @property
    def metrics(self) -> dict[str, float]:
        """The figures by name: ``n``, ``loss``, ``top1``, ``top5``, ``mean_ap``, ``macro_recall``, ``macro_f1``."""
        values = {"n": self.n, "loss": self.loss, "top1": self.top1, "top5": self.top5, "mean_ap": self.mean_ap}
        values |= {"macro_recall": self.macro.recall, "macro_f1": self.macro.f1}
        return {name: value for name, value in values.items() if value is not None}

    def __getitem__(self, name: str) -> float:
        if name not in self.metrics:
            raise KeyError(f"{name}: there are {', '.join(self.metrics)}")
        return self.metrics[name]

    @property
    def macro(self) -> ClassScore:
        """Precision, recall and F1, averaged over the classes, or labels, that have images."""
        return macro([score_of(*counts) for counts in zip(self.right, self.total, self.predicted, strict=True)])

    @property
    def other(self) -> tuple[float, float] | None:
        """Top-1 and macro recall by other class frequencies; None where these were not asked for."""
        if not (self.other_right and self.n):
            return None
        recalls = [right / n for right, n in zip(self.other_right, self.total, strict=True) if n]
        return sum(self.other_right) / self.n, sum(recalls) / len(recalls)

    @property
    def loss_error(self) -> float | None:
        """The standard error of the loss; None without the outputs for each image."""
        if self.outputs is None:
            return None
        return float(self.outputs[:, 2].std(dtype=np.float64) / max(1, self.n) ** 0.5)


def logits_of(
    module: nn.Module, images_BHWC: torch.Tensor, policy: Policy, input: Input, limit: PassLimit
) -> torch.Tensor:
    """Run images, uint8 [B, H, W, C], through a network, as many at a time as memory allows: float32 logits [B, K]."""

    def forward(at_once: int) -> torch.Tensor:
        with policy.autocast():
            parts = [
                module(policy.images(part, input.mean, input.std)).float()
                for part in images_BHWC.tensor_split(-(-len(images_BHWC) // at_once))
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return limit.fit(forward, len(images_BHWC))


def evaluate_module(
    module: nn.Module,
    batches: Iterable[Batch],
    policy: Policy,
    input: Input,
    num_classes: int,
    *,
    sum_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda count: count,
    num_outputs: int | None = None,
    is_multi_label: bool = False,
    keep_logits: bool = False,
    temperature: float = 1.0,
    shift: NDArray[np.float64] | None = None,
    limit: PassLimit | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Evaluation:
    """Run ``module`` over ``batches`` in evaluation mode and count; its training mode is restored afterwards.

    Args:
        module: on the policy's device, giving logits [B, num_classes].
        batches: each sample once, the last batch may be short.
        policy: precision, device and memory format.
        input: the model's mean and standard deviation.
        num_classes: of the data and the module's outputs.
        sum_ranks: sums a count over all ranks that evaluate together, each on other batches.
        num_outputs: images of all ranks, to return the outputs for each as well; None: only what is counted.
        is_multi_label: an image may have several labels; needs ``num_outputs``.
        keep_logits: return the logits and labels of each image, too; needs ``num_outputs``.
        temperature: logits are divided by it before probabilities and losses are computed of them.
        shift: float64 [K], added to logits where the images right by other class frequencies are counted, too.
        limit: how many images of a batch go through the network at a time; None: all, and fewer where memory runs out.
        say: takes a line where that happens, and no ``limit`` was given.
    """
    device = policy.device
    limit = limit or PassLimit("evaluation", on_halved=lambda halved: say(halved.message))
    keep_logits = keep_logits or is_multi_label
    assert num_outputs is not None or not keep_logits
    loss = exact(torch.zeros((), device=device))
    top5 = torch.zeros((), dtype=torch.int64, device=device)
    by_class = torch.zeros(4, num_classes, dtype=torch.int64, device=device)
    right, total, predicted, other_right = by_class
    shift_K = None if shift is None else torch.from_numpy(shift).float().to(device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # images, and those with every label right
    outputs = _Rows()
    positions: list[NDArray[np.int64]] = []

    def keep_positions() -> Iterator[Batch]:
        for batch in batches:
            positions.append(batch.positions)
            yield batch

    with in_mode(module, "evaluation"), torch.no_grad():
        for batch in load(batches if num_outputs is None else keep_positions(), device):
            logits = logits_of(module, batch.images, policy, input, limit)
            labels, scaled = batch.labels, logits if temperature == 1 else logits / temperature
            counts[0] += len(labels)
            if is_multi_label:
                losses = functional.binary_cross_entropy_with_logits(scaled, labels, reduction="none")
                loss += exact(losses).mean(1).sum()
                above, has_label = logits > 0, labels > 0.5
                counts[1] += (above == has_label).all(1).sum()
                by_class[:3] += torch.stack([above & has_label, has_label, above]).sum(1)
                outputs.add(torch.cat([logits, labels], 1))
                continue
            loss += exact(functional.cross_entropy(scaled, labels, reduction="sum"))
            likely = logits.topk(min(5, num_classes), dim=1).indices
            best = likely == labels[:, None]
            top5 += best.sum()
            counts[1] += best[:, 0].sum()
            right.index_add_(0, labels, best[:, 0].long())  # bincount would wait for the device, at every batch
            total.index_add_(0, labels, torch.ones_like(labels))
            predicted.index_add_(0, likely[:, 0], torch.ones_like(labels))
            if shift_K is not None:
                other_right.index_add_(0, labels, ((logits + shift_K).argmax(1) == labels).long())
            if num_outputs is not None:
                parts = [image_outputs(scaled, likely[:, 0], labels)]
                parts += [logits, labels[:, None].float()] if keep_logits else []
                outputs.add(torch.cat(parts, 1))
    loss, top5, by_class, counts = (sum_ranks(count) for count in (loss, top5, by_class, counts))
    table = None
    if num_outputs is not None:
        columns = 2 * num_classes if is_multi_label else 4 + (num_classes + 1 if keep_logits else 0)
        table = outputs.merge(positions, (num_outputs, columns), device, sum_ranks)
    n, num_right = counts.tolist()
    counted: list[list[int]] = by_class.tolist()
    divisor = max(1, n)  # an evaluation may be stopped before its first batch
    evaluation = Evaluation(
        n=n,
        loss=float(loss) / divisor,
        top1=num_right / divisor,
        top5=None if is_multi_label else int(top5) / divisor,
        right=tuple(counted[0]),
        total=tuple(counted[1]),
        predicted=tuple(counted[2]),
        other_right=() if shift is None else tuple(counted[3]),
    )
    if is_multi_label:
        assert table is not None
        mean_ap = mean_over_classes("map", table[:, :num_classes], table[:, num_classes:])
        return replace(evaluation, mean_ap=mean_ap, logits=table[:, :num_classes], labels=table[:, num_classes:])
    if table is not None:
        evaluation = replace(evaluation, outputs=table[:, :4])
        if keep_logits:
            evaluation = replace(evaluation, logits=table[:, 4:-1], labels=table[:, -1].astype(np.int64))
    return evaluation


class _Rows:
    """Rows of numbers for images, kept on the host: a device has no more than :attr:`MOST_BYTES` of them at a time."""

    MOST_BYTES = 2**26

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._new: list[torch.Tensor] = []
        self._new_bytes = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add the rows of a batch; the host waits for the device where these become many."""
        self._new.append(rows)
        self._new_bytes += rows.nbytes
        if self._new_bytes >= self.MOST_BYTES:
            self._keep()

    def _keep(self) -> None:
        self._kept += [part.cpu() for part in self._new]
        self._new, self._new_bytes = [], 0

    def merge(
        self,
        positions: Sequence[NDArray[np.int64]],
        shape: tuple[int, int],
        device: torch.device,
        sum_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> NDArray[np.float32]:
        """Put the rows of all ranks at the images' positions, float32 of a shape, some columns at a time."""
        self._keep()
        table = np.empty(shape, np.float32)
        step = max(1, self.MOST_BYTES // (4 * max(1, shape[0])))
        places = torch.from_numpy(np.concatenate(positions)).to(device) if self._kept else None
        for at in range(0, shape[1], step):
            # An image is one rank's, and 0 in the columns of the others: their sum is exact.
            columns = torch.zeros(shape[0], min(step, shape[1] - at), device=device)
            if places is not None:
                columns[places] = torch.cat([part[:, at : at + step] for part in self._kept]).to(device)
            table[:, at : at + step] = sum_ranks(columns).cpu().numpy()
        return table


def image_outputs(logits: torch.Tensor, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return float32[B, 4]: predicted class, its probability, loss, rank of the true class; nothing waits for it."""
    log_p, true = logits.log_softmax(1), labels[:, None]
    rank = 1 + (logits > logits.gather(1, true)).sum(1)
    rank = torch.where(predicted == labels, 1, rank.clamp(min=2))  # of equal logits one is predicted
    p_predicted = log_p.gather(1, predicted[:, None])[:, 0].exp()
    return torch.stack([predicted.float(), p_predicted, -log_p.gather(1, true)[:, 0], rank.float()], 1)


def write_per_image(
    path: Path,
    records: Records,
    ids: NDArray[np.int64],
    classes: Sequence[str],
    evaluation: Evaluation,
    *,
    labels: NDArray[np.int64] | None = None,
    threshold: float = 0.5,
    temperature: float = 1.0,
) -> None:
    """Write what was predicted for each image, as :mod:`steadytrain.data.results.predictions` does.

    Args:
        path, records, ids, classes, labels, threshold: as of it.
        evaluation: with the outputs for each image.
        temperature: of the probabilities of several labels.
    """
    if evaluation.mean_ap is None:
        assert evaluation.outputs is not None
        write_predictions(path, records, ids, classes, evaluation.outputs, labels=labels)
        return
    assert evaluation.logits is not None and evaluation.labels is not None
    p = (torch.from_numpy(evaluation.logits).double() / temperature).sigmoid().numpy()
    write_label_predictions(path, records, ids, classes, p, evaluation.labels, threshold=threshold)
