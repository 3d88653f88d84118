"""Images: where they lie, how they are checked and packed, and how batches are made of them.

From the lowest floor to the highest; each imports from those above it in this list::

    images      one image: what its file is, pixels, resize, encode
    storage     files and objects, read by ranges
    recordio    MXNet's container, read and written
    sources     any source -> Listing
    packing     Listing -> .rec, .idx and card
    checking    what is wrong with images and records
    loader      records -> batches
    transforms  batches -> batches
"""
