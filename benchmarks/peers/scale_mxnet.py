"""ResNet-20 by MXNet 1.9.1's Gluon over a kvstore: a worker; its environment says where servers and scheduler are.

In ``dist_sync`` an update is made of all workers' shares of a batch. In ``dist_async`` each push is an update, of a
whole batch, so that of two workers each makes half of the updates, of batches in an order of its own.

usage: DMLC_ROLE=worker DMLC_PS_ROOT_URI=127.0.0.1 ... python scale_mxnet.py JOB
       JOB is JSON: see ``scale_contenders.Work``, with the ``store``
"""

import json
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from scale_images import BLOCKS, MEAN, STD, Stream, held_out, job

LOG_STEPS = 20


class Block(nn.HybridBlock):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, before, width, **kwargs):
        super().__init__(**kwargs)
        self.grown, stride = width - before, 1 if before == width else 2
        self.body = nn.HybridSequential()
        self.body.add(nn.Conv2D(width, 3, stride, 1, use_bias=False, in_channels=before), nn.BatchNorm())
        self.body.add(nn.Activation("relu"))
        self.body.add(nn.Conv2D(width, 3, 1, 1, use_bias=False, in_channels=width), nn.BatchNorm())

    def hybrid_forward(self, F, x):
        y = self.body(x)
        if self.grown:
            x = F.slice(x, begin=(None, None, None, None), end=(None, None, None, None), step=(1, 1, 2, 2))
            half = F.zeros_like(F.slice_axis(x, axis=1, begin=0, end=self.grown // 2))
            x = F.concat(half, x, half, dim=1)
        return F.relu(y + x)


def resnet20():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, 1, 1, use_bias=False, in_channels=3), nn.BatchNorm(), nn.Activation("relu"))
    for before, width in BLOCKS:
        net.add(Block(before, width))
    last = nn.Dense(10, in_units=64, weight_initializer=mx.init.Uniform(64**-0.5))  # as torch has it
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), last)
    net.initialize(mx.init.MSRAPrelu("out", slope=0.0))
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def normalised(images):
    pixels = images.transpose(0, 3, 1, 2).astype(np.float32)
    mean, std = (255 * value.reshape(1, 3, 1, 1) for value in (MEAN, STD))
    return mx.nd.array((pixels - mean) / std)


def optimizer(settings, parameters):
    """Make the optimizer for the server, which knows a parameter by its number only, and asks the schedule itself."""
    schedule = mx.lr_scheduler.CosineScheduler(settings["steps"], base_lr=settings["lr"])
    optimizer_object = mx.optimizer.create(
        "sgd",
        learning_rate=settings["lr"],
        momentum=settings["momentum"],
        wd=settings["weight_decay"],
        lr_scheduler=schedule,
    )
    optimizer_object.wd_mult = {number: float(name.endswith("weight")) for number, name in enumerate(parameters)}
    return optimizer_object


def right(net, settings):
    """Count the images classified right, of all of them: a worker has its own running statistics."""
    images, labels = held_out(settings)
    count = 0
    for start in range(0, len(labels), 500):
        logits = net(normalised(images[start : start + 500])).asnumpy()
        count += int((logits.argmax(1) == labels[start : start + 500]).sum())
    return count


def main():
    settings = job()
    mx.random.seed(settings["seed"])
    store = mx.kv.create(settings["store"])
    is_async = settings["store"] == "dist_async"
    net = resnet20()
    net(mx.nd.zeros((2, 3, 32, 32)))  # the shapes of what is not known before
    parameters = net.collect_params()
    trained = {name: weight for name, weight in parameters.items() if weight.grad_req != "null"}
    trainer = gluon.Trainer(trained, optimizer(settings, sorted(trained)), kvstore=store)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    if is_async:
        stream = Stream(dict(settings, seed=1000 * settings["seed"] + store.rank), 0, 1)
    else:
        stream = Stream(settings, store.rank, store.num_workers)
    steps = settings["steps"] // store.num_workers if is_async else settings["steps"]
    for step in range(steps):
        if step == settings["warm"]:
            mx.nd.waitall()
            began = time.perf_counter()
        images, labels = stream.next()
        with autograd.record():
            loss = criterion(net(normalised(images)), mx.nd.array(labels))
        loss.backward()
        trainer.step(settings["batch"])  # of dist_sync, the server adds up the gradients of all workers
        if step % LOG_STEPS == LOG_STEPS - 1:
            loss.mean().asscalar()
    mx.nd.waitall()
    size = sum(int(np.prod(value.shape)) for value in trained.values())
    answer = {"seconds": time.perf_counter() - began, "updates": steps - settings["warm"], "parameters": size}
    store._barrier()  # the final weights are those of all workers' pushes
    if store.rank == 0:
        for number, parameter in enumerate(trainer._params):
            store.pull(number, out=parameter.list_data())
        answer["right"] = right(net, settings)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
