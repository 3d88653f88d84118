"""MXNet's checkpoints here and there: the same answers, in both directions.

Real checkpoints (SqueezeNet 1.1 on 200 photographs of ImageNet, three CIFAR-10 ResNets on images of its test set)
score in MXNet 1.9.1, as converted graphs, as ``.safetensors`` files that ``steady convert`` wrote, and in MXNet
again from what ``steady convert`` made of these. Networks of torchvision, timm and steadytrain with drawn weights
go to MXNet alone. For each: top-1 and top-5, on how many images the five best classes are the same ones, and the
largest difference.

``--finetune``: clothing-10 from MXNet's SqueezeNet, as MXNet's ``fine-tune.py`` does it (``Module.fit`` on record
files, SGD of 0.01 without momentum or decay, random crops and flips; and with momentum 0.9) and by ``steady
finetune``, by turns: top-1 on its test images, images per second of training, CPU seconds of the whole command.

usage: python benchmarks/convert.py --work FOLDER [--data FOLDER] [--mxnet-python PYTHON]
           [--finetune] [--save]
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import machine
from machine import STEADY, cpu_seconds
from steadytrain import models
from steadytrain.config import Model
from steadytrain.interop.mxnet.checkpoint import open_checkpoint
from steadytrain.interop.mxnet.convert import convert_from_mxnet, convert_to_mxnet
from steadytrain.models.class_names import imagenet_synsets, names_of_synsets
from steadytrain.training import restore

PEERS = Path(__file__).resolve().parent / "peers"
REAL = {
    "squeezenet1.1": "squeezenet1.1/squeezenet1.1",
    **{f"cifar_{name}": f"cifar-resnet/cifar_{name}" for name in ("resnet20_v1", "resnet20_v2", "resnet56_v2")},
}
DRAWN = {
    "torchvision/resnet18": 224,
    "torchvision/squeezenet1_1": 224,
    "torchvision/mobilenet_v2": 224,
    "torchvision/vgg11_bn": 224,
    "timm/resnet50": 224,
    "timm/densenet121": 224,
    "resnet20": 32,
    "inception-bn-28-small": 32,
    "quick8": 32,
    "lenet": 32,
}
CIFAR_IMAGES = 1000
SHOWN = 3
Array = NDArray[Any]


def photographs(data: Path) -> tuple[list[str], Array, Array]:
    """Return names, images uint8[200, 224, 224, 3] and labels of the ImageNet sample: shorter side 256, its centre."""
    names, images = [], []
    with tarfile.open(data / "imagenet-sample-200.tar") as archive:
        for member in sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name):
            file = archive.extractfile(member)
            assert file is not None
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
            scale = 256 / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
            left, top = (image.width - 224) // 2, (image.height - 224) // 2
            images.append(np.asarray(image.crop((left, top, left + 224, top + 224))))
            names.append(Path(member.name).name)
    return names, np.stack(images), np.arange(len(names)) * 5  # every fifth class


def cifar(data: Path) -> tuple[list[str], Array, Array]:
    """Return some images of CIFAR-10's test set, equally many of each class."""
    by_kind: dict[str, list[tuple[str, Array]]] = {}
    with machine.opened(data / "cifar10-png.tar.zst") as archive:
        for member in archive:
            parts = member.name.split("/")
            if member.isfile() and parts[0] == "test" and len(by_kind.setdefault(parts[1], [])) < CIFAR_IMAGES // 10:
                file = archive.extractfile(member)
                assert file is not None
                by_kind[parts[1]].append((member.name, np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))))
    rows = [(name, image, label) for label, kind in enumerate(sorted(by_kind)) for name, image in by_kind[kind]]
    return [row[0] for row in rows], np.stack([row[1] for row in rows]), np.array([row[2] for row in rows])


def scaled(images: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    """Convert images to float32 NCHW, as the networks take them."""
    values = (images.astype(np.float32) / np.float32(255) - np.array(mean, np.float32)) / np.array(std, np.float32)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2).astype(np.float32))


def logits_of(module: nn.Module, images: Array) -> Array:
    """Compute the outputs of a module, in batches of 50."""
    with torch.no_grad():
        parts = [module(torch.from_numpy(images[k : k + 50])).numpy() for k in range(0, len(images), 50)]
    return np.concatenate(parts)


def softmax(logits: Array) -> Array:
    values = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    shares: Array = values / values.sum(1, keepdims=True)
    return shares


