"""Functions and classes by their names, so that another process can import them; no pickle.

:func:`importable_name` returns the name of an object, and :func:`imported` the object of a name. :func:`describe` and
:func:`resolve` do the same for values, for ``functools.partial``, and for files that are in no package. :func:`of_user`
tells errors of the user's code from those of streamiter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec
from sysconfig import get_paths
from types import ModuleType
from typing import Any, Final, TypeVar

from streamiter.errors import ConfigurationError, StreamiterError

Result = TypeVar("Result")

IS_LOADING: Final[ContextVar[bool]] = ContextVar("is_loading", default=False)
"""Whether a process that another one has started is importing the program, to find its flow. A program without
``if __name__ == "__main__":`` would start a run there, whose processes would import the program, and so on."""


def need_package(user: str, package: str, extra: str, otherwise: str = "") -> None:
    """Raise ConfigurationError unless an optional package is installed; ``otherwise`` says what works without it."""
    if find_spec(package) is None:
        raise ConfigurationError(
            f"{user}: expected the package {package}, found none; install it with: pip install 'streamiter[{extra}]'"
            + otherwise
        )


def imported(name: str, who: str, what: str = "a function") -> Any:
    """Return the object that ``"module:name"`` names; raise ConfigurationError (beginning with ``who``) if it fails.

    >>> imported("math:sqrt", "psf.Map")(4.0)
    2.0
    """
    module, colon, qualified_name = name.partition(":")
    if not (module and colon and qualified_name):
        raise ConfigurationError(f"{who}: expected {what} or its name as 'module:function', given {name!r}")
    try:
        return _attribute(importlib.import_module(module), qualified_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{who}: expected {what} that can be imported, given {name!r}: {error}; if the module exists, add its "
            "folder to PYTHONPATH"
        ) from error


def importable_name(thing: Callable[..., Any], who: str, what: str, *, in_program: bool = False) -> str:
    """Return the ``"module:name"`` of a function or class; raise ConfigurationError if it has none.

    ``in_program`` allows names of the program that was started, if it is a file.

    >>> importable_name(functools.reduce, "psf.Map", "its function")
    '_functools:reduce'
    """
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    # A function of numpy's does not know its module.
    module = getattr(thing, "__module__", None) or ("numpy" if type(thing).__module__ == "numpy" else None)
    reason = _why_not_importable(thing, module, name, in_program)
    if reason is not None:
        raise ConfigurationError(
            f"{who}: expected {what} at the top level of a module, so that another process can import it, given "
            f"{thing!r}, which {reason}"
        )
    return f"{module}:{name}"


def _why_not_importable(thing: object, module: str | None, name: str | None, in_program: bool) -> str | None:
    if not module or not name:
        return "has no name of its own"
    if module == _MAIN and not (in_program and os.path.exists(_file_of(module) or "")):
        return "is part of the program that was started; move it to a module"
    if "<" in name:  # <lambda>, <locals>
        return "is a lambda or is made inside a function; move it to the top level"
    try:
        found = imported(f"{module}:{name}", "")
    except ConfigurationError:
        found = None
    return None if found is thing else f"is not what '{module}:{name}' names"


def describe(value: object, what: str) -> tuple[Any, ...]:
    """Return a value as plain data: a function or class as its name, ``functools.partial`` part by part.

    ``what`` names the value in errors. Raises ConfigurationError for a function or class that cannot be imported.

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
    module, _, name = importable_name(value, what, "a function or class", in_program=True).partition(":")
    return ("name", module, _file_of(module), name)


def resolve(described: tuple[Any, ...]) -> Any:
    """Return the value that :func:`describe` described; import what it names."""
    match described:
        case ("value", value):
            return value
        case ("partial", function, arguments, named):
            given = {name: resolve(argument) for name, argument in named.items()}
            return functools.partial(resolve(function), *map(resolve, arguments), **given)
        case ("name", module, file, name):
            try:
                return _attribute(_module(module, file), name)
            except AttributeError:
                raise ConfigurationError(
                    f"expected {name!r} in module {module!r} of a fresh process, given a module without it; "
                    "define it at the top level, whatever imports the module"
                ) from None
    raise ConfigurationError(f"expected the description of a function or value, given {described!r:.100}")


def _attribute(module: ModuleType, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


# There, the main program has another name, so that its "if __name__ == '__main__'" block does not run.
_MAIN: Final = "__main__"
_MAIN_THERE: Final = "streamiter_restored_main"


def _module(name: str, file: str | None) -> ModuleType:
    name = _MAIN_THERE if name == _MAIN else name
    loaded = sys.modules.get(name)
    if loaded is None:
        try:
            loaded = importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
    if loaded is not None and (file is None or os.path.realpath(loaded.__file__ or "") == os.path.realpath(file)):
        return loaded
    assert file is not None
    # A test file is in no package, or another file of its name comes first on the path.
    return module_of_file(name, file)


def _file_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else os.path.abspath(file)


def module_of_file(name: str, file: str) -> ModuleType:
    """Run a Python file as the module of that name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"expected a Python file, given {file!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_user(call: Callable[[], Result], trouble: str) -> Result:
    """Return the result of the user's code; an error in it becomes a ConfigurationError with its file and line."""
    try:
        return call()
    except StreamiterError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{trouble}: {_place(error)}{type(error).__name__}: {error}") from error


def _place(error: BaseException) -> str:
    """Return the innermost line that is in no library."""
    if isinstance(error, SyntaxError):
        return ""  # its message has file and line
    libraries = (get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = ("<frozen", os.path.dirname(inspect.getfile(StreamiterError)) + os.sep, *libraries)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
