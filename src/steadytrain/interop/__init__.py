"""What other trainers leave behind: files and formats of theirs, read and written."""
