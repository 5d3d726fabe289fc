"""Functions by their names, so that they can go to another process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError

__all__ = ["importable_name", "imported"]


def imported(name: str, who: str) -> Any:
    """What stands under ``module:name``. Raises ConfigurationError, which begins with ``who``.

    >>> imported("math:sqrt", "psf.Map")(4.0)
    2.0
    """
    module, colon, qualified_name = name.partition(":")
    if not (module and colon and qualified_name):
        raise ConfigurationError(
            f"{who}: expected a function or its name as 'module:function', given {name!r}"
        )
    try:
        return reduce(getattr, qualified_name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{who}: expected a function that can be imported, given {name!r}: {error}"
        ) from error


def importable_name(thing: Callable[..., Any], who: str, what: str) -> str:
    """``module:name``, under which another process finds the same; raises ConfigurationError if none does.

    >>> importable_name(np.exp, "psf.Map", "its function")
    'numpy:exp'
    """
    module = "numpy" if isinstance(thing, np.ufunc) else getattr(thing, "__module__", None)
    qualified_name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    reason = _why_not(thing, module, qualified_name)
    if reason is not None:
        raise ConfigurationError(
            f"{who}: expected {what} at the top level of a module, so that another process can import it, given "
            f"{thing!r}, which {reason}"
        )
    return f"{module}:{qualified_name}"


def _why_not(thing: Any, module: str | None, qualified_name: str | None) -> str | None:
    if not module or not qualified_name:
        return "has no name of its own"
    if module == "__main__":
        return "is part of the program that was started; move it to a module"
    if "<" in qualified_name:  # <lambda>, <locals>
        return "is a lambda or is made inside a function; move it to the top level"
    try:
        found = imported(f"{module}:{qualified_name}", "")
    except ConfigurationError:
        found = None
    return None if found is thing else f"is not what '{module}:{qualified_name}' names"
