"""Settings of the documentation's site; `make docs` builds it."""

import torchcaps

project = "torchcaps"
author = "The torchcaps developers"
copyright = "The torchcaps developers; Apache-2.0"
release = torchcaps.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "py:obj"
html_theme = "furo"
html_title = "torchcaps"
html_static_path = ["static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_custom_sections = [("Returns", "params_style")]
