"""Find what is wrong with images and record files, and save what can be saved."""
