"""CIFAR-10 in few passes after Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv:2404.00498).

A script of ours after the paper's description (sections 3.1 to 3.6, and its table of hyperparameters): a frozen
whitening layer from the data's patches, convolutions that begin as the identity, norms whose shifts learn 64 times as
fast, alternating flips, shifts by up to 2 pixels with reflection, Nesterov SGD on the summed loss, a triangular rate,
slow weights that are looked up every five updates, and evaluation over flips and shifts. All images stay in memory.

usage: python cifar_airbench.py IMAGES EPOCHS SEED WIDTH
       IMAGES-train.npy uint8 [N, 32, 32, 3], IMAGES-train-labels.npy, IMAGES-val.npy, IMAGES-val-labels.npy
"""

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCH, LR, DECAY, MOMENTUM, SHIFTS_RATE, SMOOTHING = 1024, 11.5, 0.0153, 0.85, 64.0, 0.2
WHITENED_EPOCHS, LOOK, HAS_BF16 = 3, 5, torch.ops.mkldnn._is_mkldnn_bf16_supported()


def shift_norm(filters):
    norm = nn.BatchNorm2d(filters, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def identity_conv(num_in, num_out):
    conv = nn.Conv2d(num_in, num_out, 3, padding="same", bias=False)
    nn.init.dirac_(conv.weight.data[:num_in])
    return conv


class Net(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        # Eigenvectors of 2x2 patches, each over the root of its eigenvalue, and their negatives.
        flat = patches.flatten(1)
        values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(-1, 3, 2, 2)
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.data = torch.cat((filters, -filters))
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        groups, num_in = [], 24
        for num_out in (width, 4 * width, 4 * width):
            groups += [identity_conv(num_in, num_out), nn.MaxPool2d(2), shift_norm(num_out), nn.GELU()]
            groups += [identity_conv(num_out, num_out), shift_norm(num_out), nn.GELU()]
            num_in = num_out
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(num_in, 10, bias=False)

    def forward(self, x):
        x = self.groups(F.gelu(self.whiten(x)))
        return self.head(F.max_pool2d(x, x.shape[-1]).flatten(1)) / 9


def load(start, part):
    images = torch.from_numpy(np.load(f"{start}-{part}.npy")).permute(0, 3, 1, 2).float() / 255
    images = (images - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    return images, torch.from_numpy(np.load(f"{start}-{part}-labels.npy")).long()


def shifted(padded):
    """Cut a window of 32 pixels of each image, at a place of its own."""
    places = torch.randint(0, padded.shape[-1] - 31, (len(padded), 2))
    out = torch.empty(len(padded), 3, 32, 32)
    for y in range(padded.shape[-1] - 31):
        for x in range(padded.shape[-1] - 31):
            chosen = (places == torch.tensor((y, x))).all(1)
            out[chosen] = padded[chosen, :, y : y + 32, x : x + 32]
    return out


def logits(net, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BF16):
        return net(x.contiguous(memory_format=torch.channels_last)).float()


def evaluate(net, images, labels):
    """Return top-1 as it is, and over flips and two shifts of one pixel."""
    net.eval()
    right = averaged = 0
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    with torch.inference_mode():
        for first in range(0, len(images), 1000):
            part, truth = slice(first, first + 1000), labels[first : first + 1000]
            views = (images[part], padded[part, :, :32, :32], padded[part, :, 2:, 2:])
            plain = logits(net, views[0])
            right += int((plain.argmax(1) == truth).sum())
            both = [(logits(net, view) if i else plain) + logits(net, view.flip(-1)) for i, view in enumerate(views)]
            averaged += int(((2 * both[0] + both[1] + both[2]).argmax(1) == truth).sum())
    net.train()
    return right / len(images), averaged / len(images)


def main(start, epochs, seed, width):
    torch.manual_seed(seed)
    images, labels = load(start, "train")
    test_images, test_labels = load(start, "val")
    patches = images[:5000].unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 2, 2)
    net = Net(patches, width).to(memory_format=torch.channels_last)
    updates = epochs * (len(images) // BATCH)
    scale = 1024 * (1 + 1 / (1 - MOMENTUM))
    rate, decay = LR / scale, DECAY * BATCH / scale
    shifts = [p for name, p in net.groups.named_parameters() if p.requires_grad and p.ndim == 1]
    others = [net.whiten.bias, net.head.weight, *(p for p in net.groups.parameters() if p.ndim > 1)]
    groups = [
        {"params": shifts, "lr": rate * SHIFTS_RATE, "weight_decay": decay / (rate * SHIFTS_RATE)},
        {"params": others, "lr": rate, "weight_decay": decay / rate},
    ]
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)
    peaks = [group["lr"] for group in groups]
    slow = [value.clone() for value in net.state_dict().values()]
    flips, step = torch.rand(len(images)) < 0.5, 0
    for epoch in range(epochs):
        if epoch == WHITENED_EPOCHS:
            net.whiten.bias.requires_grad_(False)
        turned = flips if epoch % 2 == 0 else ~flips
        padded = F.pad(torch.where(turned.view(-1, 1, 1, 1), images.flip(-1), images), (2, 2, 2, 2), "reflect")
        for chosen in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            share = step / updates
            triangle = 0.2 + 0.8 * share / 0.23 if share < 0.23 else 1 - 0.93 * (share - 0.23) / 0.77
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * triangle
            loss = F.cross_entropy(
                logits(net, shifted(padded[chosen])), labels[chosen], label_smoothing=SMOOTHING, reduction="sum"
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            is_last = step == updates
            if step % LOOK == 0 or is_last:
                keep = 0.95**LOOK * (step / updates) ** 3 if not is_last else 1.0
                with torch.no_grad():
                    for before, now in zip(slow, net.state_dict().values(), strict=True):
                        if now.is_floating_point():
                            if not is_last:
                                before.lerp_(now, 1 - keep)
                            now.copy_(before)
        top1, averaged = evaluate(net, test_images, test_labels)
        print(json.dumps({"epoch": epoch + 1, "top1": top1, "tta": averaged}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
