"""PowerSGD: gradients cross as products of two narrow matrices, and what is lost is added to the next ones.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", algorithms 1 and
2, with warm start. All matrices of an update share two exchanges, so a link with a long way costs it twice, however
many layers there are.

torch has a hook of this name. This is another one because there errors belong to buckets, which torch makes anew after
a pass: a resumed run would lose them, or give them to other parameters. Besides, that hook takes no channels-last
gradients, and waits inside of callbacks for exchanges that gloo numbers in the order in which ranks come to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadytrain.distributed.compression import split_residual

LEAST_SAVING = 2
"""A gradient is sent whole where the two matrices have more than so small a part of its values."""


class PowerSgd:
    """Exchange the gradients of a module by their power iteration.

    Args:
        module: whose gradients are exchanged, not wrapped; it gives the names.
        rank: columns of the two matrices, 1 or more.
        group: the ranks; None: all.
    """

    def __init__(self, module: nn.Module, *, rank: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._right: dict[str, Tensor] = {}  # Q, the same on all ranks: where the next iteration begins
        self._errors: dict[str, Tensor] = {}  # this rank's, in the shape of the matrix
        for number, (name, parameter) in enumerate(self._trained.items()):
            n = len(parameter) if parameter.dim() else 1
            m = parameter.numel() // max(1, n)
            if is_compressed(n, m, rank):
                draw = torch.Generator().manual_seed(number)  # the same on all ranks
                self._right[name] = torch.randn(m, min(n, m, rank), generator=draw).to(parameter.device)
                self._errors[name] = torch.zeros(n, m, device=parameter.device)

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace all gradients by what all ranks have in common of them, which is the same on every rank."""
        gradients = {name: parameter.grad for name, parameter in self._trained.items() if parameter.grad is not None}
        whole = [gradient for name, gradient in gradients.items() if name not in self._right]
        matrices = {name: g.flatten(1) + self._errors[name] for name, g in gradients.items() if name in self._right}
        lefts = self._means(whole + [matrix @ self._right[name] for name, matrix in matrices.items()])
        for gradient, mean in zip(whole, lefts, strict=False):
            gradient.copy_(mean)
        left = dict(zip(matrices, map(orthogonalize, lefts[len(whole) :]), strict=True))
        right = {name: matrix.T @ left[name] for name, matrix in matrices.items()}
        self._right |= dict(zip(right, self._means(list(right.values())), strict=True))
        for name, matrix in matrices.items():
            self._errors[name] = matrix.addmm_(left[name], right[name].T, alpha=-1)
            gradients[name].copy_((left[name] @ self._right[name].T).view(gradients[name].shape))

    def _means(self, values: list[Tensor]) -> list[Tensor]:
        """Average tensors over the ranks, with one exchange."""
        if not values:
            return []
        flat = torch.cat([value.reshape(-1) for value in values])
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat.div_(dist.get_world_size(self.group)), [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def errors(self) -> dict[str, Tensor]:
        """Return what this rank has left to send, float32, by parameter; names and shapes are those of all ranks."""
        return self._errors

    def right(self) -> dict[str, Tensor]:
        """Return the right-hand matrices, which are the same on all ranks."""
        return self._right

    def take(self, saved: Mapping[str, Any], *, rank: int, size: int) -> None:
        """Take up what was saved: ``right`` and, of all ranks of that time, ``errors`` [ranks then, n, m].

        There may have been another number of ranks: the model is owed as much as before.
        """
        for name in self._right.keys() & saved["right"].keys():
            if self._right[name].shape == saved["right"][name].shape:  # another rank of the matrices begins anew
                self._right[name] = saved["right"][name].to(self._right[name])
            self._errors[name].copy_(split_residual(saved["errors"][name], rank=rank, size=size))


def is_compressed(n: int, m: int, rank: int) -> bool:
    """Return whether two matrices of ``rank`` columns save enough of one of ``n`` rows and ``m`` columns.

    >>> is_compressed(256, 64, 4), is_compressed(10, 64, 4), is_compressed(64, 1, 4)
    (True, True, False)
    """
    return (n + m) * min(n, m, rank) * LEAST_SAVING < n * m


def num_values(shapes: list[list[int]], rank: int) -> int:
    """Count the values that an update sends of parameters of these shapes.

    >>> num_values([[256, 64, 1, 1], [256]], 4)
    1536
    """
    total = 0
    for shape in shapes:
        n, size = shape[0] if shape else 1, torch.Size(shape).numel()
        m = size // max(1, n)
        total += (n + m) * min(n, m, rank) if is_compressed(n, m, rank) else size
    return total


def orthogonalize(matrix: Tensor) -> Tensor:
    """Make the columns of a matrix orthonormal, in place, one after another (Gram and Schmidt); of zeros, zeros."""
    for k in range(matrix.shape[1]):
        column = matrix[:, k : k + 1]
        column.div_(column.norm().clamp_min(1e-30))
        rest = matrix[:, k + 1 :]
        rest.sub_(column @ (column.T @ rest))
    return matrix
