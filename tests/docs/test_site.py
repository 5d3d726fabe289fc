"""The website: its navigation, its links, and that every public name is on a page. ``make site`` builds it."""

import ast
import functools
import importlib
import json
import re
import runpy
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*")) if path.suffix in (".md", ".ipynb")]
NAVIGATION: dict[str, dict[str, list[str]]] = tomllib.loads((DOCS / "site" / "navigation.toml").read_text("utf-8"))
HIDDEN_ROOMS = {"streamiter.cli", "streamiter.engine", "streamiter.flow", "streamiter.values"}
"""Rooms without public names, and the program, which has a page of its own."""
CONNECTORS = ["streamiter_files", "streamiter_kafka", "streamiter_sqlite"]


def named_pages(names: list[str]) -> list[str]:
    return [
        path.relative_to(DOCS).as_posix().removesuffix(".md")
        for name in names
        for path in (sorted(DOCS.glob(f"{name}.md")) if "*" in name else [DOCS / name])
    ]


def test_every_page_is_once_in_the_navigation() -> None:
    """A page was written, and readers of the website could not find it."""
    shown = Counter(page for below in NAVIGATION.values() for pages in below.values() for page in named_pages(pages))
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES}
    assert {page for page, count in shown.items() if count > 1} == set()
    assert set(shown) == written - {"index"}
    assert set(NAVIGATION) <= written


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the website make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def test_links_lead_to_headings_that_exist() -> None:
    """A heading was changed, and links to it led to the top of a long page."""
    wrong = []
    known = functools.cache(anchors)
    for page in [*PAGES, ROOT / "README.md", ROOT / "ARCHITECTURE.md"]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text("utf-8")):
            document = (page.parent / target) if target else page
            if not document.is_file() or anchor not in known(document):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert wrong == []


def rooms() -> list[ModuleType]:
    """Return the modules from which users import: the package, its public rooms, and the connectors."""
    names = [f"streamiter.{path.parent.name}" for path in sorted((ROOT / "streamiter").glob("*/__init__.py"))]
    public = [name for name in names if name not in HIDDEN_ROOMS]
    return [
        importlib.import_module(name)
        for name in ["streamiter", *public, "streamiter.parameter_server.psf", "streamiter.errors", *CONNECTORS]
    ]


def objects_of_pages() -> list[tuple[str, str]]:
    """Return the module and the name of each object that a page of the reference describes."""
    found = []
    for page in sorted((DOCS / "reference").glob("*.md")):
        module = ""
        for directive, name in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text("utf-8"), re.MULTILINE):
            if directive == "currentmodule":
                module = name
            elif directive == "automodule":
                found.append((name, ""))
            else:
                assert directive in {"autoclass", "autoexception", "autofunction", "autodata"}, page
                found.append((module, name))
    return found


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    """113 of 269 public names were on no page, so that their users read the source."""
    described = objects_of_pages()
    assert [each for each, count in Counter(described).items() if count > 1] == []
    values = [getattr(importlib.import_module(module), name) for module, name in described if name]
    whole = {module for module, name in described if not name}
    missing = [
        f"{room.__name__}.{name}"
        for room in rooms()
        for name in getattr(room, "__all__", [])
        if not any(getattr(room, name) is value for value in values) and f"{room.__name__}.{name}" not in whole
    ]
    assert missing == []
    assert "streamiter.errors" in whole
    assert [
        f"{module}.{name}" for module, name in described if name and name not in dir(importlib.import_module(module))
    ] == []


ADDRESS = re.compile(r"(?:/streamiter/newest|\{DOCUMENTATION\}|\{documentation\})/([\w/-]+)\.html(?:#([\w-]+))?")


def test_addresses_in_messages_lead_to_pages_that_exist() -> None:
    """The file of a service named docs/service.md, which users of a wheel do not have."""
    files = [path for room in ("streamiter", "connectors", "examples") for path in sorted((ROOT / room).rglob("*.py"))]
    found = [(path, *address) for path in files for address in ADDRESS.findall(path.read_text("utf-8"))]
    assert len(found) >= 5
    for path, page, anchor in found:
        assert (DOCS / f"{page}.md").is_file(), path
        assert not anchor or anchor in anchors(DOCS / f"{page}.md"), path


def test_code_names_no_file_of_docs_to_users() -> None:
    """A message or a docstring sent users of a wheel to a file that only a checkout has."""
    public = [
        *(ROOT / "streamiter" / "flow").glob("*.py"),
        ROOT / "streamiter" / "service" / "settings" / "proposal.py",
    ]
    assert [path for path in public if re.search(r"docs/[\w-]+\.md", path.read_text("utf-8"))] == []


ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data):`~?([^`<>]+)`")


def roles() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the roles of all docstrings, each with the dotted names of what is around it; the third is its module."""
    for folder, packages in ((ROOT / "streamiter", "streamiter"), (ROOT / "connectors", "")):
        for path in sorted(folder.rglob("*.py")):
            parts = [*([packages] if packages else []), *path.relative_to(folder).with_suffix("").parts]
            module = ".".join(part for part in parts if part != "__init__")
            rooms_of = [".".join(parts[:count]) for count in (1, 2)]  # whose names stand on a page of the reference
            if ROLE.search(text := path.read_text("utf-8")):
                yield from sorted(set(_roles_in(ast.parse(text), (*rooms_of, module))))


def _roles_in(node: ast.AST, around: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant) and isinstance(inner.value.value, str):
            yield from ((target, around) for target in ROLE.findall(inner.value.value))
        is_place = isinstance(inner, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _roles_in(inner, (*around, f"{around[-1]}.{inner.name}") if is_place else around)


def names_something(name: str) -> bool:
    """Return whether a dotted name leads to a module, an object of it, or a member or field of a class."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            fields = {each for owner in getattr(found, "__mro__", ()) for each in getattr(owner, "__annotations__", {})}
            if not hasattr(found, part):
                return part in fields
            found = getattr(found, part)
        return True
    return False


def test_roles_of_docstrings_name_what_exists() -> None:
    """A function was renamed, and docstrings named the old one: the website was not built any more."""
    exists = functools.cache(names_something)
    assert [
        f"{around[2]}: {target}"
        for target, around in roles()
        if not any(map(exists, [target, *(f"{place}.{target}" for place in around)]))
    ] == []


def test_a_published_version_replaces_its_folder_and_the_choice_names_all(tmp_path: Path) -> None:
    """A release replaced the pages of an older one, which many still had, or old pages stayed among the new."""
    publish = runpy.run_path(str(DOCS / "site" / "publish.py"))["publish"]
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    for version, page in [("main", "old.html"), ("0.9", "a.html"), ("0.10", "a.html"), ("main", "new.html")]:
        for path in site.iterdir():
            path.unlink()
        (site / "index.html").write_text(version)
        (site / page).write_text(version)
        publish(site, pages, version)
    choice = json.loads((pages / "versions.json").read_text())
    assert [each["version"] for each in choice] == ["0.10", "0.9", "main"]
    assert [each["version"] for each in choice if each["preferred"]] == ["0.10"]
    assert sorted(path.name for path in (pages / "main").iterdir()) == ["index.html", "new.html"]
    assert 'location.replace("0.10/"' in (pages / "index.html").read_text()
    assert 'location.replace("../0.10/a.html" + location.hash)' in (pages / "newest" / "a.html").read_text()
    assert not (pages / "newest" / "new.html").exists()
    with pytest.raises(SystemExit, match=r"expected main or a number such as 0\.1, given 'v1'"):
        publish(site, pages, "v1")
