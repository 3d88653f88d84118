"""One attempt at a run: assembled from the recipe and the newest checkpoint, ready to step."""
