"""Fine-tuning as MXNet's fine-tune.py does it: a new last layer, Module.fit on record files; MXNet 1.9.1, Python 3.8.

The flags of that script at their defaults are SGD of 0.01 for all layers, no momentum, no weight decay, a tenth of the
rate after 20 epochs; Xavier for the new layer; here with random crops and flips, which it leaves to flags.

usage: MXNET_SUBGRAPH_BACKEND=NONE python mxnet_finetune.py PREFIX TRAIN.rec TEST.rec EPOCHS MOMENTUM SEED
"""

import json
import sys
import time

import mxnet as mx

BATCH, SHAPE = 16, (3, 224, 224)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
LAYER = "squeezenet0_dropout0_fwd"  # its classifier is a convolution behind it


def records(path, **options):
    scale = {"mean_r": MEAN[0], "mean_g": MEAN[1], "mean_b": MEAN[2]}
    scale.update({"std_r": STD[0], "std_g": STD[1], "std_b": STD[2]})
    return mx.io.ImageRecordIter(
        path_imgrec=path, data_shape=SHAPE, batch_size=BATCH, preprocess_threads=2, **scale, **options
    )


def main(prefix, train, test, epochs, momentum, seed):
    mx.random.seed(seed)
    symbol, args, aux = mx.model.load_checkpoint(prefix, 0)
    net = symbol.get_internals()[LAYER + "_output"]
    classes = len(json.load(open(train[: -len("rec")] + "json"))["classes"])  # noqa: PTH123, SIM115
    net = mx.sym.Convolution(net, num_filter=classes, kernel=(1, 1), name="fc")
    net = mx.sym.Flatten(mx.sym.Pooling(net, global_pool=True, kernel=(7, 7), pool_type="avg"))
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    args = {name: value for name, value in args.items() if name in net.list_arguments()}
    iterator = records(
        train, rand_crop=True, rand_mirror=True, shuffle=True, seed=seed, path_imgidx=train[: -len("rec")] + "idx"
    )
    module = mx.mod.Module(net)
    times = []
    module.fit(
        iterator,
        num_epoch=epochs,
        arg_params=args,
        aux_params=aux,
        allow_missing=True,
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.01, "momentum": momentum, "wd": 0.0},
        eval_metric="acc",
        batch_end_callback=lambda batch: times.append((batch.epoch, batch.nbatch, time.time())),
    )
    last = [row for row in times if row[0] == epochs - 1]
    rate = BATCH * (len(last) - 1) / (last[-1][2] - last[0][2])
    right = total = 0
    for batch in records(test, round_batch=True):
        module.forward(batch, is_train=False)
        count = BATCH - batch.pad
        predicted = module.get_outputs()[0].asnumpy()[:count].argmax(1)
        right += int((predicted == batch.label[0].asnumpy()[:count]).sum())
        total += count
    print(json.dumps({"top1": right / total, "images": total, "images_per_second": rate}))


if __name__ == "__main__":
    prefix, train, test, epochs, momentum, seed = sys.argv[1:]
    main(prefix, train, test, int(epochs), float(momentum), int(seed))
