"""Predictions for the images of a data set, and scores of them."""