class MXNet:
    """Asks MXNet 1.9.1 what it computes."""

    def __init__(self, python: str, work: Path) -> None:
        self.python, self.work, self.count = python, work, 0

    def run(self, script: str, *words: str) -> str:
        """Run a script of MXNet on both cores; return its standard output."""
        variables = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE", "OMP_NUM_THREADS": str(os.cpu_count())}
        done = subprocess.run([self.python, str(PEERS / script), *words], env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        return done.stdout

    def forward(self, symbol: Path, params: Path, images: Array) -> Array:
        """Return MXNet's first output for images."""
        self.count += 1
        files = {"images": self.work / f"{self.count}-images.npy", "out": self.work / f"{self.count}-out.npy"}
        np.save(files["images"], images)
        request: dict[str, Any] = {"do": "forward", "symbol": str(symbol), "params": str(params), "batch": 50}
        request["batch"] = min(50, len(images))
        (self.work / "requests.json").write_text(json.dumps([request | {k: str(p) for k, p in files.items()}]))
        self.run("mxnet_forward.py", str(self.work / "requests.json"))
        outputs: Array = np.load(files["out"])
        files["images"].unlink()
        return outputs


def agreement(theirs: Array, ours: Array, labels: Array) -> dict[str, Any]:
    """Compare outputs: accuracies of both, and how near they are."""

    def best(values: Array) -> Array:
        return np.argsort(-values, axis=1, kind="stable")[:, :5]

    first, second = best(theirs), best(ours)
    return {
        "top1": [float((each[:, 0] == labels).mean()) for each in (first, second)],
        "top5": [float((each == labels[:, None]).any(1).mean()) for each in (first, second)],
        "same_top1": float((first[:, 0] == second[:, 0]).mean()),
        "same_top5_in_order": float((first == second).all(1).mean()),
        "largest_difference": float(np.abs(theirs - ours).max()),
        "largest_logit": float(np.abs(theirs).max()),
    }


def compare_real(name: str, data: Path, work: Path, peer: MXNet) -> dict[str, Any]:
    """Compare a real checkpoint with MXNet, in both directions."""
    source = data / "weights" / f"{REAL[name]}-0000.params"
    checkpoint = open_checkpoint(str(source))
    names, images, labels = photographs(data) if checkpoint.size == 224 else cifar(data)
    mean, std, _ = checkpoint.scaling
    x = scaled(images, mean, std)
    theirs = peer.forward(checkpoint.symbol_path, source, x)
    network = checkpoint.network()
    network.module.load_state_dict(network.state(checkpoint.params), strict=False)
    file = work / f"{name}.safetensors"
    converted = convert_from_mxnet(str(source), file)
    trained = restore(file, device="cpu", precision="fp32")
    back = work / f"{name}-back-0000.params"
    convert_to_mxnet(trained, back, images[:64])
    again = peer.forward(work / f"{name}-back-symbol.json", back, x)
    as_file = logits_of(trained.module, x)
    is_softmax = bool(np.allclose(again.sum(1), 1, atol=1e-3)) and not np.allclose(theirs.sum(1), 1, atol=1e-3)
    classes = names_of_synsets(imagenet_synsets(1000)) if checkpoint.size == 224 else trained.classes
    shown = []
    for k in range(0, len(names), len(names) // SHOWN)[:SHOWN]:
        row: dict[str, Any] = {"image": names[k]}
        for who, values in (("mxnet", theirs), ("steadytrain", as_file)):
            shares = softmax(values[k : k + 1])[0]
            order = np.argsort(-shares, kind="stable")[:5]
            row[who] = [[classes[c] if len(classes) > c else int(c), round(float(shares[c]), 4)] for c in order]
        shown.append(row)
    return {
        "images": len(names),
        "converted_to": converted.model,
        "graph": agreement(theirs, logits_of(network.module.eval(), x), labels),
        "file": agreement(theirs, as_file, labels),
        "back_in_mxnet": {
            "compares": "probabilities" if is_softmax else "logits",
            **agreement(softmax(theirs) if is_softmax else theirs, again, labels),
        },
        "shown": shown,
    }


def compare_drawn(name: str, size: int, work: Path, peer: MXNet) -> dict[str, Any]:
    """Compare a network with random weights and statistics with itself in MXNet."""
    from steadytrain.interop.mxnet.params import write_params
    from steadytrain.interop.mxnet.symbol import write_symbol
    from steadytrain.interop.mxnet.trace import export_symbol

    torch.manual_seed(0)
    module = models.build(Model(name), num_classes=100, channels=3, size=size).module.train()
    with torch.no_grad():
        for _ in range(2):
            module(torch.randn(8, 3, size, size))
    exported = export_symbol(module.eval(), name=name, channels=3, size=size)
    key = name.replace("/", "-")
    symbol, params = work / f"{key}-symbol.json", work / f"{key}-0000.params"
    write_symbol(symbol, exported.symbol)
    write_params(params, exported.params)
    x = torch.randn(16, 3, size, size).numpy()
    ours, theirs = softmax(logits_of(module, x)), peer.forward(symbol, params, x)
    return {
        "nodes": len(exported.symbol.nodes),
        "same_top1": float((ours.argmax(1) == theirs.argmax(1)).mean()),
        "largest_difference_of_probabilities": float(np.abs(ours - theirs).max()),
    }


def finetune(data: Path, work: Path, peer: MXNet, epochs: int, seeds: int) -> dict[str, Any]:
    """Fine-tune clothing-10 from MXNet's SqueezeNet: by MXNet and by ``steady finetune``, by turns."""
    folder = work / "clothing"
    if not folder.exists():
        with tarfile.open(data / "clothing-10.tar") as tar:
            tar.extractall(folder, filter="data")
    (images,) = {path.parent for path in folder.rglob("train") if path.is_dir()}
    prefix = data / "weights" / REAL["squeezenet1.1"]
    for part in ("train", "validation", "test"):
        if not (work / f"{part}.rec").exists():
            words = ["pack", str(images / part), str(work / part), "--shorter-side", "256", "--encoding", "jpg"]
            subprocess.run([*STEADY, *words], check=True, capture_output=True)
    document: dict[str, Any] = {"epochs": epochs, "size": 224, "batch": 16, "results": []}
    for seed in range(seeds):
        for name, momentum in (("mxnet fine-tune.py", "0"), ("mxnet with momentum 0.9", "0.9")):
            asked = (str(prefix), str(work / "train.rec"), str(work / "test.rec"), str(epochs), momentum, str(seed))
            before = cpu_seconds()
            times = json.loads(peer.run("mxnet_finetune.py", *asked).splitlines()[-1])
            times["cpu_seconds"] = round(cpu_seconds() - before, 1)
            document["results"].append({"contender": name, "seed": seed, **times})
        run = work / f"run-{seed}"
        shutil.rmtree(run, ignore_errors=True)
        words = ["finetune", str(work / "train.rec"), "--val", str(work / "validation.rec"), "--size", "224"]
        words += ["--model", f"mxnet:{prefix}", "--epochs", str(epochs), "--seed", str(seed), "--run", str(run)]
        before = cpu_seconds()
        subprocess.run([*STEADY, *words], check=True, capture_output=True)
        command = [*STEADY, "evaluate", str(run), str(work / "test.rec"), "--json"]
        times = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        spent = round(cpu_seconds() - before, 1)
        shown = subprocess.run([*STEADY, "report", str(run), "--json"], check=True, capture_output=True, text=True)
        rate = json.loads(shown.stdout)["runs"][0]["images_per_second"]
        row = {"contender": "steady finetune", "seed": seed, "top1": times["top1"], "images_per_second": rate}
        row["cpu_seconds"] = spent
        document["results"].append(row)
        machine.say(document["results"][-3:])
    return document


def main() -> None:
    """Compare, print, and save where the command line asks for it."""
    parser = machine.parser(
        __doc__,
        data="imagenet-sample-200.tar, cifar10-png.tar.zst, clothing-10.tar and weights/",
        work="checkpoints and runs",
        mxnet=True,
    )
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    if args.mxnet_python is None:
        parser.error("give --mxnet-python, a Python 3.8 with mxnet==1.9.1")
    peer = MXNet(args.mxnet_python, args.work.resolve())
    if args.finetune:
        rows = finetune(args.data, args.work.resolve(), peer, args.epochs, args.seeds)
        machine.record("convert_finetune", rows, save=args.save)
    else:
        real = {name: compare_real(name, args.data, args.work, peer) for name in REAL}
        drawn = {name: compare_drawn(name, size, args.work, peer) for name, size in DRAWN.items()}
        machine.record("convert", {"real": real, "drawn": drawn}, save=args.save)


if __name__ == "__main__":
    main()
