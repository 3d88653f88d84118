"""Time training steps in Apache MXNet 1.9.1; runs under its own Python (3.8), prints one JSON line.

usage: MXNET_SUBGRAPH_BACKEND=NONE python mxnet_step.py CASE BATCH SIDE STEPS
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


def main(case, batch, side, steps):
    classes = 10
    # Gluon's ResNet-50 halves the image in a stage's first 1x1 convolution, timm's in the 3x3: 7 % less to do here.
    net = resnet20() if case == "resnet20" else gluon.model_zoo.vision.resnet50_v1(classes=classes)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    images = mx.nd.random.uniform(shape=(batch, 3, side, side))
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
    main(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
