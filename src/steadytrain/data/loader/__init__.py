"""Batches from records: in an order that is a pure function of the seed, by threads that release the lock.

with ImageLoader(Records.open("train.rec"), Crop(kind="resized-crop", size=224, flip=True), batch_size=128) as feed:
    for batch in feed:
        ...
"""

from steadytrain.data.loader.batch import Batch as Batch
from steadytrain.data.loader.batch_worker import Source as Source
from steadytrain.data.loader.block_shuffle import BlockShuffle as BlockShuffle
from steadytrain.data.loader.choice import Choice as Choice
from steadytrain.data.loader.crop import SMALL as SMALL
from steadytrain.data.loader.crop import Crop as Crop
from steadytrain.data.loader.crop import crop_for as crop_for
from steadytrain.data.loader.crop import packed_side as packed_side
from steadytrain.data.loader.device_cache import ResidentBatch as ResidentBatch
from steadytrain.data.loader.image_loader import ImageLoader as ImageLoader
from steadytrain.data.loader.image_loader import default_threads as default_threads
from steadytrain.data.loader.measure import Measured as Measured
from steadytrain.data.loader.measure import Speed as Speed
from steadytrain.data.loader.measure import measure as measure
from steadytrain.data.loader.quarantine import BadImage as BadImage
from steadytrain.data.loader.stats import FeedTimes as FeedTimes
