"""Write images as shards of MosaicML Streaming or litData, and read them from a store; runs under a Python with both.

usage: python storage_readers.py write streaming|litdata FOLDER OUT SHARD_BYTES
       python storage_readers.py read streaming|litdata WHERE CACHE THREADS
       FOLDER has a folder for each class; WHERE is a folder, or an S3 URI, whose endpoint is in AWS_ENDPOINT_URL
"""

import io
import json
import os
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

BATCH = 64
CROP = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def sample(item):
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def write(name, folder, out, size):
    classes = sorted(Path(folder).iterdir())
    items = [(str(path), number) for number, label in enumerate(classes) for path in sorted(label.iterdir())]
    if name == "streaming":
        from streaming import MDSWriter

        with MDSWriter(out=out, columns={"image": "bytes", "label": "int"}, size_limit=size) as writer:
            for item in items:
                writer.write(sample(item))
    else:
        from litdata import optimize

        optimize(sample, items, output_dir=out, num_workers=1, chunk_bytes=size)


def crop(item):
    return CROP(Image.open(io.BytesIO(item["image"])).convert("RGB")), item["label"]


def loader(name, where, cache, threads):
    is_remote = "://" in where
    if name == "streaming":
        from streaming import StreamingDataset

        os.environ["S3_ENDPOINT_URL"] = os.environ.get("AWS_ENDPOINT_URL", "")

        class Crops(StreamingDataset):
            def __getitem__(self, at):
                return crop(super().__getitem__(at))

        place = {"remote": where, "local": cache} if is_remote else {"local": where}
        return DataLoader(Crops(**place, shuffle=True, batch_size=BATCH), batch_size=BATCH, num_workers=threads)
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it would refuse this server otherwise

    class Crops(StreamingDataset):
        def __getitem__(self, at):
            return crop(super().__getitem__(at))

    options = {"cache_dir": cache, "storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    data = Crops(where, shuffle=True, **(options if is_remote else {}))
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=threads)


def read(name, where, cache, threads):
    torch.set_num_threads(1)
    began = time.perf_counter()
    batches = loader(name, where, cache, threads)
    opened = time.perf_counter()
    images = sum(len(labels) for _, labels in batches)
    ended = time.perf_counter()
    speeds = {"images_per_second": images / (ended - opened), "with_opening": images / (ended - began)}
    print(json.dumps({"images": images, "opening_seconds": opened - began, **speeds}))


if __name__ == "__main__":
    work, name, where, out, number = sys.argv[1:]
    {"write": write, "read": read}[work](name, where, out, int(number))
