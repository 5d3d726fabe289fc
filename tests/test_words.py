"""The words of the project, and the tree of exceptions at the top of ``streamiter/errors.py``."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from streamiter import errors

ROOT = Path(__file__).parents[1]
SOURCES = [path for room in ("streamiter", "connectors") for path in sorted((ROOT / room).rglob("*.py"))]

SHARED_NAMES = {
    "FEEDBACK",  # the input of a head, and a part of a snapshot
    "Map",  # the operator, and Angel's function of the parameter server, as the next three
    "Max",
    "Min",
    "Sum",
    "main",  # what runs a program
    "pointer_to",  # compiled code needs it as a name of its own module
    "show",  # a command of several groups, as the next one
    "tail",
}
"""The names that several modules define."""

WORDS_MAX = 60


class Facts(NamedTuple):
    """What the tests ask of a module."""

    names: frozenset[str]
    """The public names that it defines."""
    doubled: tuple[int, ...]
    """The lines of second docstrings."""
    bases: dict[str, str]
    """The first base of each class, by the name of the class."""


@functools.cache
def facts() -> dict[Path, Facts]:
    """Read all modules once: to parse them takes most of the time of these tests."""
    found = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        bodies = [body for node in nodes if isinstance(body := getattr(node, "body", None), list)]
        doubled = [second.lineno for body in bodies for first, second in pairwise(body) if _are_texts(first, second)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.bases]
        bases = {node.name: node.bases[0].id for node in classes if isinstance(node.bases[0], ast.Name)}
        found[path] = Facts(frozenset(_names(tree)), tuple(doubled), bases)
    return found


def test_a_name_is_defined_in_one_module() -> None:
    """A reader looked for ``Row`` and found six, for ``Labels`` and found three things."""
    modules: dict[str, set[Path]] = defaultdict(set)
    for path, known in facts().items():
        for name in known.names:
            modules[name].add(path)
    assert {name for name, paths in modules.items() if len(paths) > 1} == SHARED_NAMES


def _names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not _is_type_variable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)]
        else:
            found = []
        yield from (name for name in found if not name.startswith("_"))


def _is_type_variable(value: ast.expr | None) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "ParamSpec")
    )


def test_an_attribute_has_one_docstring() -> None:
    """An attribute was renamed, and its old docstring remained below the new one."""
    assert [f"{path.relative_to(ROOT)}:{line}" for path, known in facts().items() for line in known.doubled] == []


def _are_texts(*nodes: ast.stmt) -> bool:
    return all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in nodes
    )


def test_a_headline_has_something_below_it() -> None:
    """Functions moved to another module, and their headline stayed behind."""
    empty = [
        f"{path.relative_to(ROOT)}: {headline}"
        for path in SOURCES
        for headline in re.findall(
            r"^ *(# -{2,} .*)\n+(?= *# -{2,} |\Z)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert empty == []


def test_the_glossary_has_few_words_each_once() -> None:
    """The glossary had "clock" for two things, and lacked a third of the words that a contributor met."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Glossary")[2].partition("\n## ")[0]
    words = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(words) <= WORDS_MAX
    assert words == sorted(set(words))


def test_the_architecture_names_only_what_exists() -> None:
    """Its way of a record went through a method of tasks that had long been renamed."""
    codes = set(re.findall(r"`([^`\n]+)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    paths = {path.as_posix() for path in SOURCES}
    gone = {
        code
        for code in codes
        if re.fullmatch(r"[\w/]+\.py", code)
        and not (ROOT / code).exists()
        and not any(path.endswith(f"/{code}") for path in paths)
    }
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    for kind, method in (match.groups() for code in codes if (match := re.fullmatch(r"([A-Z]\w*)\.(\w+)", code))):
        defining = [text for text in texts if f"\nclass {kind}" in text]
        if not any(re.search(rf"\b{method}\b", text) for text in defining):
            gone.add(f"{kind}.{method}")
    assert gone == set()


_SOURCES = Path(errors.__file__).parent


def drawn_parents() -> dict[str, str]:
    """Return the parent of each exception that the docstring draws."""
    drawn: dict[str, str] = {}
    path = ["StreamiterError"]
    for prefix, name in re.findall(r"^    ([│ ]*[├└]── )(\w+)", errors.__doc__ or "", re.MULTILINE):
        level = len(prefix) // 4
        drawn[name] = path[level - 1]
        path[level:] = [name]
    return drawn


def defined_parents() -> dict[str, str]:
    """Return the parent of each exception that the package defines, below ``StreamiterError``."""
    bases = {
        name: base
        for path, known in facts().items()
        if path.is_relative_to(_SOURCES) and "testing" not in path.parts  # the simulator has its own faults
        for name, base in known.bases.items()
    }

    def is_error(name: str) -> bool:
        return name == "StreamiterError" or (name in bases and is_error(bases[name]))

    return {name: base for name, base in bases.items() if name != base and is_error(base)}


def test_the_tree_is_drawn_with_all_its_exceptions() -> None:
    """The tree, from which users choose the errors to catch, missed some of them and had one wrong parent."""
    assert drawn_parents() == defined_parents()
