"""Fine-tuning as one writes it in PyTorch: torchvision's transforms, two worker processes, AdamW and a cosine.

usage: python finetune_torch.py FOLDER WEIGHTS EPOCHS SEED SIZE
       FOLDER holds train/ and test/, a folder for each class; prints {"top1": ...} of test/ after the last epoch
"""

import json
import sys

import torch
from finetune_weights import MEAN, STD, network
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

BATCH, LR = 16, 1e-3  # the default of AdamW


def main(folder, weights, epochs, seed, size):
    torch.manual_seed(seed)
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    moved = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *last]
    still = [transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size), *last]
    train = ImageFolder(f"{folder}/train", transforms.Compose(moved))
    test = ImageFolder(f"{folder}/test", transforms.Compose(still))
    net = network(weights, len(train.classes))
    loader = DataLoader(train, BATCH, shuffle=True, num_workers=2, drop_last=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.inference_mode():
        right = sum(int((net(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 64, num_workers=2))
    print(json.dumps({"top1": right / len(test)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
