"""Optimizers that Apache MXNet had and torch has not, after MXNet 1.9.1's own update rules.

In each rule w is the weight, g its gradient, lr the learning rate and wd the weight decay of its group. Constants have
MXNet's names and defaults. Every state is a tensor, so that a saved and loaded optimizer continues bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from steadytrain.optim.optimizers import OptimizerKind, eager


class _Rule(Optimizer, ABC):
    """An optimizer whose :meth:`_update` changes all tensors of a group that have a gradient."""

    def __init__(self, params: Iterable[Any], **constants: Any) -> None:
        super().__init__(params, constants)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is not supported."""
        assert closure is None, "closures are not supported"
        with torch.no_grad():
            for group in self.param_groups:
                if parameters := [p for p in group["params"] if p.grad is not None]:
                    self._update(group, parameters, [p.grad for p in parameters])

    @abstractmethod
    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the weights of a group in place."""

    def _states(self, weights: list[Tensor], name: str, *, like_weights: bool = False) -> list[Tensor]:
        """Return a state of each tensor: at first zeros, or a copy of the weight."""
        for weight in weights:
            if name not in self.state[weight]:
                make = torch.clone if like_weights else torch.zeros_like
                self.state[weight][name] = make(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]

    def _count(self, weights: list[Tensor]) -> int:
        """Count this update, and return its number, from 1."""
        for weight in weights:
            self.state[weight].setdefault("step", torch.zeros(()))  # on the CPU: reading it waits for nothing
            self.state[weight]["step"] += 1
        return int(self.state[weights[0]]["step"])


class Signum(_Rule):
    """Sign of the momentum: every weight moves by exactly ``lr``.

    ::

        m = momentum * m - (1 - momentum) * (g + wd * w)
        w = (1 - lr * wd_lh) * w + lr * sign(m)

    Without momentum it is signSGD, ``w = (1 - lr * wd) * w - lr * sign(g)``. Weight decay is coupled with momentum and
    decoupled without; ``wd_lh`` is decoupled. Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex
    Problems". Deviation: ``wd_lh`` without momentum, which MXNet cannot run, shrinks the weights too.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> w.grad = torch.tensor([5.0, -0.1])
    >>> Signum([w], lr=0.25).step()
    >>> w.tolist()
    [0.75, -0.75]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        momentum: float = 0.9,
        wd_lh: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, wd_lh=wd_lh, weight_decay=weight_decay)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        shrink = lr * (group["wd_lh"] if momentum else group["wd_lh"] + decay)
        directions = gradients
        if momentum:
            directions = self._states(weights, "momentum")
            torch._foreach_mul_(directions, momentum)
            torch._foreach_add_(directions, gradients, alpha=momentum - 1)
            if decay:
                torch._foreach_add_(directions, weights, alpha=(momentum - 1) * decay)
        if shrink:
            torch._foreach_mul_(weights, 1 - shrink)
        torch._foreach_add_(weights, torch._foreach_sign(directions), alpha=lr if momentum else -lr)


class FTML(_Rule):
    """Follow the moving leader: Adam's adaptive scale inside a regularised leader.

    ::

        g = g + wd * w                                       (coupled weight decay)
        v = beta2 * v + (1 - beta2) * g**2
        d' = (1 - beta1**t) / lr * (sqrt(v / (1 - beta2**t)) + epsilon)
        z = beta1 * z + (1 - beta1) * g - (d' - beta1 * d) * w
        w = -z / d'

    Zheng & Kwok 2017, "Follow the Moving Leader in Deep Learning". An update at rate 0 changes nothing.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> w.grad = torch.tensor([2.0])
    >>> FTML([w], lr=0.5).step()
    >>> round(w.item(), 4)
    0.5
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        beta1: float = 0.6,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        lr, decay, beta1, beta2 = group["lr"], group["weight_decay"], group["beta1"], group["beta2"]
        if lr == 0:
            return
        step = self._count(weights)
        if decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        squares, leaders = self._states(weights, "v"), self._states(weights, "z")
        before = self._states(weights, "d")
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_div(squares, 1 - beta2**step)
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["epsilon"])
        torch._foreach_mul_(scales, (1 - beta1**step) / lr)
        torch._foreach_mul_(before, -beta1)
        torch._foreach_add_(before, scales)  # d' - beta1 * d
        torch._foreach_mul_(leaders, beta1)
        torch._foreach_add_(leaders, gradients, alpha=1 - beta1)
        torch._foreach_addcmul_(leaders, before, weights, -1)
        torch._foreach_copy_(weights, torch._foreach_div(leaders, scales))
        torch._foreach_neg_(weights)
        torch._foreach_copy_(before, scales)


class DCASGD(_Rule):
    """SGD that compensates for gradients of older weights.

    ::

        m = momentum * m - lr * (g + wd * w + lamda * g**2 * (w - w_before))
        w_before = w
        w = w + m

    ``w_before`` are the weights before the last update. Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent
    with Delay Compensation". Weight decay is coupled. Deviation: with momentum it works; in MXNet 1.9.1 that raises.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> w.grad = torch.tensor([2.0])
    >>> DCASGD([w], lr=0.25).step()
    >>> w.item()
    0.5
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        momentum: float = 0.0,
        lamda: float = 0.04,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, lamda=lamda, weight_decay=weight_decay)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        before = self._states(weights, "previous", like_weights=True)
        delays = torch._foreach_sub(weights, before)
        torch._foreach_mul_(delays, group["lamda"])
        torch._foreach_mul_(delays, gradients)
        torch._foreach_add_(delays, 1.0)  # g * (1 + lamda * g * delay)
        torch._foreach_mul_(delays, gradients)
        if group["weight_decay"]:
            torch._foreach_add_(delays, weights, alpha=group["weight_decay"])
        torch._foreach_copy_(before, weights)
        if group["momentum"]:
            momentums = self._states(weights, "momentum")
            torch._foreach_mul_(momentums, group["momentum"])
            torch._foreach_add_(momentums, delays, alpha=-group["lr"])
            torch._foreach_add_(weights, momentums)
        else:
            torch._foreach_add_(weights, delays, alpha=-group["lr"])


