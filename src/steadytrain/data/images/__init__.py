"""One image: what its file is, its pixels, their size, and the bytes that are stored of it."""
