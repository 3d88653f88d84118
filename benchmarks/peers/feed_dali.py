"""NVIDIA DALI on the CPU as a contender; see ``feed_turns``.

``reader`` is ``file`` (the files) or ``mxnet`` (the records); ``fast_idct`` gives up some accuracy of JPEGs for speed.
"""

import numpy as np
from feed_turns import serve
from nvidia.dali import fn, pipeline_def, types


def batches(job):
    pipe = pipeline(
        job,
        batch_size=job["batch_size"],
        num_threads=job["setting"]["threads"],
        device_id=None,
        prefetch_queue_depth=job["ahead"],
    )
    pipe.build()
    while True:
        images, labels = pipe.run()
        yield np.asarray(images.as_tensor()), np.asarray(labels.as_tensor())


@pipeline_def
def pipeline(job):
    encoded, labels = read(job)
    size = job["size"]
    decoder = {"device": "cpu", "use_fast_idct": job["setting"]["fast_idct"]}
    if not job["train"]:
        images = fn.decoders.image(encoded, **decoder)
        return fn.resize_crop_mirror(images, resize_shorter=job["resize"], crop=(size, size)), labels
    if job["kind"] == "crop":
        area = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3], "num_attempts": 10}
        images = fn.decoders.image_random_crop(encoded, **decoder, **area)
        images = fn.resize(images, size=(size, size), antialias=True)
    else:
        images = fn.decoders.image(encoded, **decoder)
        start = fn.random.uniform(values=list(range(-job["pad"], job["pad"] + 1)), shape=(2,), dtype=types.INT32)
        images = fn.slice(images, start, (size, size), axes=(0, 1), out_of_bounds_policy="pad", fill_values=0)
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels


def read(job):
    options = {"random_shuffle": job["train"], "initial_fill": 1024, "name": "reader"}
    if job["setting"]["reader"] == "file":
        return fn.readers.file(file_root=job["files"], **options)
    return fn.readers.mxnet(path=[job["records"]], index_path=[job["index"]], **options)


if __name__ == "__main__":
    serve(batches)
