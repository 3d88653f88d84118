"""Endless samplers and loaders, shared by the contenders on torch's DataLoader."""

import torch
from torch.utils.data import DataLoader, Sampler
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2


class Endless(Sampler):
    """Epoch after epoch without a gap between them: no worker ever starts anew."""

    def __init__(self, n, shuffle):
        self.n = n
        self.shuffle = shuffle

    def __iter__(self):
        while True:
            yield from torch.randperm(self.n).tolist() if self.shuffle else range(self.n)

    def __len__(self):
        return 10**9


def loader(data, job):
    """Make a DataLoader over a data set with a length, without end."""
    torch.set_num_threads(job["cores"])
    sampler = Endless(len(data), job["train"])
    return DataLoader(data, job["batch_size"], sampler=sampler, **workers(job))


def workers(job):
    """Return a DataLoader's options for workers that make about as many batches ahead as the others do."""
    num = job["setting"]["workers"]
    return {"num_workers": num, "prefetch_factor": max(1, job["ahead"] // num)} if num else {"num_workers": 0}


def transform(job, *, tensors):
    """Make the work on one image by torchvision's transforms, from an image of Pillow's or a tensor, to a tensor."""
    cut = [] if tensors else [v2.PILToTensor()]
    if not job["train"]:
        return v2.Compose([v2.Resize(job["resize"], antialias=True), v2.CenterCrop(job["size"]), *cut])
    crops = {
        "crop": v2.RandomResizedCrop(job["size"], antialias=True),
        "pad": v2.RandomCrop(job["size"], padding=job["pad"]),
    }
    return v2.Compose([crops[job["kind"]], v2.RandomHorizontalFlip(), *cut])


def decode(encoded):
    """Decode by torchvision's own decoder, from bytes in a tensor to pixels."""
    return decode_image(encoded, mode=ImageReadMode.RGB)
