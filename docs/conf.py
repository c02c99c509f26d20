"""Configuration of Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import relax_grad  # noqa: E402

project = "relax_grad"
author = "the relax_grad developers"
copyright = author
version = release = relax_grad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += [
    "registered",
    "measured",
    "measured_cpu",
    "measured_scaling",
    "measured_web",
    "architecture",
    "charts",
    "optional",
    "onnx_table",
    "web_example",
]  # in _ext
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = [("operators.js", {"defer": "defer"})]
pygments_dark_style = "github-dark"  # furo's own underlines the names of modules
html_title = f"relax_grad {release}"
autodoc_typehints = "none"  # the docstrings give the types
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
