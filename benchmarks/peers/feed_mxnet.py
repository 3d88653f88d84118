"""MXNet 1.9.1's ImageRecordIter as a contender; see ``feed_turns``.

It decodes with at most half as many threads as there are processors, whatever it is told; so several iterators share
the records among them (``part_index``), each with a thread that prefetches.
"""

import mxnet as mx
from feed_turns import serve


def batches(job):
    num = job["setting"]["iterators"]
    iterators = [records(job, part, num) for part in range(num)]
    while True:
        for iterator in iterators:
            yield following(iterator)


def following(iterator):
    """Return the next batch, epoch after epoch."""
    try:
        batch = iterator.next()
    except StopIteration:
        iterator.reset()
        batch = iterator.next()
    images, labels = batch.data[0], batch.label[0]
    images.wait_to_read()
    return images, labels


def records(job, part, num):
    size = job["size"]
    crop = {
        "random_resized_crop": True,
        "min_random_area": 0.08,
        "max_random_area": 1.0,
        "min_aspect_ratio": 3 / 4,
        "max_aspect_ratio": 4 / 3,
    }
    pad = {"pad": job["pad"], "rand_crop": True, "fill_value": 0}
    train = {"shuffle": True, "rand_mirror": True, **{"crop": crop, "pad": pad}[job["kind"]]}
    return mx.io.ImageRecordIter(
        path_imgrec=job["records"],
        path_imgidx=job["index"],
        data_shape=(3, size, size),
        batch_size=job["batch_size"],
        dtype="uint8",
        preprocess_threads=job["setting"]["threads"],
        prefetch_buffer=max(1, job["ahead"] // num),
        num_parts=num,
        part_index=part,
        verbose=False,
        **(train if job["train"] else {"resize": job["resize"]}),
    )


if __name__ == "__main__":
    serve(batches)
