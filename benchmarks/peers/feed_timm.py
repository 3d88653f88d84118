"""timm's create_loader as a contender; see ``feed_turns``.

Of its prefetching loader only the inner half is used, which gives bytes: the outer one makes floats of them, which here
nobody asks for.
"""

import torch
from feed_turns import serve
from timm.data import ImageDataset, create_loader


def batches(job):
    torch.set_num_threads(job["cores"])
    loader = create_loader(
        ImageDataset(job["files"]),
        input_size=(3, job["size"], job["size"]),
        batch_size=job["batch_size"],
        is_training=job["train"],
        interpolation="bilinear",
        color_jitter=None,
        crop_pct=job["size"] / job["resize"],
        num_workers=job["setting"]["workers"],
        use_multi_epochs_loader=True,
        device=torch.device("cpu"),
    ).loader
    while True:
        yield from loader


if __name__ == "__main__":
    serve(batches)
