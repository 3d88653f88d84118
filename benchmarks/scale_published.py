"""Predictions of ``steady scale`` against published tables: each row with the numbers that the model was given.

A row is given the published rate of one device (or machine), the model's parameters, the batch and the name of the
link. Links have the physical figures of ``steadytrain.tuning.scale``; no link is fitted. Nobody publishes how much the
updates of one device vary, for whose slowest all wait: that one number (``spread``) is the median of what explains the
rows of the other groups, never of the group that is judged, nor of ``practice``. ``error_without_spread``: with none.

Nobody publishes how an update divides, so for all rows: the forward pass takes a third of it and the backward pass two
thirds (a backward pass multiplies twice as much), and gradients become ready evenly over the backward pass, one after
another. What exchanges tensors one by one (MXNet's key-value store, TensorFlow's parameter servers and towers) is given
as many equal tensors as the network has; Horovod's fusion and PyTorch's buckets are given buckets.

``error`` is of the predicted rate, relative to the published one; ``linear_error`` is that of saying "N times as fast".

Nobody publishes what one device of MLPerf's systems does. There the smallest published system is the base: what one
device must do alone is worked out from it by the same model, and larger systems are predicted from that. Most of them
have smaller batches, whose passes are taken to shrink in proportion: what does not shrink is not published, either.
These rows are a group of their own (``mlperf``), which is in no sum and from which no spread is taken.

usage: python benchmarks/scale_published.py [--save]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import machine
from steadytrain.tuning.scale import (
    BUCKET,
    LINKS,
    Gradient,
    MachineCluster,
    MeasuredDevice,
    ScalePrediction,
    expected_maximum,
    predict,
)

HOROVOD = 64 * 2**20
"""Bytes of its fusion buffer, by default."""
EACH = 0
"""Tensor by tensor."""
CIFAR_PASS, IMAGENET = 60_000, 1_281_167
"""Images of a pass: the CIFAR logs count 60,000 of 50,000."""

NETS = {  # millions of parameters, tensors
    "resnet50": (25.557, 161),
    "resnet152": (60.193, 467),
    "resnet152, 256 classes": (58.668, 467),
    "inception_v3": (27.161, 292),
    "inception_bn": (11.295, 209),
    "inception_bn_28_small": (1.654, 77),
    "alexnet": (61.101, 16),
    "vgg16": (138.358, 32),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rates that somebody published.

    Args:
        source: what was published.
        net: of :data:`NETS`.
        batch: images of a device.
        rates: devices -> images per second; the first is what the prediction is given.
        batches: devices -> images of a device, where that is not ``batch``.
        link: between devices, or between machines of ``per_machine``, within which ``local`` joins them.
        bucket: bytes of gradients that are exchanged at once.
        value: bytes of a gradient's value.
        remark: what to know.
    """

    source: str
    net: str
    batch: int
    rates: dict[int, float]
    link: str
    per_machine: int | None = None
    local: str = "pcie3"
    bucket: int = EACH
    value: int = 4
    remark: str = ""
    batches: Mapping[int, int] = field(default_factory=dict)


ARTICLES = "fine-tuning on AWS, 2017 (MXNet, 8 x K80 and 4 x V100)"
SERVERS = "distributed MXNet, 2015"
NVIDIA_MXNET = "NVIDIA DeepLearningExamples, MxNet RN50v1.5"
NVIDIA_PYTORCH = "NVIDIA DeepLearningExamples, PyTorch resnet50v1.5"
MLPERF = "MLPerf Training v4.0, ResNet-50 (MXNet, Horovod)"
TENSORFLOW = "TensorFlow benchmarks, May 2017, synthetic data"


def rates(images: int, **seconds: float) -> dict[int, float]:
    """Turn seconds of a pass over so many images into images per second."""
    return {int(name.removeprefix("n")): images / each for name, each in seconds.items()}


