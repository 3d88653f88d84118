"""torchvision's ImageFolder and torch's DataLoader as a contender; see ``feed_turns``.

``decoder`` is ``pillow``, as ImageFolder comes, or ``torchvision``: ``torchvision.io`` and tensors.
"""

from feed_torch import decode, loader, transform
from feed_turns import serve
from torchvision.datasets import ImageFolder
from torchvision.io import read_file


def batches(job):
    tensors = job["setting"]["decoder"] == "torchvision"
    options = {"loader": read} if tensors else {}
    return loader(ImageFolder(job["files"], transform=transform(job, tensors=tensors), **options), job)


def read(path):
    return decode(read_file(path))


if __name__ == "__main__":
    serve(batches)
