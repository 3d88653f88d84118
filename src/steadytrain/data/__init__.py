"""Images: where they lie, how they are checked and packed, and how batches are made of them.

::

    sources     any source -> Listing
    packing     Listing -> .rec, .idx and card
    recordio    MXNet's container, read and written
    checking    what is wrong with images and records
    loader      records -> batches
"""
