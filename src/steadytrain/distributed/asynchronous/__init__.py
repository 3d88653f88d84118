"""Asynchronous training: workers that wait for no other, servers that keep the weights, the Ray cluster of both."""
