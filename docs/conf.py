"""The site of docs/: python -m sphinx -W docs OUT."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "mamf"
author = "the mamf contributors"
copyright = author
version = release = installed_version("mamf")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "exported_names",
    "repository_links",
    "command_pages",
    "log_schema",
    "csv_columns",
]
exclude_patterns = ["_ext", "autoprofile-h200"]
highlight_language = "none"  # console output
smartquotes = False  # they would make one dash of the two of an option
nitpicky = True
# Types of other packages: their documentation is not read, so that the build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!mamf\.).*")]
# Type variables, and what only mamf's own code makes.
nitpick_ignore = [
    ("py:class", "mamf.kinds.driver.Run"),
    ("py:class", "mamf.kernel.ProblemT"),
    ("py:class", "mamf.kernel.ShapeT"),
    ("py:class", "mamf.logs.pooling.RowChange"),
    ("py:class", "mamf.logs.compared_rows.RunOrder"),
    ("py:class", "mamf.logs.pooling.PooledRows"),
    ("py:class", "mamf.logs.compared_rows.ComparedRow"),
    ("py:class", "mamf.operation.Preset"),
    ("py:class", "mamf.operation.Parameter"),
    ("py:class", "mamf.plans.RowKey"),
    ("py:class", "mamf.testing.simulated.TimeVariation"),
]

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"mamf {version}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
