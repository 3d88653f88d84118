"""Sources of images, as listings: ``find`` asks the kinds of sources in turn, of which each is a row in its module.

Nothing is unpacked member by member and nothing is unpickled: a listing says where in an archive each image lies. Only
a compressed container is decompressed, once and whole, into a scratch folder.
"""
