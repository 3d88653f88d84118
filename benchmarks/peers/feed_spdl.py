"""SPDL's pipeline of threads as a contender; see ``feed_turns``. A task is a batch: least overhead for each image.

``decoder`` is ``torchvision`` (``torchvision.io``, then its transforms), or ``ffmpeg``: SPDL's own way, in which FFmpeg
decodes, cuts and resizes. The FFmpeg libraries are those in PyAV's wheel.
"""

import os
import random
import re
import sys
from functools import partial
from pathlib import Path

import av
import numpy as np
import spdl.io
import torch
from feed_crops import centre, random_box, shorter_side
from feed_pillow import in_batches, samples
from feed_torch import decode, transform
from feed_turns import serve
from spdl.pipeline import PipelineBuilder
from torchvision.io import read_file


def batches(job):
    torch.set_num_threads(1)
    threads = job["setting"]["threads"]
    how = {"torchvision": partial(by_torchvision, work=transform(job, tensors=True)), "ffmpeg": by_ffmpeg}
    source = in_batches(samples(job["files"]), job)
    work = partial(how[job["setting"]["decoder"]], job=job)
    pipeline = PipelineBuilder().add_source(source).pipe(work, concurrency=threads).add_sink(job["ahead"])
    built = pipeline.build(num_threads=threads)
    with built.auto_stop():
        yield from built


def by_torchvision(some, job, work):
    images = torch.empty((len(some), 3, job["size"], job["size"]), dtype=torch.uint8)
    for row, (path, _) in enumerate(some):
        images[row] = work(decode(read_file(path)))
    return images, np.array([label for _, label in some])


def by_ffmpeg(some, job):
    frames = []
    for path, _ in some:
        packets = spdl.io.demux_image(path)
        steps = cut(packets.codec.width, packets.codec.height, job)
        frames.append(spdl.io.decode_packets(packets, filter_desc=steps + ",format=rgb24"))
    return spdl.io.to_numpy(spdl.io.convert_frames(frames)), np.array([label for _, label in some])


def cut(width, height, job):
    """Return FFmpeg's filters for one image."""
    size = job["size"]
    if not job["train"]:
        w, h = shorter_side(width, height, job["resize"])
        left, top = centre(w, h, size)
        return f"scale={w}:{h}:flags=bilinear,crop={size}:{size}:{left}:{top}:exact=1"
    flip = ",hflip" if random.random() < 0.5 else ""
    if job["kind"] == "pad":
        pad = job["pad"]
        left, top = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
        return f"pad={width + 2 * pad}:{height + 2 * pad}:{pad}:{pad},crop={size}:{size}:{left}:{top}:exact=1{flip}"
    left, top, right, bottom = random_box(width, height)
    return f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={size}:{size}:flags=bilinear{flip}"


def with_ffmpeg():
    """Start again with PyAV's libraries where the loader looks, under the names that it looks for."""
    if "FEED_FFMPEG" in os.environ:
        return
    libraries = Path(av.__file__).parents[1] / "av.libs"
    links = Path(sys.prefix) / "ffmpeg"
    links.mkdir(exist_ok=True)
    for library in libraries.iterdir():
        link = links / re.sub(r"-[0-9a-f]{8}\.so\.(\d+).*", r".so.\1", library.name)
        if not link.exists():
            link.symlink_to(library)
    paths = {"LD_LIBRARY_PATH": f"{links}:{libraries}", "FEED_FFMPEG": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **paths})


if __name__ == "__main__":
    with_ffmpeg()
    serve(batches)
