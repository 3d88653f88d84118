"""ResNet-20 by MXNet 1.9.1's Gluon over ``dist_async``: a worker; its environment says where the others are.

Each push of a worker is an update on the servers, of a whole batch, so that two workers make half of the updates each.

usage: DMLC_ROLE=worker DMLC_PS_ROOT_URI=127.0.0.1 ... python async_mxnet.py JOB
       JOB is JSON: see ``scale_contenders.Work``
"""

import json
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from scale_images import Stream, job
from scale_mxnet import LOG_STEPS, normalised, optimizer, resnet20, right


def main():
    told = job()
    mx.random.seed(told["seed"])
    store = mx.kv.create("dist_async")
    net = resnet20()
    net(mx.nd.zeros((2, 3, 32, 32)))  # the shapes of what is not known before
    parameters = net.collect_params()
    trained = {name: one for name, one in parameters.items() if one.grad_req != "null"}
    trainer = gluon.Trainer(trained, optimizer(told, sorted(trained)), kvstore=store, update_on_kvstore=True)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()
    stream = Stream(dict(told, seed=1000 * told["seed"] + store.rank), 0, 1)  # an order of its own, of whole batches
    steps = told["steps"] // store.num_workers
    for step in range(steps):
        if step == told["warm"]:
            mx.nd.waitall()
            began = time.perf_counter()
        images, labels = stream.next()
        with autograd.record():
            loss = criterion(net(normalised(images)), mx.nd.array(labels))
        loss.backward()
        trainer.step(told["batch"])
        if step % LOG_STEPS == LOG_STEPS - 1:
            loss.mean().asscalar()
    mx.nd.waitall()
    seconds = time.perf_counter() - began
    store._barrier()
    size = sum(int(np.prod(one.shape)) for one in trained.values())
    answer = {"seconds": seconds, "updates": steps - told["warm"], "parameters": size}
    if store.rank == 0:
        for number, one in enumerate(trainer._params):
            trainer._kvstore.pull(number, out=one.list_data())
        answer["right"] = right(net, told)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
