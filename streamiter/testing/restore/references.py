"""Functions and classes by name, as another process can import them; no pickle."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Final

from streamiter.errors import ConfigurationError

__all__ = ["describe", "resolve"]

# The program itself is loaded under another name there, so that its "if __name__ == '__main__'" stays off.
_PROGRAM: Final = "__main__"
_PROGRAM_THERE: Final = "streamiter_restored_main"


def describe(value: Any, what: str) -> tuple[Any, ...]:
    """``value`` as plain data, if it is: a function or class as a name, ``functools.partial`` piece by piece.

    ``what`` names it in errors. Raises ConfigurationError for what cannot be imported elsewhere.

    >>> import operator
    >>> described = describe(functools.partial(operator.add, 3), "add")
    >>> resolve(described)(4)
    7
    """
    if isinstance(value, functools.partial):
        arguments = [describe(argument, what) for argument in value.args]
        named = {name: describe(argument, what) for name, argument in value.keywords.items()}
        return ("partial", describe(value.func, what), arguments, named)
    if not callable(value):
        return ("value", value)
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise _not_importable(what, f"an instance of {type(value).__name__}")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if "<" in name:
        raise _not_importable(what, f"{name.rpartition('.')[2]} of {module}, made inside a function")
    if loaded is None or _attribute(loaded, name) is not value:
        raise _not_importable(what, f"{name}, which {module} does not have under that name")
    if module == _PROGRAM and (file is None or not os.path.exists(file)):
        raise _not_importable(what, f"{name} of a program without a file")
    return ("name", module, None if file is None else os.path.abspath(file), name)


def resolve(described: tuple[Any, ...]) -> Any:
    """The reverse of :func:`describe`: imports what it names."""
    match described:
        case ("value", value):
            return value
        case ("partial", function, arguments, named):
            given = {name: resolve(argument) for name, argument in named.items()}
            return functools.partial(resolve(function), *map(resolve, arguments), **given)
        case ("name", module, file, name):
            found = _attribute(_module(module, file), name)
            if found is None:
                raise ConfigurationError(
                    f"expected {name!r} in module {module!r} of a fresh process, given a module without it; "
                    "define it at the top level, whatever imports the module"
                )
            return found
    raise ConfigurationError(f"expected the description of a function or value, given {described!r:.100}")


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        # Not through descriptors' errors: what is not there is None.
        found = getattr(found, part, None)
    return found


def _module(name: str, file: str | None) -> ModuleType:
    name = _PROGRAM_THERE if name == _PROGRAM else name
    loaded = sys.modules.get(name)
    if loaded is None:
        try:
            loaded = importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
    if loaded is not None and (file is None or _is_of(loaded, file)):
        return loaded
    assert file is not None
    # A test file is no part of a package, or another one of its name comes first on the path.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"expected a Python file, given {file!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_of(module: ModuleType, file: str) -> bool:
    given = getattr(module, "__file__", None)
    return given is not None and os.path.realpath(given) == os.path.realpath(file)


def _not_importable(what: str, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: expected what a fresh process can import (a class or function at the top level of a module, or "
        f"functools.partial of one), given {given}; define it there, or pass fresh_process=False"
    )
