"""The documentation site: `make docs` writes it to site/. Building it and reading it need no network."""

project = "vlhmm"
copyright = "the vlhmm authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "vlhmm"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
# Documents link to files of the checkout (records, sources) that the site does not hold;
# tests/test_readme.py checks that each of them exists.
suppress_warnings = ["myst.xref_missing", "myst.header"]