def practice() -> Iterator[Table]:
    """Return the tables of the articles and examples that the product set out from, and their companions."""
    k80: dict[str, Any] = {"source": ARTICLES, "link": "pcie3"}
    v100: dict[str, Any] = {"source": ARTICLES, "link": "nvlink2"}
    yield Table(**k80, net="resnet152, 256 classes", batch=16, rates={1: 20, 8: 150}, remark="20 is rounded: +-2.5 %")
    yield Table(**k80, net="resnet152, 256 classes", batch=32, rates={1: 21, 8: 160}, remark="21 is rounded: +-2.4 %")
    yield Table(**k80, net="resnet50", batch=16, rates={1: 48, 8: 360})
    yield Table(**v100, net="resnet152, 256 classes", batch=16, rates={1: 104, 4: 410})
    yield Table(**v100, net="resnet152, 256 classes", batch=32, rates={1: 131, 4: 520})
    yield Table(**v100, net="resnet50", batch=16, rates={1: 260, 4: 1010})
    yield Table(**v100, net="resnet50", batch=32, rates={1: 300, 4: 1200})
    yield Table(**v100, net="resnet50", batch=64, rates={1: 335, 4: 1340})
    gtx: dict[str, Any] = {"source": SERVERS, "link": "1GbE", "per_machine": 2}
    yield Table(
        **gtx,
        net="inception_bn_28_small",
        batch=256,
        rates=rates(CIFAR_PASS, n1=71, n10=6.9),
        remark="published as 7 s, 6.9 by its log: more than ten times as fast",
    )
    yield Table(
        **gtx,
        net="inception_bn_28_small",
        batch=128,
        rates=rates(CIFAR_PASS, n1=82.9, n10=11),
        remark="one GPU by its log; the article's 128 s is a misprint",
    )
    yield Table(
        **gtx,
        net="inception_bn",
        batch=48,
        rates=rates(IMAGENET, n1=16_164, n10=3000),
        remark="logs of one GPU say 16,164 and 22,780 s: no sure baseline",
    )
    yield Table(
        source=SERVERS,
        net="inception_bn",
        batch=144,
        rates=rates(IMAGENET, n1=14_203, n10=1422),
        link="10GbE",
        remark="a device is a g2.8xlarge with four GPUs",
    )
    yield Table(
        source=NVIDIA_MXNET + ", 90 epochs, as quoted with MLPerf's results",
        net="resnet50",
        batch=256,
        rates={1: 3411, 8: 26_674},
        link="nvlink3",
        bucket=HOROVOD,
        value=2,
    )
    yield Table(
        source=NVIDIA_PYTORCH + ", AMP, as quoted with MLPerf's results",
        net="resnet50",
        batch=256,
        rates={1: 2470, 8: 16_621},
        link="nvlink3",
        bucket=BUCKET,
    )


def nvidia() -> Iterator[Table]:
    """Return all rows of training throughput on the two pages, by commits 134510b and 291f0d0 of the repository."""

    def mxnet(where: str, link: str, batch: int, shown: Sequence[float], *, half: bool) -> Table:
        kind = "mixed precision" if half else "TF32" if "A100" in where else "FP32"
        return Table(
            source=f"{NVIDIA_MXNET}, {where}, {kind}",
            net="resnet50",
            batch=batch,
            rates={1 << k: rate for k, rate in enumerate(shown)},
            link=link,
            bucket=HOROVOD,
            value=2 if half else 4,
        )

    yield mxnet("DGX A100", "nvlink3", 256, (2180, 4332, 8587, 16925), half=True)
    yield mxnet("DGX A100", "nvlink3", 256, (1022, 2032, 4035, 8001), half=False)
    yield mxnet("DGX-1 V100", "nvlink2", 192, (1376, 2768, 5357, 10723), half=True)
    yield mxnet("DGX-1 V100", "nvlink2", 96, (384, 763, 1513, 3005), half=False)
    yield mxnet("DGX-2 V100", "nvlink2", 256, (1492, 2935, 5726, 11368, 21484), half=True)
    yield mxnet("DGX-2 V100", "nvlink2", 128, (417, 821, 1623, 3223, 6338), half=False)

    def pytorch(where: str, link: str, kind: str, alone: float, eight: float) -> Table:
        return Table(
            source=f"{NVIDIA_PYTORCH}, {where}, {kind}",
            net="resnet50",
            batch=256,
            rates={1: alone, 8: eight},
            link=link,
            bucket=BUCKET,
        )

    yield pytorch("DGX A100", "nvlink3", "TF32", 938, 7248)
    yield pytorch("DGX-1 16 GB", "nvlink2", "FP32", 367, 2855)
    yield pytorch("DGX-1 16 GB", "nvlink2", "mixed precision", 1200, 8322)
    yield pytorch("DGX-1 32 GB", "nvlink2", "FP32", 356, 2766)
    yield pytorch("DGX-1 32 GB", "nvlink2", "mixed precision", 1156, 8056)


