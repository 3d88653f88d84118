"""Sources of images, as listings.

::

    find(SOURCE)        asks the kinds of sources in turn (source: what a kind is); find_all merges several
        folder          folders of classes (layout: which folders are classes and which are splits)
        labelled        images without such folders, and the tables beside them that layout finds
        archived        either inside tars and zips (archives: their members; zip_names: how these are called)
        webdataset      shards of samples
        tables          .lst, CSV, TSV, JSON lines (rows and columns: what stands where; several: labels in one cell;
                        labels: texts to class numbers; paths: the files that a table names)
        parquet         Parquet and Arrow files with images in them
        imagenet        ImageNet as its owners hand it out, and labels in a file of their own
        arrays          idx (MNIST) and CIFAR: arrays of pixels
        records         other .rec files
    select              parts of listings: some classes, a share held out, several merged, one in shards
    unpacked            a source read where it lies, for training without a pack

Nothing is unpacked member by member and nothing is unpickled: a listing says where in an archive each image lies. Only
a compressed container is decompressed, once and whole, into a scratch folder.
"""
