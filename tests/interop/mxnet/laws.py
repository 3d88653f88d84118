"""MXNet 1.9.1's update rules in float64, each with the terms in which torch's, timm's and ours differ.

A law without terms is what MXNet computes; with terms it is what is computed here. So an optimizer that follows the law
of some terms differs from MXNet by these terms and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]

TERMS = {
    "clip-decay": "the gradient is clipped before weight decay is added to it, not after",
    "clip-0": "clip_gradient=0 turns clipping off, where MXNet clips to zero",
    "clip-each": "each gradient of a large batch is clipped, not their mean",
    "clip-norm": "the norm of the gradient is taken after it is clipped",
    "count": "updates count from 1, not from begin_num_update + 1",
    "rate": "a change of rate acts on the whole momentum at once; MXNet's momentum keeps the old rates",
    "nesterov": "the momentum is of the weight before the update; MXNet takes the decay of the weight after it",
    "epsilon": "where epsilon is added",
    "decay": "weight decay is coupled; MXNet takes it off the weight by itself",
    "per-tensor": "each tensor has a momentum schedule of its own; MXNet multiplies one number once for each tensor",
    "scaled": "tensors with weight decay are scaled; MXNet goes by the tensor's name, or scales all",
    "norm-1": "the norm of all gradients together is clipped to 1 first",
    "bounds": "there are no bounds of a weight's norm",
    "no-clip-weights": "weights are not clipped",
    "buffer": "all gradients of the first large batch are added up; MXNet's buffer was overwritten meanwhile",
    "rescale": "the mean gradient is measured after rescale_grad",
}
"""What a term changes."""


class Law:
    """The updates of one case of ``optimizers.json``, or of one like it.

    Args:
        case: as the golden file has it.
        terms: of :data:`TERMS`.
    """

    def __init__(self, case: dict[str, Any], terms: frozenset[str] = frozenset()) -> None:
        assert terms <= TERMS.keys(), terms - TERMS.keys()
        self.case, self.terms = case, terms
        self.constants: dict[str, Any] = DEFAULTS.get(case["optimizer"], {}) | case["args"]
        self.states: dict[str, dict[str, Any]] = {name: {} for name in case["tensors"]}
        self.shared: dict[str, Any] = {"schedule": 1.0, "rate": None, "ratio": 1.0}
        self.step = 0

    def update(self, weights: dict[str, Values], gradients: dict[str, Values], lr: float) -> dict[str, Values]:
        """Return the weights after one update; gradients as the network gives them."""
        self.step += 1
        self.t = self.step + (0 if "count" in self.terms else self.constants.get("begin_num_update", 0))
        self.norm = float(np.sqrt(sum((self.clip(self.scaled(gradients[name])) ** 2).sum() for name in weights)))
        updated = {}
        for name, parameter in zip(self.case["tensors"], self.case["param_names"], strict=True):
            self.name, self.is_first = parameter, name == self.case["tensors"][0]
            decayed = parameter.endswith(("_weight", "_gamma")) and not (
                self.case["optimizer"] == "lars" and parameter.endswith("_gamma")
            )
            self.wd = self.constants.get("wd", 0.0) if decayed else 0.0
            law = LAWS[self.case["optimizer"]]
            updated[name] = law(self, self.states[name], weights[name], gradients[name], lr)
        return updated

    def scaled(self, gradient: Values) -> Values:
        return gradient * float(self.constants.get("rescale_grad", 1.0))

    def clip(self, gradient: Values, *, kernel: bool = True) -> Values:
        """Clip each number; 0 means off in MXNet's kernels, and 0 in its Python."""
        most = self.constants.get("clip_gradient")
        if most is None or (most == 0 and (kernel or "clip-0" in self.terms)):
            return gradient
        return np.clip(gradient, -most, most)

    def decayed(self, w: Values, g: Values, *, kernel: bool = True) -> Values:
        """Add the decay and clip: adam, adamax, nadam and rmsprop clip both together."""
        if "clip-decay" in self.terms:
            return self.clip(self.scaled(g), kernel=kernel) + self.wd * w
        return self.clip(self.scaled(g) + self.wd * w, kernel=kernel)


Rule: TypeAlias = Callable[[Law, dict[str, Any], Values, Values, float], Any]


