"""Settings of the documentation's site; `make docs` builds it."""

import sys
from pathlib import Path

import torchcaps

sys.path.insert(0, str(Path(__file__).parent))  # for formulas.py
project = "torchcaps"
author = "The torchcaps developers"
copyright = "The torchcaps developers; Apache-2.0"
release = torchcaps.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "formulas"]
default_role = "py:obj"
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "torchcaps"
html_static_path = ["static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Returns"]
