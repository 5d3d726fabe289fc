"""Words mean one thing: names of modules, docstrings of attributes, headlines, and the glossary."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

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


def test_a_name_is_defined_in_one_module() -> None:
    """A reader looked for ``Row`` and found six, for ``Labels`` and found three things."""
    modules: dict[str, set[Path]] = defaultdict(set)
    for path in SOURCES:
        for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
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
    doubled = [
        f"{path.relative_to(ROOT)}:{second.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(body := getattr(node, "body", None), list)
        for first, second in pairwise(body)
        if _is_text(first) and _is_text(second)
    ]
    assert doubled == []


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
