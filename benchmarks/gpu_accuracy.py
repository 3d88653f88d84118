"""Steps of ``gpu_session.py`` that show what one GPU reaches in minutes: accuracy beside a peer, and speed.

All together are planned for fifteen minutes (``--seconds 900``), the short ones first; where less is left, there are
fewer runs and fewer minutes of fine-tuning. They have not run on a GPU yet. Peers are imported, where they can be:
``airbench`` (0.1.8, pure Python) and ``ffcv`` (1.0.2, see ``peers/environments.py``) from the session's ``PYTHONPATH``.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from gpu_steps import PROJECT, STEADY, Job, Step, child, events_of, fed, ours, packed, photo_loader, rate

RECIPE = PROJECT / "recipes" / "cifar10-94.toml"
RUNS = 10
"""Of each contender that count; one more comes first and does not."""
MINUTES = 5.0
"""Of each fine-tuning, where so much is left."""


# --- CIFAR-10 beside airbench94 -------------------------------------------------------------------------------------


def cifar94(job: Job) -> dict[str, Any]:
    """``recipes/cifar10-94.toml`` and airbench94 in turns: top-1 over averaged views, seconds with that evaluation.

    Neither evaluates before its last update. Imports and the first run of each do not count: ours reads its records in
    every run, airbench keeps the images on the GPU from run to run.
    """
    data = job.cifar or (drawn_cifar(job) if job.quick else None)
    if data is None:
        return {"passes": False, "error": "left out: --cifar FOLDER names no records"}
    contenders, rows = {"steadytrain": our_cifar(job, data)}, dict[str, Any]()
    if job.device != "cuda" or find_spec("airbench") is None:
        rows["airbench94"] = {"left_out": "it needs a GPU" if job.device != "cuda" else "airbench is not installed"}
    else:
        contenders["airbench94"] = airbench94(job, data)
    figures: dict[str, Any] = {"rows": rows, "is_drawn": job.cifar is None}
    longest = 0.0
    for number in range(-1, 2 if job.quick else RUNS):
        if job.left < 1.2 * longest:
            break
        began = time.monotonic()
        for name, train in contenders.items():
            result = train(number + 1)
            row = rows.setdefault(name, {"first": result, "runs": []})
            if number >= 0:
                row["runs"].append(result)
                row |= {key: mean(run[key] for run in row["runs"]) for key in ("top1", "seconds")}
            job.note(figures)
        longest = max(longest, time.monotonic() - began)
    mine, theirs = rows["steadytrain"], rows["airbench94"]
    if "seconds" in theirs and "seconds" in mine:
        figures["of_their_seconds"] = mine["seconds"] / theirs["seconds"]
    is_reached = mine.get("top1", 0.0) >= 0.94 and figures.get("of_their_seconds", np.inf) <= 1.3
    return figures | {"passes": job.quick or is_reached}


def our_cifar(job: Job, data: Path) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains the recipe with a seed, as ``steady train`` and ``evaluate --tta flip`` do."""
    import tomllib

    import steadytrain as st
    from steadytrain.config.plain import leaves
    from steadytrain.training.inference.views import with_views

    values, test = tomllib.loads(RECIPE.read_text(encoding="utf-8")), str(data / "cifar10-test.rec")
    changes = {**dict(leaves(values)), "data.val": test, "data.test": None, "parallel.device": job.device}
    changes["every.evaluate_epochs"] = values["budget"]["epochs"]
    if job.quick:
        changes |= {"batch_size": 64, "budget.epochs": 1, "model.options.width": 8, "optim.warmup_epochs": 0}
    recipe = st.default_recipe(data / "cifar10-train.rec", changes)

    def trained(seed: int) -> dict[str, Any]:
        began = time.monotonic()
        run = st.Run.create(job.folder / f"cifar-{seed}", recipe.with_(seed=seed))
        st.train(run, progress=False)
        seconds = time.monotonic() - began
        weights = st.restore(run, which="last", device=job.device)
        top1 = st.evaluate(with_views(weights, "flip"), test, say=lambda line: None).top1
        figures = {"top1": top1, "seconds": time.monotonic() - began, "training_seconds": seconds}
        figures["ledger"] = events_of(run.directory, "Accounted")["Accounted"]["seconds"]
        shutil.rmtree(run.directory)
        return figures

    return trained