def tensorflow() -> Iterator[Table]:
    """Return all rows with synthetic data of the page at commit 5984ffe."""
    five = ("inception_v3", "resnet50", "resnet152", "alexnet", "vgg16")
    machines: dict[str, tuple[str, dict[int, tuple[float, ...]], tuple[int, ...]]] = {
        "DGX-1 P100": (
            "nvlink1",
            {
                1: (142, 219, 91.8, 2987, 154),
                2: (284, 422, 181, 5658, 295),
                4: (569, 852, 356, 10509, 584),
                8: (1131, 1734, 716, 17822, 1081),
            },
            (64, 64, 64, 512, 64),
        ),
        "Google K80": (
            "pcie3",
            {
                1: (30.5, 51.9, 20.0, 656, 35.4),
                2: (57.8, 99.0, 38.2, 1209, 64.8),
                4: (116, 195, 75.8, 2328, 120),
                8: (227, 387, 148, 4640, 234),
            },
            (64, 64, 32, 512, 32),
        ),
        "EC2 K80": (
            "pcie3",
            {
                1: (30.8, 51.5, 19.7, 684, 36.3),
                2: (58.7, 98.0, 37.6, 1244, 69.4),
                4: (117, 195, 74.9, 2479, 141),
                8: (230, 384, 149, 4853, 260),
            },
            (64, 64, 32, 512, 32),
        ),
        "DGX-1 P100, batch 32": (
            "nvlink1",
            {1: (128, 195, 82.7, 144), 2: (259, 368, 160, 281), 4: (520, 768, 317, 549), 8: (995, 1485, 632, 820)},
            (32, 32, 32, 32),
        ),
        "Google K80, batch 32": ("pcie3", {1: (29.3, 49.5), 2: (55.0, 95.4), 4: (109, 183), 8: (216, 362)}, (32, 32)),
        "EC2 K80, batch 32": ("pcie3", {1: (29.9, 49.0), 2: (57.5, 94.1), 4: (114, 184), 8: (216, 355)}, (32, 32)),
    }
    for where, (link, rows, batches) in machines.items():
        nets = ("inception_v3", "resnet50", "resnet152", "vgg16") if len(batches) == 4 else five
        for column, batch in enumerate(batches):
            yield Table(
                source=f"{TENSORFLOW}, {where}",
                net=nets[column],
                batch=batch,
                rates={n: each[column] for n, each in rows.items()},
                link=link,
            )
    clusters = {
        ("inception_v3", 64): (29.7, 229, 459, 902, 1783),
        ("resnet50", 64): (52.4, 378, 751, 1388, 2744),
        ("resnet152", 32): (19.4, 146, 291, 565, 981),
        ("inception_v3", 32): (29.2, 219, 427, 820, 1608),
        ("resnet50", 32): (48.4, 333, 667, 1180, 2315),
    }
    for (net, batch), shown in clusters.items():
        yield Table(
            source=f"{TENSORFLOW}, EC2 K80, 1 to 8 machines",
            net=net,
            batch=batch,
            rates=dict(zip((1, 8, 16, 32, 64), shown, strict=True)),
            link="10GbE",
            per_machine=8,
        )


def dlperf() -> Iterator[Table]:
    """Return DLPerf's report v1.0 (August 2020, commit 0770fdf): ResNet-50 in FP32 on four machines of eight V100."""
    shown = {
        "OneFlow": (384.85, 2969.45, 5906.55, 11711.18),
        "TensorFlow 1.x": (362.44, 2721.98, 5099.42, 9514.64),
        "MXNet": (389.71, 2947.72, 5684.68, 10419.21),
        "PyTorch": (354.40, 2719.07, 5307.21, 10632.33),
        "PaddlePaddle": (352.72, 2625.38, 4895.27, 9348.17),
        "TensorFlow 2.x": (321.80, 2458.74, 4849.68, 9418.44),
    }
    for framework, each in shown.items():
        yield Table(
            source=f"DLPerf v1.0, {framework}",
            net="resnet50",
            batch=96 if framework == "MXNet" else 128,
            rates=dict(zip((1, 8, 16, 32), each, strict=True)),
            link="edr",
            per_machine=8,
            local="nvlink2",
            bucket=HOROVOD if framework in ("TensorFlow 1.x", "MXNet") else BUCKET,
        )


