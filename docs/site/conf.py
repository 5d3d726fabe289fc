"""The website: how Sphinx makes it of the pages in docs. Run it with ``make site``.

Pages are Markdown, as GitHub shows them. Docstrings are reStructuredText, which Sphinx reads itself; the pages in
``docs/reference`` name each public object once. A warning fails the build: a link, an anchor or a role without target.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "connectors")]

project = "streamiter"
author = "The streamiter maintainers"
project_copyright = author
version = os.environ.get("SITE_VERSION") or "main"
"""The folder in which this site is published: ``main``, or a released version such as ``0.1``."""
release = version_of("streamiter") if version == "main" else version

root_doc = "index"
exclude_patterns = ["site"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "site_links", "site_commands"]

# Markdown as on GitHub: headings have GitHub's anchors, and bare URLs are links.
myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # tests/docs runs the notebooks
nb_merge_streams = True

# Docstrings of fields and methods; what has none is not for users.
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "class"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
nitpicky = True  # a role without target is a warning
toc_object_entries_show_parents = "hide"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "streamiter"
html_search_scorer = str(HERE / "scorer.js")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"index": [], "tutorial": []}  # pages without pages below them
html_baseurl = f"https://streamiter.github.io/streamiter/{version}/"
html_context = {
    "github_user": "streamiter",
    "github_repo": "streamiter",
    "github_version": "main",
    "doc_path": "docs",
    "default_mode": "auto",
}
html_theme_options = {
    "github_url": "https://github.com/streamiter/streamiter",
    "use_edit_page_button": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "navbar_start": ["navbar-logo", "version-switcher"],
    "switcher": {"json_url": "https://streamiter.github.io/streamiter/versions.json", "version_match": version},
    "check_switcher": False,  # the file is on the published site, which a build does not need
    "show_version_warning_banner": True,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
