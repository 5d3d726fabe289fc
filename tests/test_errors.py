"""The tree of exceptions at the top of ``streamiter/errors.py`` is compared with the classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from streamiter import errors

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
        node.name: base.id
        for source in _SOURCES.rglob("*.py")
        if "testing" not in source.parts  # the simulator has its own faults
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef) and node.bases
        for base in node.bases[:1]
        if isinstance(base, ast.Name)
    }

    def is_error(name: str) -> bool:
        return name == "StreamiterError" or (name in bases and is_error(bases[name]))

    return {name: base for name, base in bases.items() if name != base and is_error(base)}


def test_the_tree_is_drawn_with_all_its_exceptions() -> None:
    """The tree, from which users choose the errors to catch, missed some of them and had one wrong parent."""
    assert drawn_parents() == defined_parents()
