"""The feed of steadytrain as a contender; see ``feed_turns``."""

from feed_turns import serve

from steadytrain.data.images import jpeg
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.recordio.reader import Records

KEEP = {"crop": 0, "pad": None}  # photographs are decoded anew, as in a set that does not fit; CIFAR-10 always fits


def batches(job):
    records = Records.open(job["records"])
    kind = {"crop": "resized-crop", "pad": "pad-crop"}[job["kind"]]
    cut = Crop(kind=kind, size=job["size"], pad=job["pad"], flip=True, crop=job["size"] / job["resize"])
    if not job["setting"].get("library", True):
        jpeg.parts = None  # as if it had not been built
    options = {"batch_size": job["batch_size"], "depth": job["ahead"], "keep_bytes": KEEP[job["kind"]]}
    few = job["setting"].get("images")
    ids = None if few is None else range(0, len(records), len(records) // few)
    feed = ImageLoader(records, cut, train=job["train"], threads=job["setting"]["threads"], ids=ids, **options)
    while True:
        for batch in feed:
            yield batch.images, batch.labels


if __name__ == "__main__":
    serve(batches)
