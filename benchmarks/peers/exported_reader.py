"""Use exported files without steadytrain: ``exported_reader.py JOB.json``, in an environment that has not got it.

Reads a JSON list of jobs: ``path`` of an exported file or folder, ``images`` (.npy, normalised, [N, C, H, W]),
``photos`` (paths of the same images, or none), ``seconds`` to measure speed for. Prints a JSON line for each: the five
likeliest classes by the images of the .npy, those by the photographs prepared with Pillow as the file says it, and
images per second of processor time at batch 32 and 1, on one thread (so that other work on the machine counts little).
"""

from __future__ import annotations

import json
import math
import sys
import time
import zipfile
from pathlib import Path

import numpy as np

try:
    import steadytrain  # noqa: F401

    sys.exit("steadytrain can be imported here: run this in an environment without it")
except ImportError:
    pass


def open_onnx(path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    about = session.get_modelmeta().custom_metadata_map["steadytrain"]
    return (lambda images: session.run(None, {"images": images})[0]), json.loads(about)


def open_openvino(path):
    import openvino

    network = openvino.Core().read_model(path)
    about = json.loads(network.get_rt_info(["steadytrain"]).astype(str))
    hint = {"bf16": "bf16", "fp16": "f16"}.get(about["numbers"], "f32")
    options = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.compile_model(network, "CPU", options)
    return (lambda images: compiled(images)[0]), about


def open_torch(path):
    import torch

    with zipfile.ZipFile(path) as archive:
        name = next(each for each in archive.namelist() if each.endswith("/extra/steadytrain"))
        about = json.loads(archive.read(name))
        is_compiled = any("/aotinductor/" in each for each in archive.namelist())
    if is_compiled:
        network = torch._inductor.aoti_load_package(path)
    else:
        network = torch.export.load(path).module()

    def run(images):
        with torch.no_grad():
            return network(torch.from_numpy(images)).numpy()

    return run, about


def open_timm(path):
    import timm
    import torch

    network = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    config = timm.data.resolve_data_config(network.pretrained_cfg)
    about = {"input": {"size": config["input_size"][1], "channels": config["input_size"][0], "mean": config["mean"]}}
    about["input"] |= {"std": config["std"], "crop": config["crop_pct"], "interpolation": config["interpolation"]}

    def run(images):
        with torch.no_grad():
            return network(torch.from_numpy(images)).numpy()

    return run, about


def open_transformers(path):
    import torch
    from transformers import AutoModelForImageClassification

    network = AutoModelForImageClassification.from_pretrained(path).eval()

    def run(images):
        with torch.no_grad():
            return network(torch.from_numpy(images)).logits.numpy()

    return run, {"labels": network.config.id2label}


OPENERS = {"onnx": open_onnx, "xml": open_openvino, "pt2": open_torch, "aot": open_torch, "timm": open_timm}
OPENERS |= {"transformers": open_transformers}


def prepare(photo, input):
    """Prepare an image as a description says, with Pillow: the shorter side resized, the centre taken, normalised."""
    from PIL import Image

    image = Image.open(photo).convert("L" if input["channels"] == 1 else "RGB")
    side = math.floor(input["size"] / input["crop"])
    width, height = image.size
    resized = (side, side * height // width) if width <= height else (side * width // height, side)
    kind = Image.Resampling.BICUBIC if input["interpolation"] == "bicubic" else Image.Resampling.BILINEAR
    image = image.resize(resized, kind)
    left, top = round((resized[0] - input["size"]) / 2), round((resized[1] - input["size"]) / 2)
    image = image.crop((left, top, left + input["size"], top + input["size"]))
    pixels = np.asarray(image, np.float32).reshape(input["size"], input["size"], -1) / 255
    return ((pixels - np.float32(input["mean"])) / np.float32(input["std"])).transpose(2, 0, 1)


def logits_of(run, images):
    return np.concatenate([run(np.ascontiguousarray(images[k : k + 32])) for k in range(0, len(images), 32)])


def speed(run, images, seconds):
    images = np.ascontiguousarray(images)
    run(images)
    began, passes = time.process_time(), 0
    while time.process_time() - began < seconds:
        run(images)
        passes += 1
    return passes * len(images) / (time.process_time() - began)


def top5(logits):
    return np.argsort(-logits, axis=1, kind="stable")[:, :5].tolist()


def main():
    for job in json.loads(Path(sys.argv[1]).read_text()):
        images = np.load(job["images"])
        run, about = OPENERS[job["kind"]](job["path"])
        values = {"top5": top5(logits_of(run, images))}
        if job.get("photos") and "input" in about:
            values["pillow_top5"] = top5(
                logits_of(run, np.stack([prepare(each, about["input"]) for each in job["photos"]]))
            )
        if job.get("seconds"):
            values |= {
                "batch32": speed(run, images[:32], job["seconds"]),
                "batch1": speed(run, images[:1], job["seconds"]),
            }
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
