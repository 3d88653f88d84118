"""Features of a frozen network for all images of a record file, computed once, and what is learnt from them."""
