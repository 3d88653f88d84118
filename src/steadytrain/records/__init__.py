"""Images in record files: MXNet's RecordIO, written from folders and lists, read without copying.

::

    pack(SOURCE, OUT)      OUT.rec, OUT.idx and the card OUT.json from a folder, a list, a table, a tar, a .rec, ...
    prepare(SOURCE)        a .rec as it is; anything else packed once into a cache
    Records.open(PATH)     images, labels and ids of a .rec or of several, by number
    Unpacked.open(SOURCE)  the same of anything else, read where it lies
    hold_out(labels)       part of them for validation
"""

from steadytrain.records.card import Card as Card
from steadytrain.records.card import read_classes as read_classes
from steadytrain.records.pack import PackedFile as PackedFile
from steadytrain.records.pack import pack as pack
from steadytrain.records.prepare import Prepared as Prepared
from steadytrain.records.prepare import prepare as prepare
from steadytrain.records.reader import Records as Records
from steadytrain.records.shards import record_files as record_files
from steadytrain.records.split import hold_out as hold_out
from steadytrain.records.unpacked import Unpacked as Unpacked