def _sgd(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    mu, step = law.constants["momentum"], law.clip(law.scaled(g)) + law.wd * w
    if "rate" in law.terms:
        state["m"] = mu * state.get("m", 0.0) + step
        return w - lr * state["m"]
    state["m"] = mu * state.get("m", 0.0) - lr * step
    return w + state["m"]


def _nag(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    mu, g, old = law.constants["momentum"], law.clip(law.scaled(g)), state.get("m", 0.0)
    first, last = (1.0, lr) if "rate" in law.terms else (lr, 1.0)
    new = mu * old + first * (g + law.wd * w)
    after = w - last * (first * (g + law.wd * w) + mu * new)
    state["m"] = new if "nesterov" in law.terms else mu * old + first * (g + law.wd * after)
    return after


def _adam(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, (b1, b2), eps = law.decayed(w, g), (law.constants["beta1"], law.constants["beta2"]), law.constants["epsilon"]
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    corrected = np.sqrt(1 - b2**law.t)
    root = np.sqrt(state["v"]) + eps * (corrected if "epsilon" in law.terms else 1.0)
    return w - lr * corrected / (1 - b1**law.t) * state["m"] / root


def _adamax(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, b1, b2 = law.decayed(w, g, kernel=False), law.constants["beta1"], law.constants["beta2"]
    size = np.abs(g) + (1e-8 if "epsilon" in law.terms else 0.0)
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["u"] = np.maximum(b2 * state.get("u", 0.0), size)
    with np.errstate(invalid="ignore"):
        return w - lr / (1 - b1**law.t) * state["m"] / state["u"]


def _nadam(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, b1, b2 = law.decayed(w, g, kernel=False), law.constants["beta1"], law.constants["beta2"]
    place = state if "per-tensor" in law.terms else law.shared
    now, then = (b1 * (1 - 0.5 * 0.96 ** (k * law.constants["schedule_decay"])) for k in (law.t, law.t + 1))
    place["schedule"] = place.get("schedule", 1.0) * now
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    mean = (1 - now) * g / (1 - place["schedule"]) + then * state["m"] / (1 - place["schedule"] * then)
    return w - lr * mean / (np.sqrt(state["v"] / (1 - b2**law.t)) + law.constants["epsilon"])


def _rmsprop(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, keep, eps = law.decayed(w, g), law.constants["gamma1"], law.constants["epsilon"]
    state["n"] = keep * state.get("n", 0.0) + (1 - keep) * g * g
    square, mu = state["n"], 0.0
    if law.constants["centered"]:
        state["g"] = keep * state.get("g", 0.0) + (1 - keep) * g
        square, mu = square - state["g"] ** 2, law.constants["gamma2"]
    root = np.sqrt(square) + eps if "epsilon" in law.terms else np.sqrt(square + eps)
    state["d"] = mu * state.get("d", 0.0) - lr * g / root
    most = law.constants["clip_weights"]
    after = w + state["d"]
    return after if most is None or "no-clip-weights" in law.terms else np.clip(after, -most, most)


def _adagrad(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, eps = law.clip(law.scaled(g), kernel=False), law.constants["eps"]
    coupled = "decay" in law.terms
    g = g + law.wd * w if coupled else g
    state["h"] = state.get("h", 0.0) + g * g
    root = np.sqrt(state["h"]) + 1e-10 if "epsilon" in law.terms else np.sqrt(state["h"] + eps)
    return w - lr * (g / root + (0.0 if coupled else law.wd * w))


def _adadelta(law: Law, state: dict[str, Any], w: Values, g: Values, _: float) -> Any:
    g, keep, eps = law.clip(law.scaled(g), kernel=False), law.constants["rho"], law.constants["epsilon"]
    coupled = "decay" in law.terms
    g = g + law.wd * w if coupled else g
    state["g"] = keep * state.get("g", 0.0) + (1 - keep) * g * g
    step = np.sqrt(state.get("d", 0.0) + eps) / np.sqrt(state["g"] + eps) * g
    state["d"] = keep * state.get("d", 0.0) + (1 - keep) * step * step
    return w - step - (0.0 if coupled else law.wd * w)


def _lamb(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g, b1, b2 = law.clip(law.scaled(g)), law.constants["beta1"], law.constants["beta2"]
    g = g / max(1.0, law.norm) if "norm-1" in law.terms else g
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    corrects = law.constants["bias_correction"]
    m, v = (state["m"] / (1 - b1**law.t), state["v"] / (1 - b2**law.t)) if corrects else (state["m"], state["v"])
    step = m / (np.sqrt(v) + law.constants["epsilon"]) + law.wd * w
    size, length = float(np.linalg.norm(w)), float(np.linalg.norm(step))
    if "bounds" not in law.terms:
        size = max(size, law.constants["lower_bound"] or 0.0)
        size = min(size, law.constants["upper_bound"] or np.inf)
    is_scaled = size > 0 and length > 0 and ("scaled" not in law.terms or law.wd > 0)
    return w - lr * (size / length if is_scaled else 1.0) * step


def _lars(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    mu, clipped, rate = law.constants["momentum"], law.clip(law.scaled(g)), lr
    if law.is_first or law.case["mode"] == "one_by_one":
        law.shared["ratio"] = rate / law.shared["rate"] if law.shared["rate"] else 1.0
        law.shared["rate"] = rate
    scaled = law.wd > 0 if "scaled" in law.terms else not law.name.endswith(("gamma", "beta", "bias"))
    size, length = np.linalg.norm(w), np.linalg.norm(clipped if "clip-norm" in law.terms else law.scaled(g))
    trust = 1.0
    if scaled and size > 0 and length > 0:
        trust = float(law.constants["eta"] * size / (length + law.wd * size + law.constants["eps"]))
    step = trust * (clipped + law.wd * w)
    if "rate" in law.terms:
        state["m"] = mu * state.get("m", 0.0) + step
        return w - lr * state["m"]
    mu = mu * law.shared["ratio"] if law.constants["momentum_correction"] else mu
    state["m"] = mu * state.get("m", 0.0) - lr * step
    return w + state["m"]


def _dcasgd(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    g = law.clip(law.scaled(g), kernel=False)
    before = state.get("before", w)
    state["before"] = w
    return w - lr * (g + law.wd * w + law.constants["lamda"] * g * g * (w - before))


def _lbsgd(law: Law, state: dict[str, Any], w: Values, g: Values, lr: float) -> Any:
    count, per_epoch = law.constants["batch_scale"], law.constants["updates_per_epoch"]
    first = law.constants["begin_epoch"] * per_epoch
    state["k"] = k = state.get("k", first) + 1
    g = law.clip(law.scaled(g)) / float(law.constants.get("rescale_grad", 1.0)) if "clip-each" in law.terms else g
    overwritten = law.case["gradient_buffers"] == "reused" and "buffer" not in law.terms
    # The sum of the first large batch is the buffer itself, until something is added to it.
    state["sum"] = g + g if overwritten and k - first == 2 else state.get("sum", 0.0) + g
    if k % count:
        return w
    mean, state["sum"] = state["sum"] / count, 0.0
    warmup = law.constants["warmup_epochs"] * per_epoch
    power = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}.get(law.constants["warmup_strategy"])
    if power is None:
        measured = law.scaled(mean) if "rescale" in law.terms else mean
        ratio = (w * w).sum() / ((measured**2).sum() + law.wd * (w * w).sum() + 1e-18)
        scale = float(np.clip(np.sqrt(ratio), 0.01, 100.0))
    else:
        scale = float(count) if k >= warmup else 1.0 if warmup <= 1 else 1 + (count - 1) * (k / warmup) ** power
    mean = law.scaled(mean) if "clip-each" in law.terms else law.clip(law.scaled(mean))
    state["m"] = law.constants["momentum"] * state.get("m", 0.0) - lr * scale * (mean + law.wd * w)
    return w + state["m"]


LAWS: dict[str, Rule] = {
    "sgd": _sgd,
    "ccsgd": _sgd,
    "nag": _nag,
    "adam": _adam,
    "adamax": _adamax,
    "nadam": _nadam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "lamb": _lamb,
    "lars": _lars,
    "dcasgd": _dcasgd,
    "lbsgd": _lbsgd,
}

_ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "ccsgd": {"momentum": 0.0},
    "nag": {"momentum": 0.0},
    "adam": {**_ADAM, "learning_rate": 0.001},
    "adamax": {**_ADAM, "learning_rate": 0.002},
    "nadam": {**_ADAM, "learning_rate": 0.001, "schedule_decay": 0.004},
    "rmsprop": {
        "learning_rate": 0.001,
        "gamma1": 0.9,
        "gamma2": 0.9,
        "epsilon": 1e-8,
        "centered": False,
        "clip_weights": None,
    },
    "adagrad": {"eps": 1e-7},
    "adadelta": {"rho": 0.9, "epsilon": 1e-5},
    "lamb": {
        **_ADAM,
        "learning_rate": 0.001,
        "epsilon": 1e-6,
        "lower_bound": None,
        "upper_bound": None,
        "bias_correction": True,
    },
    "lars": {"momentum": 0.0, "eta": 0.001, "eps": 0.0, "momentum_correction": True},
    "dcasgd": {"momentum": 0.0, "lamda": 0.04},
    "lbsgd": {
        "momentum": 0.0,
        "warmup_strategy": "linear",
        "warmup_epochs": 5,
        "batch_scale": 1,
        "updates_per_epoch": 32,
        "begin_epoch": 0,
    },
}
"""MXNet's own, where a case does not set them; a rate is 0.01 otherwise."""
