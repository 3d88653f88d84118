"""Pack a folder of classes with other people's writers; runs under a Python that has them.

usage: python packers.py webdataset|litdata|streaming HOW SOURCE OUT
       HOW: bytes (as they are), whole (as JPEG of quality 95), or the shorter side, in pixels, of such a JPEG
"""

import io
import os
import sys
from functools import partial
from pathlib import Path

from PIL import Image


def files(source):
    classes = sorted(path for path in Path(source).iterdir() if path.is_dir())
    return [(str(path), k) for k, folder in enumerate(classes) for path in sorted(folder.iterdir())]


def encoded(path, how):
    if how == "bytes":
        return Path(path).read_bytes()
    image = Image.open(path).convert("RGB")
    scale = 1 if how == "whole" else int(how) / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.BICUBIC)
    kept = io.BytesIO()
    image.save(kept, "JPEG", quality=95)
    return kept.getvalue()


def sample(item, how):
    return {"image": encoded(item[0], how), "label": item[1]}


def webdataset(items, how, out):
    import webdataset

    suffix = "png" if how == "bytes" else "jpg"
    with webdataset.ShardWriter(str(Path(out) / "set-%06d.tar"), maxcount=10**6, maxsize=10**9, verbose=0) as writer:
        for number, (path, label) in enumerate(items):
            writer.write({"__key__": f"{number:08d}", suffix: encoded(path, how), "cls": label})


def litdata(items, how, out):
    from litdata import optimize

    optimize(partial(sample, how=how), items, output_dir=out, num_workers=os.cpu_count(), chunk_bytes="64MB")


def streaming(items, how, out):
    from streaming import MDSWriter

    with MDSWriter(out=out, columns={"image": "bytes", "label": "int"}) as writer:
        for item in items:
            writer.write(sample(item, how))


if __name__ == "__main__":
    name, how, source, out = sys.argv[1:]
    {"webdataset": webdataset, "litdata": litdata, "streaming": streaming}[name](files(source), how, out)
