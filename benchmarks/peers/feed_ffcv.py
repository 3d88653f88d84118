"""FFCV as a contender; see ``feed_turns``.

Its file is written before the clock starts, with JPEGs of quality 95, since FFCV encodes images itself. The first batch
waits for numba, which compiles the pipeline.
"""

import json
import sys
from pathlib import Path

import numpy as np
from feed_turns import serve
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
from torchvision.datasets import ImageFolder

EPOCHS = 100  # in one of its own, between which it would stop and start its threads


def written(job):
    """Return the file of the images, which is written once."""
    path = Path(job["files"]).with_suffix(".beton")
    if not path.exists():
        part = path.with_suffix(".part")
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
        DatasetWriter(str(part), fields, num_workers=job["cores"]).from_indexed_dataset(ImageFolder(job["files"]))
        part.rename(path)
    return path


def batches(job):
    square = (job["size"], job["size"])
    crop = RandomResizedCropRGBImageDecoder(square, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    images = [crop, RandomHorizontalFlip()] if job["train"] else []
    images = images or [CenterCropRGBImageDecoder(square, ratio=job["size"] / job["resize"])]
    loader = Loader(
        str(written(job)),
        batch_size=job["batch_size"],
        num_workers=job["setting"]["threads"],
        os_cache=True,
        order=OrderOption.RANDOM if job["train"] else OrderOption.SEQUENTIAL,
        batches_ahead=job["ahead"],
        indices=np.tile(np.arange(len(ImageFolder(job["files"]))), EPOCHS),
        pipelines={"image": [*images, ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    while True:
        yield from loader


if __name__ == "__main__":
    written(json.loads(sys.argv[1]))
    serve(batches)
