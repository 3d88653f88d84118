"""Engines that run exported files: a row and a file for each."""
