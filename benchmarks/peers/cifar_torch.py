"""ResNet-20 on CIFAR-10 as one first writes it in PyTorch: torchvision's transforms, two worker processes, eager code.

The data set is what ``torchvision.datasets.CIFAR10`` is, an array in memory of which each image becomes a PIL image;
it is read from two files, so that nothing is fetched.

usage: python cifar_torch.py IMAGES EPOCHS SEED
       IMAGES-train.npy uint8 [N, 32, 32, 3], IMAGES-train-labels.npy, IMAGES-val.npy, IMAGES-val-labels.npy
"""

import json
import sys
import time

import numpy as np
import torch
from PIL import Image
from scale_ddp import resnet20
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

MEAN, STD, BATCH = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 128
SPEAK = 20  # batches


class Images(Dataset):
    def __init__(self, start, part, transform):
        self.images, self.labels = np.load(f"{start}-{part}.npy"), np.load(f"{start}-{part}-labels.npy").tolist()
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def top1(net, loader, device):
    net.eval()
    with torch.inference_mode():
        right = sum(int((net(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in loader)
    net.train()
    return right / len(loader.dataset)


def say(**values):
    print(json.dumps(values), flush=True)


def main(start, epochs, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    moved = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *last])
    training = DataLoader(Images(start, "train", moved), BATCH, shuffle=True, num_workers=2, drop_last=True)
    testing = DataLoader(Images(start, "val", transforms.Compose(last)), 500, num_workers=2)
    net = resnet20().to(device, memory_format=torch.contiguous_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(training))
    for epoch in range(epochs):
        began = time.perf_counter()
        for step, (images, labels) in enumerate(training, 1):
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % SPEAK == 0:
                loss.item()
                now = time.perf_counter()
                say(images_per_second=SPEAK * BATCH / (now - began))
                began = now
        say(epoch=epoch + 1, top1=top1(net, testing, device))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
