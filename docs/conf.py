"""Sphinx: ``sphinx-build -W docs docs/_build`` after ``pip install -e ".[docs]"``."""

from docutils import nodes
from sphinx.application import Sphinx

from steadytrain import __version__

project = "steadytrain"
author = "the steadytrain developers"
project_copyright = author
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the signature has them in short, and the text says what they mean
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
smartquotes_action = "qe"  # two dashes begin a flag, and are no long dash
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"steadytrain {release}"


def widen(_: Sphinx, page: nodes.document) -> None:
    """Give each picture a width: Sphinx makes it a link to itself in full size then, which phones need."""
    for picture in page.findall(nodes.image):
        picture["width"] = "100%"


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.connect("doctree-read", widen)
