"""ResNet-20 by DistributedDataParallel, as a careful PyTorch user writes it; the environment says rank and size.

usage: RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python scale_ddp.py JOB
       JOB is JSON: see ``scale_contenders.job``
"""

import json
import time

import torch
import torch.distributed as dist
from scale_images import BLOCKS, MEAN, STD, Stream, held_out, job, rate
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LOG_STEPS = 20


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, before, width):
        super().__init__()
        self.stride = 1 if before == width else 2
        self.conv1 = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.grown = (width - before) // 2

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.grown:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.grown, self.grown))
        return F.relu(y + x, inplace=True)


def resnet20():
    blocks = [Block(before, width) for before, width in BLOCKS]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net.to(memory_format=torch.channels_last)


def normalised(images):
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    mean, std = (255 * torch.from_numpy(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    return ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)


def groups(net, decay):
    decayed = [p for p in net.parameters() if p.ndim > 1]
    spared = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": decay}, {"params": spared, "weight_decay": 0.0}]


def right(net, job, rank, size):
    """Count the images of this rank's part that are classified right."""
    images, labels = held_out(job)
    mine = slice(rank, None, size)
    net.eval()
    with torch.inference_mode():
        return sum(
            int((net(normalised(part)).argmax(1) == torch.from_numpy(truth)).sum())
            for part, truth in zip(*(cut(held[mine], 500) for held in (images, labels)), strict=True)
        )


def cut(held, size):
    return [held[start : start + size] for start in range(0, len(held), size)]


def main():
    settings = job()
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings["seed"])
    net = resnet20()
    # The buffers that batch norms fill are told to the others when they evaluate, and not before each update.
    parallel = DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
    options = {"lr": settings["lr"], "momentum": settings["momentum"], "fused": True}
    optimizer = torch.optim.SGD(groups(net, settings["weight_decay"]), **options)
    stream = Stream(settings, rank, size)
    for step in range(settings["steps"]):
        if step == settings["warm"]:
            began = time.perf_counter()
        images, labels = stream.next()
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, step)
        loss = F.cross_entropy(parallel(normalised(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_STEPS == LOG_STEPS - 1:
            loss.item()
    seconds = (time.perf_counter() - began) / (settings["steps"] - settings["warm"])
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)
    count = torch.tensor(right(net, settings, rank, size))
    dist.all_reduce(count)
    if rank == 0:
        parameters = sum(p.numel() for p in net.parameters())
        print(json.dumps({"step_seconds": seconds, "right": int(count), "parameters": parameters}), flush=True)
    del parallel, loss  # or the group's threads outlive the interpreter, and end the process with SIGABRT now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
