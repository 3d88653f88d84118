"""MXNet's RecordIO container: framing, index, card, reader and writer."""
