"""Outputs of MXNet 1.9.1 for symbols and arrays, for the tests and benchmarks of their conversion.

usage: python mxnet_forward.py REQUESTS.json
       a list of requests, each with "do":
       forward   symbol, params, images (.npy, NCHW), out (.npy): the first output, not training; "shape" binds it
       zoo       name, prefix, size, classes: a network of Gluon's zoo with random weights, exported
       train     symbol, params, images, labels, prefix: two updates of SGD with momentum by Module; saves its states
       shapes    symbol, out (.json): what infer_shape knows of its arguments without being told any
       save      arrays (.npz), out, as_list: a .params file
Run it with MXNET_SUBGRAPH_BACKEND=NONE: the default breaks pre-activation ResNets.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")

import mxnet as mx
import numpy as np


def load(request):
    symbol, arrays = mx.sym.load(request["symbol"]), mx.nd.load(request["params"]) or {}
    args = {name[4:]: value for name, value in arrays.items() if name.startswith("arg:")}
    aux = {name[4:]: value for name, value in arrays.items() if name.startswith("aux:")}
    return symbol, args, aux


def forward(request):
    symbol, args, aux = load(request)
    images = np.load(request["images"])
    batch = request.get("batch", len(images))
    known = {name: value.shape for name, value in args.items() if name in symbol.list_arguments()}
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(batch, *images.shape[1:]), **known)
    executor.copy_params_from(args, aux, allow_extra_params=True)
    outputs = []
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        filled = np.zeros((batch, *images.shape[1:]), np.float32)
        filled[: len(part)] = part
        output = executor.forward(is_train=False, data=mx.nd.array(filled))[0].asnumpy()
        outputs.append(output if len(part) == batch else output[: len(part)])
    np.save(request["out"], np.concatenate(outputs))


def zoo(request):
    mx.random.seed(request.get("seed", 0))
    net = mx.gluon.model_zoo.vision.get_model(request["name"], classes=request.get("classes", 1000), pretrained=False)
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize()
    size = request["size"]
    images = mx.nd.array(np.random.RandomState(0).randn(2, 3, size, size))
    with mx.autograd.record():  # so that moving statistics are no zeros and ones
        net(images)
    for name, value in net.collect_params().items():
        if name.endswith(("gamma", "beta", "bias")):
            value.set_data(value.data() + 0.1 * mx.nd.random.normal(shape=value.shape))
    net(images)
    net.export(request["prefix"])


def train(request):
    symbol, args, aux = load(request)
    images, labels = np.load(request["images"]), np.load(request["labels"])
    iterator = mx.io.NDArrayIter(images, labels, batch_size=len(images), label_name="softmax_label")
    module = mx.mod.Module(symbol)
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.0}
    module.fit(iterator, num_epoch=2, arg_params=args, aux_params=aux, optimizer="sgd", optimizer_params=options)
    module.save_checkpoint(request["prefix"], 2, save_optimizer_states=True)


def shapes(request):
    symbol = mx.sym.load(request["symbol"])
    names, known = symbol.list_arguments(), symbol.infer_shape_partial()[0]
    Path(request["out"]).write_text(json.dumps(dict(zip(names, known))))  # noqa: B905 - Python 3.8


def save(request):
    arrays = np.load(request["arrays"])
    values = {name: mx.nd.array(arrays[name], dtype=arrays[name].dtype) for name in arrays.files}
    mx.nd.save(request["out"], list(values.values()) if request.get("as_list") else values)


if __name__ == "__main__":
    for request in json.loads(Path(sys.argv[1]).read_text()):
        print(request, file=sys.stderr)  # the last one is what an error is about
        {"forward": forward, "zoo": zoo, "train": train, "shapes": shapes, "save": save}[request["do"]](request)
