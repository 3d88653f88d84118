"""Batches of images in an order that is a pure function of the seed, by threads that release the interpreter's lock.

with ImageLoader(Records.open("train.rec"), Crop(kind="resized-crop", size=224, flip=True), batch_size=128) as loader:
    for batch in loader:
        ...

docs/architecture.md has the way of an image from its file to a batch, function by function.
"""

from steadytrain.data.loader.batch import BadImage as BadImage
from steadytrain.data.loader.batch import Batch as Batch
from steadytrain.data.loader.crop import SMALL as SMALL
from steadytrain.data.loader.crop import Crop as Crop
from steadytrain.data.loader.crop import crop_for as crop_for
from steadytrain.data.loader.crop import packed_side as packed_side
from steadytrain.data.loader.image_cache import ResidentBatch as ResidentBatch
from steadytrain.data.loader.image_loader import ImageLoader as ImageLoader
from steadytrain.data.loader.image_loader import Placement as Placement
from steadytrain.data.loader.measure import Speed as Speed
from steadytrain.data.loader.measure import measure as measure
from steadytrain.data.loader.sampler import BlockShuffle as BlockShuffle
from steadytrain.data.loader.task import default_threads as default_threads