class LBSGD(_Rule):
    """Large-batch SGD: the mean of ``batch_scale`` gradients is one update, whose rate rises to ``batch_scale`` times.

    ::

        G = mean of the last batch_scale gradients           (updates k = batch_scale, 2 * batch_scale, ...)
        m = momentum * m - lr * scale(k) * (G + wd * w)      (coupled weight decay)
        w = w + m

    With N = ``warmup_epochs * updates_per_epoch`` and B = ``batch_scale``, ``scale(k)`` is B from k = N on; before,
    1 + (B - 1) * k / N (``linear``), * (k / N)**2 (``power2``) or * sqrt(k / N) (``sqrt``). ``lars`` has, per tensor,
    sqrt(|w|^2 / (|G|^2 + wd * |w|^2)), between 0.01 and 100. With ``batch_scale=1`` all but ``lars`` are SGD.

    Goyal et al. 2017, "Accurate, Large Minibatch SGD"; You et al. 2017, "Large Batch Training of Convolutional
    Networks". Deviation: MXNet 1.9.1 adds up the first ``batch_scale`` gradients wrongly where their memory is reused.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = LBSGD([w], lr=0.25, batch_scale=2, warmup_epochs=0)
    >>> for gradient in (1.0, 2.0):
    ...     w.grad = torch.tensor([gradient])
    ...     optimizer.step()
    ...     print(w.item())
    1.0
    0.25
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        momentum: float = 0.0,
        warmup_strategy: str = "linear",
        warmup_epochs: float = 5,
        batch_scale: int = 1,
        updates_per_epoch: float = 32,
        begin_epoch: float = 0,
        weight_decay: float = 0.0,
    ) -> None:
        if warmup_strategy not in ("linear", "power2", "sqrt", "lars"):
            raise ValueError(f"warmup_strategy is {warmup_strategy!r}; it must be linear, power2, sqrt or lars")
        if batch_scale < 1:
            raise ValueError(f"batch_scale is {batch_scale}; it must be 1 or more")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            warmup_strategy=warmup_strategy,
            warmup_updates=warmup_epochs * updates_per_epoch,
            batch_scale=batch_scale,
            first_update=round(begin_epoch * updates_per_epoch),
            weight_decay=weight_decay,
        )

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        number, count = group["first_update"] + self._count(weights), group["batch_scale"]
        sums = self._states(weights, "sum")
        torch._foreach_add_(sums, gradients)
        if number % count:
            return
        means = list(torch._foreach_div(sums, count))
        torch._foreach_zero_(sums)
        decay, lr = group["weight_decay"], group["lr"]
        if group["warmup_strategy"] == "lars":
            norms, sizes = torch._foreach_norm(means), torch._foreach_norm(weights)
            rates: list[Tensor] | float = [
                -lr * (size**2 / (norm**2 + decay * size**2 + 1e-18)).sqrt().clamp(0.01, 100.0)
                for norm, size in zip(norms, sizes, strict=True)
            ]
        else:
            # A number of the host's: nothing is copied, and nothing waits for the device.
            rates = float(-lr * torch.tensor(self._scale(group, number)))
        if decay:
            torch._foreach_add_(means, weights, alpha=decay)
        torch._foreach_mul_(means, rates)
        if group["momentum"]:
            momentums = self._states(weights, "momentum")
            torch._foreach_mul_(momentums, group["momentum"])
            torch._foreach_add_(momentums, means)
            means = momentums
        torch._foreach_add_(weights, means)

    @staticmethod
    def _scale(group: dict[str, Any], number: int) -> float:
        """Return by how much the rate is multiplied at an update."""
        most, warmup = float(group["batch_scale"]), group["warmup_updates"]
        if number >= warmup:
            return most
        if warmup <= 1:
            return 1.0
        powers = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}
        return float(1 + (most - 1) * (number / warmup) ** powers[group["warmup_strategy"]])


class Ftrl(_Rule):
    """Follow the regularised leader, proximal: weights whose gradients add up to little are exactly 0.

    ::

        z = z + g - (sqrt(n + g**2) - sqrt(n)) / lr * w
        n = n + g**2
        w = (sign(z) * lamda1 - z) / ((beta + sqrt(n)) / lr + wd)   where |z| > lamda1, else 0

    McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches". Weight decay is the L2 term of the leader. The
    weights are proportional to ``lr``: keep it constant (``optim.schedule=constant``). An update at
    rate 0 changes nothing.

    >>> w = torch.nn.Parameter(torch.tensor([0.0, 0.0]))
    >>> w.grad = torch.tensor([3.0, 0.005])
    >>> Ftrl([w], lr=0.1).step()
    >>> [round(value, 4) for value in w.tolist()]
    [-0.0747, -0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        lamda1: float = 0.01,
        beta: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, lamda1=lamda1, beta=beta, weight_decay=weight_decay)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        lr, most = group["lr"], group["lamda1"]
        if lr == 0:
            return
        leaders, squares = self._states(weights, "z"), self._states(weights, "n")
        before = torch._foreach_sqrt(squares)
        torch._foreach_addcmul_(squares, gradients, gradients)
        roots = torch._foreach_sqrt(squares)
        steps = torch._foreach_sub(roots, before)
        torch._foreach_add_(leaders, gradients)
        torch._foreach_addcmul_(leaders, steps, weights, -1 / lr)
        torch._foreach_add_(roots, group["beta"])
        torch._foreach_div_(roots, lr)
        torch._foreach_add_(roots, group["weight_decay"])
        for weight, leader, root in zip(weights, leaders, roots, strict=True):
            weight.copy_(functional.softshrink(leader, most).neg_().div_(root))


