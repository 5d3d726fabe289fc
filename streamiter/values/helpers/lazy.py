"""Names of a package that are imported when they are first used, so that followers of models import no engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, from its modules and their names, separated by spaces.

    A module whose only name is its own is a public module of the package.

    >>> get, _ = lazy_names("streamiter", {"streamiter.values.records": "Columns OutputTag"})
    >>> get("OutputTag").__name__
    'OutputTag'
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version(package)
        if name not in module_of:
            from streamiter.errors import no_attribute

            raise no_attribute(f"module {package!r}", name, module_of)
        module = import_module(module_of[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
