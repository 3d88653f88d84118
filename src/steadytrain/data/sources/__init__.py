"""What people have, as listings: one file for each kind of source, each ending in ``Listing``s or one ``DataError``.

::

    find(SOURCE)        looks at what is there and calls the right one of these; find_all merges several
        tree            folders of classes inside a tar or a zip     archive: which of these an archive holds
        webdataset      shards of samples
        table           CSV and TSV; also a folder or an archive of images with labels in a file of their own
        truth, imagenet ImageNet as its owners hand it out
        idx, cifar      arrays of pixels
        recfile         another .rec
    select              parts of listings: some classes, a share held out, several merged, one in shards

Nothing is unpacked member by member and nothing is unpickled: a listing says where in an archive each image lies. Only
a compressed container is decompressed, once and whole, into a scratch folder.
"""