def airbench94(job: Job, data: Path) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains airbench94 on the same images, and evaluates it as its own scripts do."""
    import torch

    airbench: Any = import_module("airbench")
    os.chdir(job.folder)  # it looks for its data in the working directory
    for part in ("train", "test"):
        write_for_airbench(data / f"cifar10-{part}.rec", Path("cifar10") / f"{part}.pt")
    options: dict[str, Any] = {"batch_size": 1024, "aug": {"flip": True, "translate": 2}, "altflip": True}
    images = airbench.CifarLoader("cifar10", train=True, **options)
    test_images = airbench.CifarLoader("cifar10", train=False, batch_size=2000)

    def trained(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        torch.cuda.synchronize()
        began = time.monotonic()
        net = airbench.train94(images, verbose=False)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        top1 = airbench.evaluate(net, test_images, tta_level=2)
        return {"top1": top1, "seconds": time.monotonic() - began, "training_seconds": seconds}

    return trained


def write_for_airbench(records: Path, target: Path) -> None:
    """Decode records of 32 pixels into the file that airbench reads: uint8[N, 32, 32, 3] and int64[N]."""
    import torch
    from PIL import Image

    from steadytrain.data.recordio.reader import Records

    target.parent.mkdir(exist_ok=True)
    with Records.open(records) as opened:
        images = (Image.open(io.BytesIO(opened.image(number))) for number in range(len(opened)))
        pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
        labels = torch.from_numpy(np.asarray(opened.labels).astype(np.int64))
        classes = list(opened.classes or ())
    torch.save({"images": torch.from_numpy(pixels), "labels": labels, "classes": classes}, target)


def drawn_cifar(job: Job) -> Path:
    """Draw a few images of 32 pixels in ten classes, and pack them under CIFAR-10's names; return their folder."""
    from PIL import Image

    from steadytrain.data.packing.pack import pack

    draw, folder = np.random.default_rng(0), job.folder / "drawn"
    for part, count in (("train", 256), ("test", 64)):
        for number in range(count):
            path = folder / "cifar10" / part / f"class{number % 10}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    pack(folder / "cifar10", folder / "cifar10")
    return folder


# --- fine-tuning ----------------------------------------------------------------------------------------------------


def convnext(job: Job) -> dict[str, Any]:
    """ConvNeXt-T by ``steady finetune --budget-minutes`` at 224 pixels."""
    return finetuned(job, *(("convnext_atto", 64) if job.quick else ("convnext_tiny", 224)))


def dinov2(job: Job) -> dict[str, Any]:
    """DINOv2's ViT-B/14 by ``steady finetune --budget-minutes`` at 224 pixels."""
    return finetuned(job, *(("vit_small_patch14_dinov2", 28) if job.quick else ("vit_base_patch14_dinov2", 224)))


def finetuned(job: Job, network: str, size: int) -> dict[str, Any]:
    """Fine-tune on photographs for five minutes, or what is left: from the weights in ``--weights``, else random ones.

    The minutes count the start. Of random weights, images a second and seconds an epoch are what is measured. Without
    folders of classes in the archive of ``--data`` the labels mean nothing.
    """
    minutes = 0.7 if job.quick else min(MINUTES, (job.left - 8) / 60)
    weights = next(iter(sorted(job.weights.glob(f"{network}*.safetensors"))), None) if job.weights else None
    images, run = photo_folder(job), job.folder / "run"
    words = [*STEADY, "finetune", *map(str, images), "--run", str(run), "--model", f"timm/{network}"]
    words += ["--weights", str(weights)] if weights else ["--set", "model.pretrained=false"]
    words += ["--size", str(size), "--budget-minutes", f"{minutes:.2f}", "--device", job.device, "--json"]
    figures: dict[str, Any] = {"weights": weights.name if weights else "random", "minutes": minutes}
    figures |= {"network": network, "has_classes": len(images) > 1}
    job.note(figures)
    done = child(words, job.folder, job.left - 2)
    figures |= {"rc": done.returncode, "passes": done.returncode == 0, "said": done.stderr[-800:]}
    figures["events"] = events_of(run, "Started", "Accounted", "DeviceStats", "Evaluated")
    if done.returncode == 0:
        document = json.loads(done.stdout)["runs"][0]
        keys = ("seconds_per_epoch", "images_per_second", "wait_share", "device_use", "batch_per_device", "seconds")
        figures |= {key: document[key] for key in (*keys, "probe", "tried")}
        figures |= {"top1": document["best"]["top1"]} if document.get("best") else {}
    return figures


def photo_folder(job: Job) -> list[Path | str]:
    """Return the arguments of training and validation images of an archive that has both; else packed photographs."""
    from gpu_steps import photographs

    if job.data:
        list(photographs(job.data, job.folder / "photos"))
        train = next((path for path in sorted((job.folder / "photos").rglob("train")) if path.is_dir()), None)
        found = (
            [train.parent / name for name in ("validation", "val") if (train.parent / name).is_dir()] if train else []
        )
        if train and found:
            return [train, "--val", found[0]]
    return [packed(job)]


# --- what is left of speed ------------------------------------------------------------------------------------------


