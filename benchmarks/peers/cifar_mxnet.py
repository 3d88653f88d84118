"""MXNet 1.9.1 on CIFAR-10 as its ``train_cifar10.py --num-layers 20`` has it; runs under its own Python (3.8).

Network, iterator, optimizer and schedule have that script's defaults: a pre-activation ResNet (He et al. 2016,
"Identity Mappings ...") on crops of 28 pixels from images padded to 40, batches of 128, SGD of 0.05 with momentum 0.9
and weight decay 1e-4, a tenth of the rate after 200 and 250 of 300 epochs. The script of 1.9.1 augments nothing unless
``--random-crop 1 --random-mirror 1`` are given; here they are. The index makes it shuffle all images, not pieces of
them.

usage: MXNET_SUBGRAPH_BACKEND=NONE python cifar_mxnet.py TRAIN.rec VAL.rec
"""

import json
import sys
import time

import mxnet as mx

BATCH, EPOCHS, SHAPE, MEAN = 128, 300, (3, 28, 28), (123.68, 116.779, 103.939)
TRAIN, TEST, TEST_BATCH = 50_000, 10_000, 100  # images; what does not divide them is padded, or left out
SPEAK = 20  # batches


def norm(data, **options):
    return mx.sym.BatchNorm(data=data, eps=2e-5, momentum=0.9, **{"fix_gamma": False, **options})


def relu(data):
    return mx.sym.Activation(data=data, act_type="relu")


def convolution(data, width, kernel, stride):
    pad = (kernel // 2, kernel // 2)
    return mx.sym.Convolution(
        data=data, num_filter=width, kernel=(kernel, kernel), stride=(stride, stride), pad=pad, no_bias=True
    )


def unit(data, width, stride, first):
    active = relu(norm(data))
    inner = convolution(active, width, 3, stride)
    inner = convolution(relu(norm(inner)), width, 3, 1)
    return inner + (convolution(active, width, 1, stride) if first else data)


def resnet20():
    body = convolution(norm(mx.sym.Variable("data"), fix_gamma=True), 16, 3, 1)
    for stage, width in enumerate((16, 32, 64)):
        for k in range(3):
            body = unit(body, width, 2 if stage and not k else 1, k == 0)
    pooled = mx.sym.Pooling(data=relu(norm(body)), global_pool=True, kernel=(7, 7), pool_type="avg")
    last = mx.sym.FullyConnected(data=mx.sym.Flatten(data=pooled), num_hidden=10)
    return mx.sym.SoftmaxOutput(data=last, name="softmax")


def records(path, batch_size, **options):
    return mx.io.ImageRecordIter(
        path_imgrec=path,
        path_imgidx=path[: -len("rec")] + "idx",
        data_shape=SHAPE,
        batch_size=batch_size,
        preprocess_threads=4,
        mean_r=MEAN[0],
        mean_g=MEAN[1],
        mean_b=MEAN[2],
        verbose=False,
        **options,
    )


def top1(module, images):
    right = seen = 0
    images.reset()
    for batch in images:
        module.forward(batch, is_train=False)
        predicted, labels = module.get_outputs()[0].asnumpy().argmax(1), batch.label[0].asnumpy()
        right += int((predicted == labels).sum())
        seen += len(labels)
    assert seen == TEST, seen
    return right / seen


def say(**values):
    print(json.dumps(values), flush=True)


class Speed:
    """Tells images per second now and then; waits for what was started, as the example's Speedometer does."""

    def __init__(self):
        self.began, self.batches = time.perf_counter(), 0

    def __call__(self, param):
        self.batches += 1
        if self.batches % SPEAK == 0:
            param.eval_metric.get()
            mx.nd.waitall()
            now = time.perf_counter()
            say(images_per_second=BATCH * SPEAK / (now - self.began))
            self.began = now


def main(train, val):
    pad = {"pad": 4, "fill_value": 127}
    training = records(train, BATCH, shuffle=True, rand_crop=True, rand_mirror=True, **pad)
    testing = records(val, TEST_BATCH)
    module = mx.mod.Module(resnet20(), context=mx.cpu())
    epoch_size = -(-TRAIN // BATCH)
    steps = mx.lr_scheduler.MultiFactorScheduler(step=[200 * epoch_size, 250 * epoch_size], factor=0.1)
    speed = Speed()

    def evaluated(epoch, *_):
        say(epoch=epoch + 1, top1=top1(module, testing))
        speed.began, speed.batches = time.perf_counter(), 0

    module.fit(
        training,
        num_epoch=EPOCHS,
        kvstore="device",
        optimizer="sgd",
        optimizer_params={
            "learning_rate": 0.05,
            "momentum": 0.9,
            "wd": 1e-4,
            "lr_scheduler": steps,
            "multi_precision": True,
        },
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        batch_end_callback=speed,
        epoch_end_callback=evaluated,
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
