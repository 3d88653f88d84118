"""Inference in Apache MXNet 1.9.1, in turns; runs under its own Python (3.8).

usage: python infer_mxnet.py {module,gluon} BATCH ...      ResNet-50 v1 of Gluon's model zoo
       python infer_mxnet.py outputs SYMBOL PARAMS IN.npy OUT.npy

``module`` binds the network's symbol for inference, as MXNet's benchmark_score.py does; ``gluon`` hybridizes it with
static memory. Both print "ready", and then for each line "BATCH SECONDS" on standard input the seconds of passes, as
one line of JSON. ``outputs`` writes what a checkpoint gives for images float32 [N, C, H, W].
"""

import json
import sys
import time

import mxnet as mx
import numpy as np
from mxnet import gluon


def resnet50():
    net = gluon.model_zoo.vision.resnet50_v1()
    net.initialize(mx.init.Xavier())
    return net


def by_gluon(batches):
    net = resnet50()
    net.hybridize(static_alloc=True, static_shape=True)
    images = {batch: mx.nd.random.uniform(shape=(batch, 3, 224, 224)) for batch in batches}

    def run(batch):
        net(images[batch]).wait_to_read()

    return run


def by_module(batches):
    net = resnet50()
    net(mx.nd.zeros((1, 3, 224, 224))).wait_to_read()  # its shapes are known then
    symbol = net(mx.sym.Variable("data"))
    modules = {}
    for batch in batches:
        module = mx.mod.Module(symbol, label_names=None, context=mx.cpu())
        module.bind(for_training=False, data_shapes=[("data", (batch, 3, 224, 224))])
        module.init_params(mx.init.Xavier(magnitude=2.0))
        data = [mx.nd.random.uniform(shape=(batch, 3, 224, 224))]
        modules[batch] = (module, mx.io.DataBatch(data, []))

    def run(batch):
        module, data = modules[batch]
        module.forward(data, is_train=False)
        for output in module.get_outputs():
            output.wait_to_read()

    return run


def take_turns(run, batches):
    for batch in batches:
        run(batch)
        run(batch)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, limit = line.split()
        batch, end, passes = int(batch), time.perf_counter() + float(limit), []
        while not passes or time.perf_counter() < end:
            began, cpu_began = time.perf_counter(), time.process_time()
            run(batch)
            passes.append((time.perf_counter() - began, time.process_time() - cpu_began))
        counted = passes[1:] or passes  # the first warms the caches up
        times = {"seconds": [wall for wall, _ in counted], "cpu_seconds": [cpu for _, cpu in counted]}
        print(json.dumps(times), flush=True)


def write_outputs(symbol_file, params_file, images_file, outputs_file):
    block = gluon.SymbolBlock.imports(symbol_file, ["data"], params_file)
    images = np.load(images_file)
    parts = [block(mx.nd.array(part)).asnumpy() for part in np.array_split(images, max(1, len(images) // 8))]
    np.save(outputs_file, np.concatenate(parts).reshape(len(images), -1))


if __name__ == "__main__":
    if sys.argv[1] == "outputs":
        write_outputs(*sys.argv[2:6])
    else:
        sizes = [int(word) for word in sys.argv[2:]]
        take_turns({"gluon": by_gluon, "module": by_module}[sys.argv[1]](sizes), sizes)
