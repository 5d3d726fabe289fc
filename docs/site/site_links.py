"""Links of the website: pages that leave ``docs``, and roles of docstrings.

A page may link to a file of the repository, such as an example: on the site the link leads to GitHub. A role of a
docstring may name an object by the module that defines it; it leads to the page where the object is public. A name
without a page is text, if it exists; a name that does not exist is a warning, which fails the build.
"""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

GITHUB = "https://github.com/streamiter/streamiter"
DOCS = Path(__file__).parents[1]
NAVIGATION: dict[str, dict[str, list[str]]] = tomllib.loads(
    (DOCS / "site" / "navigation.toml").read_text(encoding="utf-8")
)
LINK = re.compile(r"\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def link_to_the_repository(_: Sphinx, page: str, source: list[str]) -> None:
    """Let links that leave ``docs`` lead to GitHub."""
    folder = posixpath.dirname(page)

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        anchor = match["anchor"] or ""
        if not target.startswith("../"):
            return match[0]
        kind = "tree" if (DOCS / target).is_dir() else "blob"
        return f"]({GITHUB}/{kind}/main/{target.removeprefix('../')}{anchor})"

    source[0] = LINK.sub(replaced, source[0])


def add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """Add the pages below a page, so that the pages themselves are plain Markdown, as GitHub shows it."""
    for caption, pages in NAVIGATION.get(page, {}).items():
        lines = [":hidden:", f":caption: {caption}", "", *sorted_pages(pages)]
        source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def sorted_pages(names: list[str]) -> list[str]:
    """Return the pages that a list of the navigation names; a name with a star is a pattern."""
    found = [sorted(DOCS.glob(f"{name}.md")) if "*" in name else [DOCS / name] for name in names]
    return [f"/{path.relative_to(DOCS).as_posix().removesuffix('.md')}" for paths in found for path in paths]


def link_to_the_public_name(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Resolve a role whose target Sphinx does not know by that name; see the module."""
    if node.get("refdomain") != "py":
        return None
    objects = environment.domains.python_domain.objects
    public = _public_objects(app)
    for name in _meant(node):
        found, known = _object(name)
        if not known:
            continue
        shown = public.get(_identity(found), name)
        if shown in objects:
            entry = objects[shown]
            return make_refnode(app.builder, str(node["refdoc"]), entry.docname, entry.node_id, content, shown)
        return content
    # Annotations name type variables, aliases and types of libraries; only a docstring's role must have a target.
    return None if "refwarn" in node else content


def _meant(node: pending_xref) -> Iterator[str]:
    """Yield the names that a role may mean: as it is, or in a module or class."""
    target, module, owner = (str(node.get(key) or "") for key in ("reftarget", "py:module", "py:class"))
    yield target
    yield f"{module}.{target}"
    source = str(node.source or "")  # for example "…/marked_streams.py:docstring of streamiter.iteration.….Replayed"
    defining = source.partition(":docstring of ")[2]
    while defining:
        yield f"{defining}.{target}"
        defining = defining.rpartition(".")[0]
    yield f"{module}.{owner}.{target}"


def _public_objects(app: Sphinx) -> dict[Any, str]:
    """Return the names under which objects have a page, by what they are."""
    cached: dict[Any, str] | None = getattr(app, "_streamiter_public", None)
    if cached is None:
        names = app.env.domains.python_domain.objects
        cached = {_identity(_object(name)[0]): name for name in names}
        app._streamiter_public = cached  # type: ignore[attr-defined]
    return cached


def _identity(found: object) -> object:
    """Return what is equal for an object that is exported by several modules, and for a method that is inherited."""
    if isinstance(found, (type, FunctionType)):
        return found.__module__, found.__qualname__
    return found if isinstance(found, str) else id(found)


@cache
def _object(name: str) -> tuple[object, bool]:
    """Return the object of a dotted name, and whether there is one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                found = _member(found, part)
        except (ImportError, AttributeError):
            continue
        return found, True
    return None, False


def _member(owner: Any, name: str) -> object:
    try:
        return getattr(owner, name)
    except AttributeError:
        for each in getattr(owner, "__mro__", ()):
            if name in getattr(each, "__annotations__", {}):  # a field without a default
                return f"{each.__module__}.{each.__qualname__}.{name}"
        raise


def describe_alias(_: Sphinx, what: str, name: str, found: Any, __: object, lines: list[str]) -> None:
    """Give an alias of a type its own docstring, which stands behind it in the module that defines it."""
    if what == "data" and not isinstance(found, type) and name.rpartition(".")[2] in (aliases := _aliases()):
        lines[:] = [*aliases[name.rpartition(".")[2]].splitlines(), ""]


@cache
def _aliases() -> dict[str, str]:
    """Return the docstrings behind the assignments of all modules, by the name that is assigned."""
    found: dict[str, str] = {}
    for path in sorted((DOCS.parent / "streamiter").rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for assigned, text in pairwise(body):
            match assigned, text:
                case (
                    ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found.setdefault(name, cleandoc(docstring))
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions to Sphinx."""
    app.connect("source-read", link_to_the_repository)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", describe_alias)
    app.connect("missing-reference", link_to_the_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
