"""Every optimizer step by step against MXNet 1.9.1: the same weights, or others by named terms alone.

:mod:`.laws` has MXNet's rules in float64. They give the 199 recorded cases; with the terms in which an optimizer of
ours differs, they give what ours computes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.interop.mxnet.laws import DEFAULTS, LAWS, TERMS, Law
from torch import Tensor, nn

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.interop.mxnet import optimizers as mxnet

Case: TypeAlias = dict[str, Any]
Weights: TypeAlias = dict[str, NDArray[Any]]

COMMON = {"learning_rate", "wd", "rescale_grad", "clip_gradient", "multi_precision", "begin_num_update"}


def with_momentum(name: str) -> Callable[[Case], Optim]:
    return lambda a: Optim(name, momentum=a["momentum"], nesterov=name == "nag")


def with_betas(name: str, **options: Any) -> Callable[[Case], Optim]:
    return lambda a: Optim(name, betas=(a["beta1"], a["beta2"]), eps=a["epsilon"], options=options)


def with_its_options(name: str) -> Callable[[Case], Optim]:
    return lambda a: Optim(name, options={key: value for key, value in a.items() if key not in COMMON})


def rmsprop(a: Case) -> Optim:
    momentum = {"momentum": a["gamma2"]} if a["centered"] else {}
    return Optim("rmsprop", options={"alpha": a["gamma1"], "eps": a["epsilon"], "centered": a["centered"]} | momentum)


def lamb(**more: Any) -> Callable[[Case], Optim]:
    return lambda a: Optim("timm/lamb", options={"eps": a["epsilon"], "bias_correction": a["bias_correction"]} | more)


def lars(a: Case) -> Optim:
    return Optim("timm/lars", options={"momentum": a["momentum"], "trust_coeff": a["eta"], "eps": a["eps"]})


@dataclass(frozen=True)
class Ours:
    """What stands for an optimizer of MXNet's.

    Args:
        theirs: MXNet's name.
        spec: ours, of MXNet's constants.
        equal: cases in which the weights are the same, of how many; ``docs/optimizers.md`` says so.
        terms: in which it differs, of :data:`laws.TERMS`; each is needed in a case at least.
    """

    theirs: str
    spec: Callable[[Case], Optim]
    equal: tuple[int, int]
    terms: frozenset[str] = field(default_factory=frozenset)


def _ours(theirs: str, spec: Callable[[Case], Optim], equal: tuple[int, int], *terms: str) -> Ours:
    return Ours(theirs, spec, equal, frozenset(terms))


OURS = {
    "sgd": _ours("sgd", with_momentum("sgd"), (18, 20), "rate"),
    "sgd for ccsgd": _ours("ccsgd", with_momentum("sgd"), (1, 1)),
    "nag": _ours("nag", with_momentum("nag"), (10, 15), "nesterov", "rate"),
    "adam": _ours("adam", with_betas("adam"), (6, 10), "clip-decay", "count", "epsilon"),
    "adamax": _ours("adamax", with_betas("adamax"), (7, 9), "clip-0", "clip-decay", "epsilon"),
    "adamax, eps=0": _ours("adamax", with_betas("adamax", eps=0.0), (8, 9), "clip-0", "clip-decay"),
    "nadam": _ours("nadam", with_betas("nadam"), (0, 8), "clip-decay", "per-tensor"),
    "rmsprop": _ours("rmsprop", rmsprop, (0, 16), "clip-decay", "epsilon", "no-clip-weights"),
    "adagrad": _ours("adagrad", lambda a: Optim("adagrad"), (0, 9), "clip-0", "epsilon", "decay"),
    "adagrad, eps=0, initial_accumulator_value=1e-7": _ours(
        "adagrad",
        lambda a: Optim("adagrad", options={"eps": 0.0, "initial_accumulator_value": a["eps"]}),
        (4, 9),
        "clip-0",
        "decay",
    ),
    "adadelta, eps=1e-5": _ours(
        "adadelta", lambda a: Optim("adadelta", options={"eps": a["epsilon"]}), (3, 7), "decay"
    ),
    "timm/lamb": _ours("lamb", lamb(), (0, 11), "scaled", "norm-1", "bounds"),
    "timm/lamb, always_adapt=true, max_grad_norm=1e9": _ours(
        "lamb", lamb(always_adapt=True, max_grad_norm=1e9), (10, 11), "bounds"
    ),
    "timm/lars, eps=0": _ours("lars", lars, (7, 23), "scaled", "clip-norm", "rate"),
    "signum": _ours("signum", with_its_options("signum"), (15, 15)),
    "ftml": _ours("ftml", with_its_options("ftml"), (8, 8)),
    "dcasgd": _ours("dcasgd", with_its_options("dcasgd"), (8, 9), "clip-0"),
    "lbsgd": _ours("lbsgd", with_its_options("lbsgd"), (12, 22), "clip-each", "buffer", "rescale"),
    "ftrl": _ours("ftrl", with_its_options("ftrl"), (7, 7)),
    "sgld": _ours("sgld", with_its_options("sgld"), (6, 6)),
}

UNRECORDED: dict[str, Case] = {
    f"{optimizer}.clip_and_decay": {
        "optimizer": optimizer,
        "args": {"learning_rate": 0.01, "wd": 0.5, "clip_gradient": 0.5},
        "dtype": "float32",
        "tensors": ["matrix", "vector", "conv"],
        "param_names": ["fc_weight", "fc_bias", "conv_weight"],
        "lr_scheduler": None,
        "mode": "one_by_one",
        "gradient_buffers": "fresh",
    }
    for optimizer in ("adam", "adamax", "nadam")
}
"""Cases where the order of clipping and decay tells; a living MXNet gives their weights."""


def constants(case: Case) -> Case:
    return {**DEFAULTS.get(case["optimizer"], {}), **case["args"]}


def rate(case: Case, number: int) -> float:
    """The learning rate of an update, from 1: FactorScheduler drops it one update late."""
    usual = 1.0 if case["optimizer"] == "adadelta" else float(constants(case).get("learning_rate", 0.01))
    if case["lr_scheduler"] is None:
        return usual
    factor = case["lr_scheduler"]["args"]
    base = usual if case["optimizer"] == "adam" else factor["base_lr"]  # Adam's default rate replaces the scheduler's
    return float(base * factor["factor"] ** max(0, -(-number // factor["step"]) - 1))


class Golden:
    """The inputs and results that MXNet 1.9.1 left, or a living one gives."""

    def __init__(self, cases: dict[str, Case], arrays: dict[str, NDArray[Any]]) -> None:
        self.arrays = arrays
        self.cases = {name: case for name, case in cases.items() if "raises" not in case} | UNRECORDED
        self._computed: dict[tuple[str, ...], list[Weights]] = {}

    def of(self, optimizer: str, *, recorded: bool = True) -> list[str]:
        names = [name for name, case in self.cases.items() if case["optimizer"] == optimizer]
        return [name for name in names if f"{name}/weights/matrix" in self.arrays or not recorded]

    def initial(self, case: Case) -> Weights:
        return {tensor: _rounded(case, self.arrays[f"init/{tensor}"]) for tensor in case["tensors"]}

    def gradients(self, case: Case, step: int) -> Weights:
        factor = np.float32(0 if case["gradient_buffers"] == "first_zero" and step == 0 else 1)
        return {tensor: _rounded(case, self.arrays[f"grad/{tensor}"][step]) * factor for tensor in case["tensors"]}

    def recorded(self, name: str) -> Iterator[Weights]:
        case = self.cases[name]
        kind = "master" if case["dtype"] == "float16" else "weights"
        for step in range(12):
            yield {tensor: self.arrays[f"{name}/{kind}/{tensor}"][step] for tensor in case["tensors"]}

    def by_law(self, name: str, terms: frozenset[str] = frozenset()) -> list[Weights]:
        """The weights after each update; computed once, as several tests compare them."""
        key = (name, *sorted(terms))
        if key not in self._computed:
            self._computed[key] = list(self._by_law(name, terms))
        return self._computed[key]

    def _by_law(self, name: str, terms: frozenset[str]) -> Iterator[Weights]:
        case = self.cases[name]
        law, first = Law(case, terms), case["args"].get("begin_num_update", 0) + 1
        weights = {tensor: value.astype(np.float64) for tensor, value in self.initial(case).items()}
        for step in range(12):
            gradients = {tensor: value.astype(np.float64) for tensor, value in self.gradients(case, step).items()}
            weights = law.update(weights, gradients, rate(case, first + step))
            yield weights

    def by_ours(self, name: str, ours: Ours) -> list[Weights]:
        """The weights after each update; computed once, as several tests compare them."""
        key = ("ours", repr(ours.spec(constants(self.cases[name]))), name)
        if key not in self._computed:
            self._computed[key] = list(self._by_ours(name, ours))
        return self._computed[key]

    def _by_ours(self, name: str, ours: Ours) -> Iterator[Weights]:
        case = self.cases[name]
        options, first = constants(case), case["args"].get("begin_num_update", 0) + 1
        scale, clip = options.get("rescale_grad", 1.0), options.get("clip_gradient")
        weights = {tensor: nn.Parameter(torch.from_numpy(value)) for tensor, value in self.initial(case).items()}
        groups = []
        for tensor, parameter in zip(case["tensors"], case["param_names"], strict=True):
            is_spared = parameter.endswith("_bias") or (case["optimizer"] == "lars" and parameter.endswith("_gamma"))
            decay = 0.0 if is_spared else options.get("wd", 0.0)
            groups.append({"params": [weights[tensor]], "weight_decay": decay})
        optimizer = optim.build(ours.spec(options), groups, lr=0.1, device=torch.device("cpu"))
        if isinstance(optimizer, mxnet.SGLD):
            drawn = {id(weights[tensor]): self.arrays[f"{name}/noise/{tensor}"] for tensor in case["tensors"]}

            def noise(group: dict[str, Any], weight: Tensor, step: int, number: int) -> Tensor:
                values: Tensor = torch.from_numpy(drawn[id(weight)][step - 1])
                return values.div(float(group["lr"]) ** 0.5)

            optimizer.noise = noise  # type: ignore[method-assign]
        for step in range(12):
            for tensor, gradient in self.gradients(case, step).items():
                prepared = torch.from_numpy(gradient) * scale
                weights[tensor].grad = prepared.clamp(-clip, clip) if clip else prepared
            optim.set_lr(optimizer, rate(case, first + step))
            optimizer.step()
            yield {tensor: weight.detach().numpy().copy() for tensor, weight in weights.items()}


def _rounded(case: Case, value: NDArray[Any]) -> NDArray[Any]:
    """A copy in float32, of float16 numbers where the case has those."""
    return value.astype(case["dtype"]).astype(np.float32)


def differ(first: Iterable[Weights], second: Iterable[Weights]) -> str | None:
    """Where weights differ first by more than float32's rounding; None: nowhere in the 12 updates."""
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True), 1):
        for tensor, weight in ours.items():
            expected = np.asarray(theirs[tensor], np.float64)
            largest = float(
                np.nanmax(np.abs(expected), initial=1.0)
            )  # what is small beside others is rounded as they are
            if not np.allclose(weight, expected, rtol=1e-5, atol=2e-6 * largest, equal_nan=True):
                return f"{tensor}, update {step}: {weight.ravel()[:4]} and {expected.ravel()[:4]}"
    return None


