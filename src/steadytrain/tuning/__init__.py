"""Better settings for training, in speed or accuracy, found by measuring."""
