"""Files and formats of other trainers, read and written."""
