"""Sources of images, as listings.

::

    find(SOURCE)        looks at what is there and calls the right one of these; find_all merges several
        layout          which folders are classes and which are splits, and which tables beside them hold labels
        folder          folders of classes, on a disk or inside an archive
        archives        members of tars and zips (zip_names: in which encoding they are called); compressed files
                        decompressed; webdataset: shards of samples
        tables          .lst, CSV, TSV, JSON lines (rows and columns: what stands where; several: labels in one cell;
                        labels: texts to class numbers; paths: the files that a table names)
        imagenet        ImageNet as its owners hand it out, and labels in a file of their own
        arrays          idx (MNIST) and CIFAR: arrays of pixels
        records         other .rec files
    select              parts of listings: some classes, a share held out, several merged, one in shards
    unpacked            a source read where it lies, for training without a pack

Nothing is unpacked member by member and nothing is unpickled: a listing says where in an archive each image lies. Only
a compressed container is decompressed, once and whole, into a scratch folder.
"""
