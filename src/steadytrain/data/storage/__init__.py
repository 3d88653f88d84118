"""Objects at URIs: requests to a store that are repeated while it fails, and a copy on disk of what was read."""
