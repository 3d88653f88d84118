"""Sphinx: ``sphinx-build -W docs docs/_build`` after ``pip install -e ".[docs]"``."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

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


class DarkPictures(SphinxTransform):
    """Show ``NAME-dark.png``, where it lies beside ``NAME.png``, in its place on dark pages."""

    default_priority = 500

    def apply(self) -> None:
        """Put the dark twin of each picture behind it; the classes are furo's."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for picture in list(self.document.findall(nodes.image)):
            uri = picture["uri"].removesuffix(".png") + "-dark.png"
            if (folder / uri).exists():
                twin = picture.deepcopy()
                picture["classes"].append("only-light")
                twin["uri"], twin["classes"] = uri, ["only-dark"]
                picture.parent.insert(picture.parent.index(picture) + 1, twin)


def widen(_: Sphinx, page: nodes.document) -> None:
    """Give each picture a width: Sphinx makes it a link to itself in full size then, which phones need."""
    for picture in page.findall(nodes.image):
        picture["width"] = "100%"


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.add_transform(DarkPictures)
    app.connect("doctree-read", widen)