def compiled_rank(job: Job) -> dict[str, Any]:
    """Compiled updates of a rank that is alone in its group, beside those of a process without one, in turns."""
    from steadytrain.distributed.process_group import init_group
    from steadytrain.distributed.world import World
    from steadytrain.launch.supervise import free_port
    from steadytrain.training.compute.compile import compile_update
    from steadytrain.training.data import random_batch

    model, batch, size = ("mlp", 8, 28) if job.quick else ("torchvision/resnet50", 256, 224)
    seconds, rounds = (0.2, 1) if job.quick else (1.5, 3)
    changes = {"precision.compile": "none" if job.device == "cpu" else "default"}  # a CPU's compiler takes minutes
    rows: dict[str, Any] = {}
    turns: dict[str, Callable[[], float]] = {}
    with ExitStack() as ends, init_group(World(port=free_port())) as group:
        for name, member in (("alone", None), ("group of one", group)):
            began = time.monotonic()
            device, notes, trained = ours(job, model, batch, size, 1000, changes, member)
            ends.callback(trained.state.engine.end_run)
            update, compiled = compile_update(trained.recipe, trained.update, trained.state, member, notes.append)
            images = random_batch(batch, update.image_shape, device, num_classes=1000)
            for _ in range(5):
                update(trained.state, images, 1e-4)
            rows[name] = {"notes": notes, "seconds_to_prepare": time.monotonic() - began, "rounds": []}
            if compiled is not None:
                rows[name] |= {"graphs": compiled.graphs, "breaks": compiled.breaks}
            one_update = partial(update, trained.state, images, 1e-4)
            turns[name] = partial(rate, device, one_update, batch, seconds)
            job.note({"rows": rows})
        for _ in range(rounds):
            for name, turn in turns.items():
                rows[name]["rounds"].append(turn())
                rows[name]["images_per_second"] = median(rows[name]["rounds"])
            job.note({"rows": rows})
        over = rows["group of one"]["images_per_second"] / rows["alone"]["images_per_second"]
        is_compiled = job.device == "cpu" or all("graphs" in row for row in rows.values())
        return {"rows": rows, "over_alone": over, "passes": is_compiled and (job.quick or over >= 0.95)}


def launch_bound(job: Job) -> dict[str, Any]:
    """ResNet-18 on 8 images of 32 pixels, fed by the loader's threads and by its own process, in turns."""
    threads, rows = min(10, os.cpu_count() or 1), dict[str, Any]()
    for _ in range(1 if job.quick else 3):
        for place in ("threads", "process"):
            if job.left < 6:
                break
            loader = photo_loader(job, threads, batch=8, size=32, count=64 if job.quick else 20_000, place=place)
            row = rows.setdefault(place, {"rounds": []})
            row["rounds"].append(fed(job, "resnet18", loader, 8, 32))
            keys = ("images_per_second", "of_alone", "wait_share")
            row |= {key: median(figures[key] for figures in row["rounds"]) for key in keys}
            job.note({"rows": rows, "threads_of_loader": threads})
    is_undisturbed = rows.get("process", {"of_alone": 0.0})["of_alone"] >= 0.9
    return {"rows": rows, "threads_of_loader": threads, "passes": job.quick or is_undisturbed}


def ffcv(job: Job) -> dict[str, Any]:
    """Training crops a second of packed photographs: FFCV, where it is built, and our loader, in turns."""
    if find_spec("ffcv") is None:
        why = f": {absent}" if (absent := absent_libraries()) else ""
        return {"passes": True, "left_out": f"FFCV is not built here{why}"}
    from peers import feed_works
    from peers.feed_contenders import Contender
    from peers.feed_peers import OURS, PEERS

    records = packed(job)
    work = feed_works.Work("packed", feed_works.files_of(records, job.folder / "files"), records, [], None)
    cpus = sorted(os.sched_getaffinity(0))[:8]
    rows: dict[str, Any] = {}
    with ExitStack() as stack:
        entered = {
            name: stack.enter_context(
                Contender(peer, Path(sys.executable), work, "train", peer.settings(len(cpus))[0], cpus)
            )
            for name, peer in (("steadytrain", OURS), ("ffcv", PEERS["ffcv"]))
        }
        for _ in range(1 if job.quick else 3):
            for name, contender in entered.items():
                contender.turn(0.5 if job.quick else 1.5)
                rows[name] = contender.figures()
            job.note({"rows": rows})
    over = rows["steadytrain"]["images_per_second"] / rows["ffcv"]["images_per_second"]
    return {"rows": rows, "cores": len(cpus), "over_ffcv": over, "passes": True}


def absent_libraries() -> str:
    """Say which of the libraries that FFCV is compiled against cannot be found; empty where all are there."""
    if shutil.which("pkg-config") is None:
        return "there is no pkg-config"
    names = ("opencv4", "libturbojpeg")
    absent = [name for name in names if subprocess.run(["pkg-config", "--exists", name], check=False).returncode]
    return f"pkg-config finds no {' and no '.join(absent)}" if absent else ""


STEPS: dict[str, tuple[Step, float]] = {
    "ffcv": (ffcv, 30),
    "launch-bound": (launch_bound, 30),
    "compiled-rank": (compiled_rank, 115),
    "cifar94": (cifar94, 105),
    "convnext": (convnext, 310),
    "dinov2": (dinov2, 310),
}
"""Name -> the step, and the seconds that it has: 900 together."""
