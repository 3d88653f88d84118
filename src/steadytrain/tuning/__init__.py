"""What to change so that training is faster or better, found by measuring."""
