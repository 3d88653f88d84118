"""Exported files of several networks, used in a process that has no steadytrain: the same five likeliest classes?

Each network is exported to each format; then another Python, without steadytrain, opens every file, and is given 200
real images: as steadytrain prepared them (``same_top5``: the share of images with the same five likeliest classes as
the checkpoint, in any order; ``same_order``: in the same order), and as photographs that it prepares itself with
Pillow, by what the file says (``pillow_top1``: the same likeliest class; ``pillow_top5``). ``images_per_cpu_second``:
images per second of processor time at batch 32 and 1, on one thread, which other work on the machine disturbs little.

Networks: MobileNetV2 and SqueezeNet with ImageNet weights, on 200 photographs of ImageNet; the built-in ResNet-20 with
CIFAR-10 weights, on 200 of its test images; ResNet-18, ResNet-50 and MobileNetV3 of timm with weights that are drawn,
their batch norms set on the photographs: their arithmetic is that of trained ones, their classes mean nothing.

``variants``: MobileNetV2 and ResNet-18 in int8, fp16 and bf16: the table that ``steady export --int8`` prints.

usage: python benchmarks/export.py --data FOLDER [--python PATH] [--only NAME ...] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from steadytrain.export.export import export_model, open_samples
from steadytrain.models import read_weights
from steadytrain.models.class_names import imagenet_synsets, names_of_synsets
from steadytrain.models.engines.engine import require_library
from steadytrain.training import Trained, restore
from steadytrain.training.checkpoints import stage, write_weights
from steadytrain.training.inference.inference import Files, image_files

HERE = Path(__file__).resolve().parent
NETWORKS = ("resnet20", "mobilenetv2_100", "resnet18", "mobilenetv3_large_100", "resnet50", "squeezenet1_1")
COMPILED = ("resnet20", "resnet18")  # by AOTInductor, which takes minutes for large ones
DRAWN = ("resnet18", "resnet50", "mobilenetv3_large_100")
FORMATS = {"onnx": "model.onnx", "xml": "model.xml", "pt2": "model.pt2", "aot": "compiled.pt2", "timm": "folder"}
VARIANTS = {
    "mobilenetv2_100": (("model.onnx", "int8"), ("model.xml", "int8"), ("model.xml", "bf16"), ("model.pt2", "bf16")),
    "resnet18": (("model.onnx", "int8"), ("model.onnx", "fp16"), ("model.xml", "int8"), ("model.xml", "bf16")),
}
IMAGES = 200


def photographs(data: Path, folder: Path) -> Path:
    """Unpack the 200 photographs of ImageNet, each into the folder of its synset."""
    with tarfile.open(data / "imagenet-sample-200.tar") as tar:
        for member in tar:
            if member.isfile():
                place = folder / "photos" / member.name.partition("_")[0]
                place.mkdir(parents=True)
                content = tar.extractfile(member)
                assert content is not None
                (place / Path(member.name).name).write_bytes(content.read())
    return folder / "photos"


def small_images(data: Path, folder: Path) -> Path:
    """Unpack 200 test images of CIFAR-10, 20 of each class."""
    counts: dict[str, int] = {}
    with machine.opened(data / "cifar10-png.tar.zst") as tar:
        for member in tar:
            place = Path(member.name).parent
            if "test" in place.parts and member.isfile() and counts.get(place.name, 0) < 20:
                counts[place.name] = counts.get(place.name, 0) + 1
                tar.extract(member, folder / "cifar", filter="data")
    return next(path for path in (folder / "cifar").rglob("test"))


@torch.no_grad()
def drawn(name: str, photos: Path, folder: Path) -> Trained:
    """Build a network of timm with random weights, whose batch norms have seen the photographs."""
    import timm

    torch.manual_seed(0)
    network = timm.create_model(name, pretrained=False)
    torch.save(network.state_dict(), folder / f"{name}.pth")
    trained = restore(folder / f"{name}.pth", model=f"timm/{name}", device="cpu")
    for part in trained.module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None  # a mean over all batches
            part.reset_running_stats()
    trained.module.train()
    with open_samples(trained, photos, IMAGES, say=quiet) as samples:
        for batch in samples.read():
            trained.module(trained.policy.images(torch.from_numpy(batch.images), trained.input.mean, trained.input.std))
    torch.save(trained.module.eval().state_dict(), folder / f"{name}.pth")
    return restore(folder / f"{name}.pth", model=f"timm/{name}", device="cpu")


def network(name: str, data: Path, photos: Path, folder: Path) -> Trained:
    """Build one of the networks, with its weights."""
    weights = data / "weights"
    if name in DRAWN:
        return drawn(name, photos, folder)
    if name == "mobilenetv2_100":  # converted from TensorFlow: its padding, and its scale of values
        half = [0.5, 0.5, 0.5]
        about = {
            "model": {"name": f"timm/{name}", "options": {"pad_type": "same"}},
            "classes": names_of_synsets(imagenet_synsets(1000)),
            "synsets": imagenet_synsets(1000),
            "input": {"size": 224, "mean": half, "std": half, "crop": 0.875, "interpolation": "bicubic", "channels": 3},
            "licence": "apache-2.0",
        }
        tensors = read_weights(next((weights / name).glob("*.safetensors"))).tensors
        write_weights(folder / f"{name}.safetensors", stage(tensors), about)
        return restore(folder / f"{name}.safetensors", device="cpu")
    if name == "squeezenet1_1":
        file = next(path for path in (weights / "squeezenet1.1").iterdir() if path.suffix in (".pth", ".safetensors"))
        return restore(file, model="torchvision.models:squeezenet1_1", device="cpu")
    file = next((weights / "cifar-resnet").glob("*.th"))
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return restore(file, model="resnet20", device="cpu", classes=names)


def quiet(line: str) -> None:
    """Say nothing."""


def measure(name: str, args: argparse.Namespace, photos: Path, cifar: Path, folder: Path) -> dict[str, Any]:
    """Export a network to each format, and use the files elsewhere."""
    trained, source = network(name, args.data, photos, folder), cifar if name == "resnet20" else photos
    files = image_files([source])
    with Files([source]) as opened, trained.feed(opened, batch_size=32, threads=None) as feed:
        raw = torch.from_numpy(np.concatenate([batch.images.copy() for batch in feed]))
    images = trained.policy.images(raw, trained.input.mean, trained.input.std).contiguous()
    np.save(folder / "images.npy", images.numpy())
    with torch.no_grad():
        logits = torch.cat([trained.module(part).float() for part in images.split(32)])  # type: ignore[no-untyped-call]
    expected = logits.topk(5).indices.tolist()
    jobs, document = [], dict[str, Any]()
    for kind, file in FORMATS.items():
        if (kind == "timm" and not trained.name.startswith("timm/")) or (kind == "aot" and name not in COMPILED):
            continue
        result = export_model(trained, folder / name / file, data=source, aot=kind == "aot", say=quiet)
        document[kind] = {key: value for key, value in asdict(result.rows[-1]).items() if value is not None}
        job = {"kind": kind, "path": str(folder / name / file), "images": str(folder / "images.npy"), "seconds": 1}
        jobs.append(job | {"photos": list(map(str, files))})
        if kind == "timm":
            jobs.append({**job, "kind": "transformers", "seconds": 0})
            document["transformers"] = {}
    for job, answer in zip(jobs, use(args.python, jobs, folder), strict=True):
        document[str(job["kind"])] |= compare(expected, answer)
    return {"images": len(expected), "top1_on_them": score(trained, files, logits), "formats": document}


def use(python: str, jobs: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Run each file by a Python without steadytrain; return its outputs."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [python, "-I", "-W", "ignore", str(HERE / "peers" / "exported_reader.py"), str(folder / "jobs.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=environment)
    return map(json.loads, done.stdout.splitlines())


def compare(expected: list[list[int]], answer: dict[str, Any]) -> dict[str, Any]:
    """Return shares of images with the same likeliest classes."""

    def share(values: list[bool]) -> float:
        return sum(values) / len(values)

    pairs = list(zip(expected, answer["top5"], strict=True))
    figures: dict[str, Any] = {
        "same_top5": share([set(a) == set(b) for a, b in pairs]),
        "same_order": share([a == b for a, b in pairs]),
    }
    if "pillow_top5" in answer:
        pairs = list(zip(expected, answer["pillow_top5"], strict=True))
        figures["pillow_top1"] = share([a[0] == b[0] for a, b in pairs])
        figures["pillow_top5"] = share([set(a) == set(b) for a, b in pairs])
    if "batch32" in answer:
        figures["images_per_cpu_second"] = {"batch 32": answer["batch32"], "batch 1": answer["batch1"]}
    return figures


def score(trained: Trained, files: list[Path], logits: torch.Tensor) -> float | None:
    """Return top-1 on images in folders of their classes; None for random weights."""
    if any(name in trained.name for name in DRAWN):
        return None
    names = list(trained.synsets or trained.classes)
    labels = torch.tensor([names.index(path.parent.name) for path in files])
    return float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    parser = machine.parser(__doc__, data="archives of images and weights/", choose=("--only", NETWORKS))
    parser.add_argument("--python", default=sys.executable, help="Python of an environment without steadytrain")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        photos, cifar = photographs(args.data, folder), small_images(args.data, folder)
        figures, variants = dict[str, Any](), dict[str, Any]()
        for name in args.only:
            (folder / name).mkdir()
            figures[name] = measure(name, args, photos, cifar, folder)
            machine.say(name, json.dumps(figures[name]))
            for file, numbers in VARIANTS.get(name, ()):
                trained = network(name, args.data, photos, folder)
                place = folder / name / f"{numbers}-{file}"
                result = export_model(trained, place, numbers=numbers, data=photos, say=quiet)  # type: ignore[arg-type]
                rows = [{key: value for key, value in asdict(row).items() if value is not None} for row in result.rows]
                variant = {"kept": result.is_kept, "why_not": result.reason, "rows": rows}
                variants[f"{name} {file} {numbers}"] = variant
                machine.say(name, file, numbers, json.dumps(variant))
    versions = {name: require_library(name).__version__ for name in ("onnx", "onnxscript", "onnxruntime", "openvino")}
    document = {"networks": figures, "variants": variants, "engines": versions}
    machine.record(machine.of_cases("export", args.only, NETWORKS), document, save=args.save)


if __name__ == "__main__":
    main()
