"""Sphinx: ``sphinx-build -W docs docs/_build`` after ``pip install -e ".[docs]"``."""

from pathlib import Path

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


def widen(app: Sphinx, page: nodes.document) -> None:
    """Give each picture a width, so that Sphinx links it to itself in full size, and its dark twin if it has one."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for picture in list(page.findall(nodes.image)):
        picture["width"] = "100%"
        dark = picture["uri"].removesuffix(".png") + "-dark.png"
        if (folder / dark).is_file():
            twin = picture.deepcopy()
            twin["uri"], twin["classes"] = dark, ["only-dark"]
            picture["classes"] = ["only-light"]
            picture.parent.insert(picture.parent.index(picture) + 1, twin)


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.connect("doctree-read", widen, priority=100)  # before Sphinx collects the pictures
