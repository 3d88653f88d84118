"""Batches of images in an order that is a pure function of the seed, by threads that release the interpreter's lock.

with ImageLoader(Records.open("train.rec"), Crop(kind="resized-crop", size=224, flip=True), batch_size=128) as loader:
    for batch in loader:
        ...

The way of an image from its file to a batch, function by function:

1. ``ImageLoader.__iter__`` starts a ``Stream`` of threads over a ``LoaderTask`` (plain data: of what, and how).
2. ``Stream.__next__`` gives batch k in its turn; ahead of that, its threads do the pieces of jobs that are begun.
3. ``BatchWorker.job`` plans the batch: memory, ids and positions, a piece for every 32 samples; ``Readahead`` asks the
   system for the bytes of coming ones.
4. ``BatchWorker._fill_rows`` looks up which samples stand at the positions of a piece (``GlobalOrder.ids``,
   ``BlockOrder.ids``), and what is drawn for them (``Draws.at``).
5. ``BatchWorker._read`` copies their encoded bytes from the source: ``Records``, ``Unpacked`` or anything alike.
6. ``BatchWorker._decode`` reads their headers (``probe``); ``Crop.plan`` says which box of each is resized to what.
7. ``cut_into`` (``cut_all`` for many at once) decodes the box and resizes it into the batch's memory.

Images that fit into memory are kept decoded: ``ImageCache`` holds them, common to the ranks of a machine
(``RankMemory``) and copied to the device (``DeviceCache``) where that can be, and ``gather`` writes their squares in
place of 5 to 7. With ``place="process"``, 2 to 7 happen in a child, in memory that both share (``LoaderProcess``).
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