def mlperf() -> Iterator[Table]:
    """Return the throughput of the first log of each system in training_results_v4.0, without its evaluations."""
    common: dict[str, Any] = {"net": "resnet50", "bucket": HOROVOD, "value": 2}
    h100: dict[str, Any] = {"link": "ndr", "per_machine": 8, "local": "nvlink4", **common}
    yield Table(
        source=f"{MLPERF}, H100",
        batch=400,
        rates={8: 57_100, 2528: 6_950_000, 3584: 9_670_000},
        batches={2528: 16, 3584: 16},
        remark="the switches add up (SHARP, by the configuration), which is no ring; 16 images a GPU instead of 400",
        **h100,
    )
    yield Table(
        source=f"{MLPERF}, L40S",
        batch=204,
        rates={8: 14_800, 64: 112_400},
        batches={64: 50},
        link="hdr",
        per_machine=4,
        local="pcie4",
        remark="the log does not name the network: HDR is taken",
        **common,
    )


LEFT_OUT = {
    "ImageNet on 16 x K80, 400 and 700 images/s": "limited by the loader; no rate of one GPU is published",
    "Gluon on 4 x V100, 306 to 50,000 samples/s": "rates and seconds of an epoch contradict each other by up to four"
    " times",
    "TensorFlow with real data": "limited by the disk and the input pipeline in part, whose rates are not published",
}


@dataclass(frozen=True)
class Case:
    """One published rate, and what predicts it."""

    table: Table
    devices: int

    @property
    def base(self) -> tuple[int, float]:
        """The devices and the rate that are given."""
        return next(iter(self.table.rates.items()))

    @property
    def linear(self) -> float:
        """The rate of so many times the devices being so many times as fast."""
        return self.base[1] * self.devices / self.base[0]

    @property
    def published(self) -> float:
        return self.table.rates[self.devices]

    def device(self, spread: float) -> MeasuredDevice:
        """Return what one device does alone, updates varying by this share: the base comes out as it was published."""
        devices, rate = self.base
        millions, tensors = NETS[self.table.net]
        num = millions * 1e6 * self.table.value
        gradients = tuple(Gradient(bytes=round(num / tensors), ready=(k + 1) / tensors) for k in range(tensors))
        step = self.table.batch * devices / rate
        while True:
            device = MeasuredDevice(
                batch_size=self.table.batch,
                forward_seconds=step / 3,
                backward_seconds=2 * step / 3,
                update_seconds=0.0,
                gradients=gradients,
                spread=spread,
            )
            times = self._predict(device, devices).images_per_second / rate
            if abs(times - 1) < 1e-9:
                return device
            step *= times

    def _predict(self, device: MeasuredDevice, devices: int) -> ScalePrediction:
        link = LINKS[self.table.link]
        within = link if link.is_local else LINKS[self.table.local]
        per_machine = self.table.per_machine or (devices if link.is_local else 1)
        cluster = MachineCluster(between=link, per_machine=per_machine, within=within)
        return predict(device, devices, cluster, bucket_bytes=self.table.bucket)

    def predict(self, spread: float) -> ScalePrediction:
        """Predict it with devices whose updates vary by this share."""
        device, batch = self.device(spread), self.table.batches.get(self.devices, self.table.batch)
        share = batch / self.table.batch
        fewer = replace(
            device,
            batch_size=batch,
            forward_seconds=device.forward_seconds * share,
            backward_seconds=device.backward_seconds * share,
        )
        return self._predict(fewer, self.devices)

    def error(self, spread: float) -> float:
        """Return the error relative to the published rate."""
        return self.predict(spread).images_per_second / self.published - 1

    def explaining_spread(self) -> float:
        """Return the spread that would make the error nothing."""
        lost = self.error(0.0) * self.predict(0.0).step_seconds
        return lost / self.device(0.0).step_seconds / expected_maximum(self.devices)


