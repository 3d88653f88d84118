"""Inference in PyTorch as others' programs do it by default, in turns.

usage: python infer_torch.py {timm,torchvision} BATCH ...

``timm``: as timm's benchmark.py without options infers: ``create_model``, evaluation mode, float32, contiguous, eager,
one drawn batch, ``torch.inference_mode``. ``torchvision``: its model as its reference script evaluates it: evaluation
mode, ``torch.inference_mode``. Prints "ready", and then for each line "BATCH SECONDS" on standard input the seconds of
passes, as one line of JSON.
"""

import json
import sys
import time

import torch


def network(kind):
    if kind == "timm":
        import timm

        return timm.create_model("resnet50").eval()
    import torchvision

    return torchvision.models.resnet50(weights=None).eval()


def main(kind, batches):
    net = network(kind)
    images = {batch: torch.randn(batch, 3, 224, 224) for batch in batches}
    with torch.inference_mode():
        for batch in batches:
            net(images[batch])
            net(images[batch])
        print("ready", flush=True)
        for line in sys.stdin:
            batch, limit = line.split()
            batch, end, passes = int(batch), time.perf_counter() + float(limit), []
            while not passes or time.perf_counter() < end:
                began, cpu_began = time.perf_counter(), time.process_time()
                net(images[batch])
                passes.append((time.perf_counter() - began, time.process_time() - cpu_began))
            counted = passes[1:] or passes  # the first warms the caches up
            times = {"seconds": [wall for wall, _ in counted], "cpu_seconds": [cpu for _, cpu in counted]}
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
