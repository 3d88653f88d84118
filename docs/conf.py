"""Sphinx: ``sphinx-build -W docs docs/_build`` after ``pip install -e ".[docs]"``."""

from steadytrain import __version__

project = "steadytrain"
author = "the steadytrain developers"
project_copyright = author
release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"steadytrain {release}"
