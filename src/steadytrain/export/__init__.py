"""What a trained model is for: files that other programs load, how fast they are, and answers over HTTP."""
