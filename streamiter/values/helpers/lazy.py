"""Names of a package that are imported when they are first used, so that followers of models import no engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, for the names that it imports ``if TYPE_CHECKING``.

    The list for type checkers is the only list: it is read from the package's source when a name is first looked up.

    >>> get, _ = lazy_names("streamiter")
    >>> get("OutputTag").__name__
    'OutputTag'
    """

    @cache
    def module_of() -> dict[str, str]:
        import ast
        from pathlib import Path

        source = ast.parse(Path(str(sys.modules[package].__file__)).read_text("utf-8"))
        block = next(each for each in source.body if isinstance(each, ast.If))
        imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
        return {name.name: str(each.module) for each in imports for name in each.names}

    def get(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version(package)
        if name not in module_of():
            from streamiter.errors import no_attribute

            raise no_attribute(f"module {package!r}", name, module_of())
        module = module_of()[name]
        # A public module of the package is imported from the package itself.
        value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of()})
