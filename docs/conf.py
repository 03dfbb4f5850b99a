"""Sphinx builds docs/ into artifacts/site: `make docs`. Pages need no network: theme, search and pictures are local files.

Sphinx, because its search index is a script, which a browser also loads from a folder; that of MkDocs needs a server or a plugin.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import memlab  # noqa: E402
from notebooks.build import pages  # noqa: E402
from notebooks.build.source import lessons  # noqa: E402

project = "memlab"
author = "The memlab authors"
version = release = memlab.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "executed"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static"]
suppress_warnings = ["toc.not_included"]  # a test says so at once, and a page outside of the menu can be read
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "mailto": None, "lesson": "course/{{path}}.html"}

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False}
python_use_unqualified_type_names = True
add_module_names = False
default_role = "code"

html_theme = "furo"
html_title = "memlab"
html_static_path = ["_static"]
html_css_files = ["memlab.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # these would be fetched from other pages, which a browser refuses in a folder
_ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]
html_theme_options = {"source_repository": f"{_ADDRESS}/", "source_branch": "main", "source_directory": "docs/"}

# In the repository a page links to a lesson's notebook; here to the page of the lesson.
_LESSON = re.compile(r"\]\((?:\.\./notebooks/)?(\d\d_\w+)\.ipynb\)")
_COURSE = re.compile(r"\]\((?:\.\./)?notebooks/README\.md\)")
_FILE = re.compile(r"\]\(\.\./(?!docs/)([\w./-]+)\)")

_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"'](?:https?:)?//[^>]*>|<link\b[^>]*\bhref=[\"'](?:https?:)?//[^>]*>"
)


def _linked(text: str) -> str:
    text = _COURSE.sub("](course.md)", _LESSON.sub(r"](lesson:\1)", text))
    text = text.replace("](../docs/", "](").replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
    return _FILE.sub(rf"]({_ADDRESS}/blob/main/\1)", text)


def _course(app: Sphinx, error: Exception | None) -> None:
    """Write the pages of the lessons, from the notebooks as they are kept."""
    if error is None and app.builder.format == "html":
        pages.write(lessons(), Path(app.outdir) / "course", home="../course.html")


def _check(app: Sphinx, error: Exception | None) -> None:
    """Refuse a site that loads anything from elsewhere; links may lead there."""
    files = Path(app.outdir).rglob("*.html") if error is None and app.builder.format == "html" else ()
    for file in files:
        for found in _LOADED.finditer(file.read_text("utf-8")):
            raise ExtensionError(f"{file.name} loads something over the network: {found[0]}")


def _page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _linked(source[0])


def _included(app: Sphinx, path: Path, name: str, source: list[str]) -> None:
    source[0] = _linked(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _page)
    app.connect("include-read", _included)
    app.connect("build-finished", _course)
    app.connect("build-finished", _check, priority=900)
    return {"parallel_read_safe": False}