@pytest.fixture(scope="module")
def golden(data_folder: Path) -> Golden:
    folder = data_folder / "mxnet-golden"
    with np.load(folder / "optimizers.npz") as arrays:
        return Golden(json.loads((folder / "optimizers.json").read_text()), dict(arrays))


def test_every_recorded_optimizer_is_compared_or_named(golden: Golden) -> None:
    assert len(golden.cases) == 199 + len(UNRECORDED)
    left = {case["optimizer"] for case in golden.cases.values()} - {ours.theirs for ours in OURS.values()}
    assert left == {"groupadagrad"}  # for embeddings: a rate for each row


@pytest.mark.parametrize("optimizer", list(LAWS))
def test_the_laws_give_what_mxnet_recorded(golden: Golden, optimizer: str) -> None:
    for name in golden.of(optimizer):
        assert differ(golden.by_law(name), golden.recorded(name)) is None, name


@pytest.mark.parametrize("name", list(OURS))
def test_updates_are_mxnets_or_differ_by_the_named_terms_alone(golden: Golden, name: str) -> None:
    ours = OURS[name]
    cases = golden.of(ours.theirs)
    equal = [case for case in cases if differ(golden.by_ours(case, ours), golden.recorded(case)) is None]
    assert (len(equal), len(cases)) == ours.equal, equal
    assert ours.terms or len(equal) == len(cases)
    if ours.terms:
        for case in golden.of(ours.theirs, recorded=False):
            assert differ(golden.by_ours(case, ours), golden.by_law(case, ours.terms)) is None, case


