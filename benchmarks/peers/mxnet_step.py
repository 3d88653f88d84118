"""Time training steps in Apache MXNet 1.9.1; runs under its own Python (3.8), prints one JSON line.

usage: MXNET_SUBGRAPH_BACKEND=NONE python mxnet_step.py CASE BATCH SIDE CHANNELS STEPS
"""

import json
import sys
import time

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn


class Basic(nn.HybridBlock):
    """A residual block of two 3x3 convolutions, option A shortcut replaced by a 1x1 one (Gluon cannot pad channels)."""

    def __init__(self, width, stride, first, **kwargs):
        super().__init__(**kwargs)
        self.body = nn.HybridSequential()
        self.body.add(nn.Conv2D(width, 3, stride, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        self.body.add(nn.Conv2D(width, 3, 1, 1, use_bias=False), nn.BatchNorm())
        self.short = nn.Conv2D(width, 1, stride, use_bias=False) if first else None

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + (x if self.short is None else self.short(x)))


def resnet20():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, 1, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    for stage, width in enumerate((16, 32, 64)):
        for k in range(3):
            net.add(Basic(width, 2 if stage and not k else 1, stage > 0 and k == 0))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))
    return net


def mlp():
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(64, activation="relu"), nn.Dense(10))
    return net


def lenet():
    net = nn.HybridSequential()
    for width in (20, 50):
        net.add(nn.Conv2D(width, 5, activation="tanh"), nn.MaxPool2D(2, 2))
    net.add(nn.Flatten(), nn.Dense(500, activation="tanh"), nn.Dense(10))
    return net


def conv(width, kernel, stride=1, padding=0):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(width, kernel, stride, padding), nn.BatchNorm(), nn.Activation("relu"))
    return net


def side_by_side(*parts):
    net = gluon.contrib.nn.HybridConcurrent(axis=1)
    net.add(*parts)
    return net


def inception():
    """Build Inception-BN for small images: ten blocks of two branches, of which two halve the image."""
    net = nn.HybridSequential()
    net.add(conv(96, 3, 1, 1))
    for block in ((32, 32), (32, 48), 80, (112, 48), (96, 64), (80, 80), (48, 96), 96, (176, 160), (176, 160)):
        if isinstance(block, int):
            net.add(side_by_side(conv(block, 3, 2, 1), nn.MaxPool2D(3, 2, 1)))
        else:
            net.add(side_by_side(conv(block[0], 1), conv(block[1], 3, 1, 1)))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))
    return net


NETS = {"resnet20": resnet20, "mlp": mlp, "lenet": lenet, "inception": inception}


def main(case, batch, side, channels, steps):
    classes = 10
    # Gluon's ResNet-50 halves the image in a stage's first 1x1 convolution, timm's in the 3x3: 7 % less to do here.
    net = gluon.model_zoo.vision.resnet50_v1(classes=classes) if case == "resnet50" else NETS[case]()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    images = mx.nd.random.uniform(shape=(batch, channels, side, side))
    labels = mx.nd.array([k % classes for k in range(batch)])
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        with autograd.record():
            loss = criterion(net(images), labels)
        loss.backward()
        trainer.step(batch)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:6]))