class SGLD(_Rule):
    """Stochastic gradient Langevin dynamics: SGD at half the rate, and noise that makes weights samples.

    ::

        w = w - lr / 2 * (g + wd * w) + noise,   noise ~ N(0, lr)

    Welling & Teh 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics". Weight decay is coupled. The
    noise of an update is a function of ``seed``, the number of the update and the place of the tensor alone: it is the
    same on every rank and after a restart. MXNet's generator is not copied.

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.zeros(2)
    >>> SGLD([w], lr=0.25, seed=1).step()
    >>> w.abs().min().item() > 0
    True
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, *, seed: int = 0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, seed=seed, weight_decay=weight_decay)

    def noise(self, group: dict[str, Any], weight: Tensor, step: int, number: int) -> Tensor:
        """Draw standard normal numbers for a tensor, by its number in the group and that of the update."""
        place = next(k for k, other in enumerate(self.param_groups) if other is group)
        key = 0
        for part in (group["seed"], step, place, number):  # all four, so that no two tensors draw the same
            key = key * 1_000_003 + part
        generator = torch.Generator(weight.device).manual_seed(key % 2**63)
        noise = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
        return noise.normal_(generator=generator)

    def _update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        lr, step = group["lr"], self._count(weights)
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        torch._foreach_add_(weights, gradients, alpha=-lr / 2)
        for number, weight in enumerate(weights):
            weight.add_(self.noise(group, weight, step, number), alpha=math.sqrt(lr))


SIGNUM_KIND = OptimizerKind(eager(Signum), "coupled")
FTML_KIND = OptimizerKind(eager(FTML), "coupled")
DCASGD_KIND = OptimizerKind(eager(DCASGD), "coupled")
LBSGD_KIND = OptimizerKind(eager(LBSGD), "coupled")
FTRL_KIND = OptimizerKind(eager(Ftrl), "coupled")
SGLD_KIND = OptimizerKind(eager(SGLD), "coupled", takes_seed=True)
