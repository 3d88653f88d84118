"""A probe as one writes it with scikit-learn: features of the frozen network, and logistic regression on them.

The strength of the penalty is chosen by cross-validation over the training images (``LogisticRegressionCV``).

usage: python finetune_sklearn.py FOLDER WEIGHTS SIZE
       FOLDER holds train/ and test/; prints {"top1": ...} of test/
"""

import json
import sys

import torch
from finetune_weights import MEAN, STD, network
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


def features(folder, part, net, size):
    still = [transforms.Resize(round(size / 0.875)), transforms.CenterCrop(size)]
    images = ImageFolder(
        f"{folder}/{part}", transforms.Compose([*still, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    )
    with torch.inference_mode():
        batches = [(net(x), y) for x, y in DataLoader(images, 64, num_workers=2)]
    return torch.cat([x for x, _ in batches]).numpy(), torch.cat([y for _, y in batches]).numpy()


def main(folder, weights, size):
    net = network(weights, 0).eval()
    probe = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=8, cv=5, max_iter=500, n_jobs=2))
    probe.fit(*features(folder, "train", net, size))
    print(json.dumps({"top1": float(probe.score(*features(folder, "test", net, size)))}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
