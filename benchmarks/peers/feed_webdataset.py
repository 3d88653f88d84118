"""WebDataset as a contender, on the same bytes in tar files; see ``feed_turns``.

``decoder`` is ``pillow``, or ``torchvision``: ``torchvision.io`` and tensors.
"""

import torch
import webdataset
from feed_torch import decode, transform, workers
from feed_turns import serve

SHUFFLED = 1000  # samples that a worker shuffles among


def batches(job):
    torch.set_num_threads(job["cores"])
    tensors = job["setting"]["decoder"] == "torchvision"
    shards = {"resampled": True} if job["train"] else {"shardshuffle": False, "workersplitter": split}
    data = webdataset.WebDataset(job["shards"], **shards)
    if job["train"]:
        data = data.shuffle(SHUFFLED)
    data = data.decode(pixels) if tensors else data.decode("pil")
    data = data.to_tuple("jpg;png", "cls").map_tuple(transform(job, tensors=tensors)).batched(job["batch_size"])
    return iter(webdataset.WebLoader(data if job["train"] else data.repeat(), batch_size=None, **workers(job)))


def split(shards):
    return webdataset.split_by_worker(shards)


def pixels(key, encoded):
    if key.rpartition(".")[2] not in ("jpg", "png"):
        return None
    return decode(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))


if __name__ == "__main__":
    serve(batches)
