"""Use of a trained model: files that other programs load, their speed, and answers over HTTP."""
