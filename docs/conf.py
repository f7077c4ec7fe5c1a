"""The site: ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.pycode.parser import VariableCommentPicker

import xpool

project = "xpool"
author = "The xpool developers"
copyright = f"2026, {author}"
release = version = xpool.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
# Pages link to files of the repository, which the site does not have.
suppress_warnings = ["myst.xref_missing", "myst.header"]

html_theme = "furo"
html_title = f"xpool {version}"
html_static_path = ["site"]
html_css_files = ["phone.css"]
html_search_scorer = str(Path(__file__).parent / "site" / "scorer.js")

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
default_role = "literal"  # docstrings quote names so
add_module_names = False

# The overloads have ``**options``: the signature that is called has each keyword.
VariableCommentPicker.add_overload_entry = lambda self, func: None  # type: ignore[method-assign]


def setup(app: Any) -> None:
    """Shorten signatures: no keyword that catches misspelt ones, no home of a type variable."""

    def signature(*args: Any) -> tuple[str | None, str | None]:
        *_, text, returns = args
        if text:
            text = re.sub(r", \*\*unknown: [~\w.]+", "", text)
            text = re.sub(r"~(?:[\w.]+\.)?~?([A-Z]\b)", r"\1", text)
        return text, returns

    app.connect("autodoc-process-signature", signature)