def cases(table: Table) -> Iterator[Case]:
    """Make a case of each row of a table but the first, which is given."""
    _, *others = table.rates
    yield from (Case(table, devices) for devices in others)


def row_of(case: Case, spread: float) -> dict[str, Any]:
    """Return a row of the results."""
    table, predicted, device = case.table, case.predict(spread), case.device(spread)
    (devices, rate), batch = case.base, case.table.batches.get(case.devices, case.table.batch)
    base = {"rate_of_one": round(rate, 4)} if devices == 1 else {f"rate_of_{devices}": round(rate, 4)}
    return {
        "source": table.source,
        "net": table.net,
        "given": {
            **base,
            "batch": table.batch,
            **({"batch_of_row": batch} if batch != table.batch else {}),
            "step_ms": round(1000 * device.step_seconds, 2),
            "gradient_mb": round(sum(each.bytes for each in device.gradients) / 1e6, 1),
            "link": table.link if table.per_machine is None else f"{table.link}, {table.local} within machines",
            "exchanged": "tensor by tensor" if table.bucket == EACH else f"buckets of {table.bucket >> 20} MiB",
            "spread": round(spread, 4),
        },
        "devices": case.devices,
        "predicted": round(predicted.images_per_second, 2),
        "published": round(case.published, 2),
        "error": round(case.error(spread), 4),
        "error_without_spread": round(case.error(0.0), 4),
        "linear_error": round(case.linear / case.published - 1, 4),
        "limit": predicted.limit,
        **({"remark": table.remark} if table.remark else {}),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median and largest absolute errors, and those of the rows in which scaling costs a tenth or more."""
    hard = [row for row in rows if row["linear_error"] >= 0.1]

    def middle(some: Sequence[dict[str, Any]], name: str) -> float | None:
        return round(median(abs(row[name]) for row in some), 4) if some else None

    return {
        "rows": len(rows),
        "median_error": middle(rows, "error"),
        "median_error_without_spread": middle(rows, "error_without_spread"),
        "median_linear_error": middle(rows, "linear_error"),
        "largest_error": max(abs(row["error"]) for row in rows),
        "within_5_percent": sum(abs(row["error"]) <= 0.05 for row in rows),
        "rows_that_lose_a_tenth": len(hard),
        "median_error_of_those": middle(hard, "error"),
        "median_linear_error_of_those": middle(hard, "linear_error"),
    }


def main() -> None:
    """Predict, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__)
    args = parser.parse_args()
    groups = {"practice": practice(), "nvidia": nvidia(), "tensorflow": tensorflow(), "dlperf": dlperf()}
    groups["mlperf"] = mlperf()
    every_case = {name: [case for table in tables for case in cases(table)] for name, tables in groups.items()}
    spreads = {
        name: median(
            case.explaining_spread()
            for other, some in every_case.items()
            if other not in (name, "practice", "mlperf")
            for case in some
        )
        for name in groups
    }
    rows = {name: [row_of(case, spreads[name]) for case in some] for name, some in every_case.items()}
    for name, some in rows.items():
        for row in some:
            link, batch = row["given"]["link"][:7], row["given"]["batch"]
            shown = f"{row['predicted']:>9.1f} {row['published']:>9.1f}"
            errors = " ".join(f"{row[name]:>+7.1%}" for name in ("error", "error_without_spread", "linear_error"))
            line = f"{name:10} {row['net']:22} {batch:>4} {link:7} {row['devices']:>4} {shown} {errors}"
            machine.say(line)
    machine.say("mlperf: predicted from the smallest published system, not from one device")
    every = [row for name, some in rows.items() if name != "mlperf" for row in some]
    summaries = {name: summary(some) for name, some in {**rows, "all": every}.items()}
    machine.record(
        "scale_published",
        {
            "links": {
                name: vars(LINKS[name]) for name in ("1GbE", "10GbE", "edr", "pcie3", "nvlink1", "nvlink2", "nvlink3")
            },
            "spreads": {name: round(spread, 4) for name, spread in spreads.items()},
            "summary": summaries,
            "rows": rows,
            "left_out": LEFT_OUT,
        },
        save=args.save,
    )


if __name__ == "__main__":
    main()
