"""Batches from records: in an order that is a pure function of the seed, by threads that release the lock.

with Feed(Records.open("train.rec"), Cut(kind="resized-crop", size=224, flip=True), batch_size=128) as feed:
    for batch in feed:
        ...
"""

from steadytrain.feed.bad import BadImage as BadImage
from steadytrain.feed.batch import Batch as Batch
from steadytrain.feed.blocks import Blocks as Blocks
from steadytrain.feed.choice import Choice as Choice
from steadytrain.feed.cut import SMALL as SMALL
from steadytrain.feed.cut import Cut as Cut
from steadytrain.feed.cut import cut_for as cut_for
from steadytrain.feed.cut import packed_side as packed_side
from steadytrain.feed.feed import Feed as Feed
from steadytrain.feed.feed import default_threads as default_threads
from steadytrain.feed.fill import Source as Source
from steadytrain.feed.measure import Measured as Measured
from steadytrain.feed.measure import Speed as Speed
from steadytrain.feed.measure import measure as measure
from steadytrain.feed.resident import ResidentBatch as ResidentBatch
from steadytrain.feed.stats import FeedTimes as FeedTimes
