"""Images in record files: MXNet's RecordIO, written from folders and lists, read without copying."""
