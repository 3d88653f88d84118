"""ResNet-20 on CIFAR-10 with timm's parts, as its ``train.py`` puts them together, at its defaults but for these:

crops keep 80 % of an image or more and colours stay (its own 8 % and jitter of 0.4 are for ImageNet), the warm-up is
one epoch instead of five, and batch and rate are 128 and 0.1.

usage: python cifar_timm.py IMAGES EPOCHS SEED
       IMAGES-train.npy uint8 [N, 32, 32, 3], IMAGES-train-labels.npy, IMAGES-val.npy, IMAGES-val-labels.npy
"""

import json
import sys

import timm
import torch
from cifar_torch import MEAN, STD, Images, top1
from scale_ddp import resnet20
from timm.data import create_transform
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader

BATCH, LR, DECAY, SMOOTHING = 128, 0.1, 2e-5, 0.1


def main(start, epochs, seed):
    timm.utils.random_seed(seed, 0)
    shown = {"input_size": 32, "mean": MEAN, "std": STD, "interpolation": "bicubic"}
    moved = create_transform(is_training=True, scale=(0.8, 1.0), color_jitter=None, **shown)
    still = create_transform(is_training=False, crop_pct=1.0, **shown)
    training = DataLoader(Images(start, "train", moved), BATCH, shuffle=True, num_workers=2, drop_last=True)
    testing = DataLoader(Images(start, "val", still), 500, num_workers=2)
    net = resnet20().to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(net, opt="sgd", lr=LR, weight_decay=DECAY, momentum=0.9)
    whole = epochs * len(training)
    schedule = CosineLRScheduler(
        optimizer, whole, warmup_t=len(training), warmup_lr_init=1e-5, warmup_prefix=True, t_in_epochs=False
    )
    loss_of, update = LabelSmoothingCrossEntropy(SMOOTHING), 0
    schedule.step_update(0)
    for epoch in range(epochs):
        for images, labels in training:
            loss = loss_of(net(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update += 1
            schedule.step_update(update)
        print(json.dumps({"epoch": epoch + 1, "top1": top1(net, testing, "cpu")}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