@pytest.mark.parametrize("name", [name for name, ours in OURS.items() if ours.terms])
def test_every_named_term_makes_a_difference(golden: Golden, name: str) -> None:
    ours = OURS[name]
    cases = golden.of(ours.theirs, recorded=False)
    for term in ours.terms:
        less = ours.terms - {term}
        assert any(differ(golden.by_ours(case, ours), golden.by_law(case, less)) for case in cases), TERMS[term]


LIVING = """
import json, sys
import numpy as np
import mxnet as mx
folder = sys.argv[1]
cases, inputs = json.load(open(folder + "/cases.json")), np.load(folder + "/inputs.npz")
weights = {}
for name, case in cases.items():
    schedule = case["lr_scheduler"]
    more = {"lr_scheduler": getattr(mx.lr_scheduler, schedule["class"])(**schedule["args"])} if schedule else {}
    names = dict(enumerate(case["param_names"]))
    optimizer = mx.optimizer.create(case["optimizer"], param_idx2name=names, **case["args"], **more)
    updater = mx.optimizer.get_updater(optimizer)
    arrays = [mx.nd.array(inputs["init/" + tensor], dtype="float32") for tensor in case["tensors"]]
    for step in range(12):
        gradients = [mx.nd.array(inputs["grad/" + tensor][step], dtype="float32") for tensor in case["tensors"]]
        if case["mode"] == "list":
            updater(list(range(len(arrays))), gradients, arrays)
        else:
            for index, (gradient, array) in enumerate(zip(gradients, arrays)):
                updater(index, gradient, array)
        for tensor, array in zip(case["tensors"], arrays):
            weights.setdefault("%s/weights/%s" % (name, tensor), []).append(array.asnumpy())
np.savez(folder + "/outputs.npz", **{key: np.stack(value) for key, value in weights.items()})
"""


@pytest.mark.peer
def test_a_living_mxnet_says_the_same_of_other_numbers(golden: Golden, mxnet_python: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    inputs = {
        key: draw.normal(size=a.shape).astype("f4") for key, a in golden.arrays.items() if key[:4] in ("init", "grad")
    }
    cases = {
        name: case
        for name, case in golden.cases.items()
        if case["dtype"] == "float32" and case["gradient_buffers"] == "fresh" and case["optimizer"] != "sgld"
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    np.savez(tmp_path / "inputs.npz", **inputs)  # type: ignore[arg-type]
    done = subprocess.run([mxnet_python, "-c", LIVING, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as outputs:
        living = Golden(cases, inputs | dict(outputs))
    for name, case in cases.items():
        if case["optimizer"] in LAWS:
            assert differ(living.by_law(name), living.recorded(name)) is None, name
    for name, ours in OURS.items():
        for case_name in living.of(ours.theirs):
            expected = living.by_law(case_name, ours.terms) if ours.terms else living.recorded(case_name)
            assert differ(living.by_ours(case_name, ours), expected) is None, (name, case_name)
