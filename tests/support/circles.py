"""Check that no modules import each other in a circle, also not late, and not for types only.

``make check`` runs this (``PYTHONPATH=tests``)::

    python -m support.circles
"""

import sys
from collections.abc import Iterable, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from typing import Final

import grimp

__all__ = ["circle_in", "imports_of"]

PACKAGES: Final = ("streamiter", "streamiter_files", "streamiter_kafka", "streamiter_sqlite")

# The fluent API: a stream makes keyed streams, and knows its flow, which makes streams.
FLUENT_API: Final = frozenset(
    {("streamiter.flow.stream", "streamiter.flow.flow"), ("streamiter.flow.stream", "streamiter.flow.keyed_stream")}
)


def imports_of(*packages: str) -> dict[str, Set[str]]:
    """Return for each module of these packages the modules that it imports, anywhere in its text."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circle_in(imports: Mapping[str, Set[str]], allowed: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return modules of which each is imported by the next one, the last by the first; empty if there are none.

    >>> circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}), circle_in({"a": {"b"}, "b": {"a"}}, [("b", "a")])
    (['b', 'c', 'b'], [])
    """
    left = {module: set(imported) for module, imported in imports.items()}
    for module, imported in allowed:
        left[module].discard(imported)
    try:
        TopologicalSorter(left).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


if __name__ == "__main__":
    if found := circle_in(imports_of(*PACKAGES), FLUENT_API):
        sys.exit(
            "expected no circle of modules but the fluent API of Stream, given (each is imported by the next) "
            f"{' → '.join(found)}; state what a module needs of another as a Protocol, or move it to the lower module"
        )
