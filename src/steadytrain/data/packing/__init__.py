"""Pack images into record files: checked, upright, resized and encoded."""
