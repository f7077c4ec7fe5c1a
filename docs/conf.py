"""The site: ``make docs``."""

from __future__ import annotations

import xpool

project = "xpool"
author = "The xpool developers"
release = version = xpool.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
# Pages link to files of the repository, which the site does not have.
suppress_warnings = ["myst.xref_missing", "myst.header"]

html_theme = "furo"
html_title = f"xpool {version}"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
default_role = "literal"  # docstrings quote names so
add_module_names = False
