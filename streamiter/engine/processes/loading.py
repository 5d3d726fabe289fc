"""The flow that a text such as ``clicks.py:flow`` names, for commands and for other processes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.errors import ConfigurationError
from streamiter.values.helpers.importing import module_of_file, of_user

AnyFlow = TypeVar("AnyFlow", bound=RunnableFlow)


def load_flow(target: str, kind: type[AnyFlow]) -> AnyFlow:
    """Return the flow ``module:name`` or ``path/to/file.py:name``: a Flow, or a function that returns one.

    ``kind`` is the class of flows.

    The current folder (for a file, its own folder) is on the import path, as with ``python -m`` (``python file.py``).
    An error in the user's code becomes a ``ConfigurationError`` with its file and line.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(f"expected module:flow or file.py:flow, given {target!r}; for example: clicks.py:flow")
    importing = _import_file if module_name.endswith(".py") else _import_module
    module = of_user(lambda: importing(module_name), f"{module_name} cannot be imported")
    found = _attribute(module, module_name, name)
    if callable(found):
        _check_makes_a_flow(found, target, module)
    flow = of_user(found, f"{target} failed") if callable(found) else found
    if inspect.iscoroutine(flow):
        flow.close()  # It is never awaited, about which Python would warn.
    if not isinstance(flow, kind):
        raise ConfigurationError(
            f"{target}: expected a Flow or a function that returns one, given {_described(found, flow)}"
        )
    return flow


def _check_makes_a_flow(found: Callable[..., object], target: str, module: ModuleType) -> None:
    """Refuse a function with arguments, or one annotated to return None, before it is called.

    A function ``main() -> None`` would run the whole program first.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some functions that are not written in Python have no signature
        return
    try:
        signature.bind()
    except TypeError:
        shown = f"{target.rpartition(':')[2]}({', '.join(signature.parameters)})"
        raise ConfigurationError(
            f"{target}: expected a function without arguments, given {shown}; {_known(module)}"
        ) from None
    if signature.return_annotation in (None, "None"):
        raise ConfigurationError(
            f"{target}: expected a Flow or a function that returns one, given a function that returns None; "
            f"{_known(module)}"
        )


def _described(found: object, flow: object) -> str:
    if inspect.iscoroutine(flow):
        return "an async function"
    kind = type(flow).__name__
    return f"a function that returned {kind}" if found is not flow else kind


def _attribute(module: ModuleType, module_name: str, name: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigurationError(f"{module_name} has no {name!r}; {_known(module)}") from None


def _known(module: ModuleType) -> str:
    """Return a text with the names of flows, and of functions annotated to return one."""
    flows = [name for name, value in vars(module).items() if isinstance(value, RunnableFlow) or _says_flow(value)]
    return f"its flows are {', '.join(flows)}" if flows else "it has no Flow at the top level"


def _says_flow(value: object) -> bool:
    made = value.__annotations__.get("return") if inspect.isfunction(value) else None
    return made == "Flow" or (isinstance(made, type) and issubclass(made, RunnableFlow))


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; a module that it imports does not
        raise ConfigurationError(
            f"no module {name!r} in {Path.cwd()} or the installed packages; give module:flow or file.py:flow"
        ) from error


def _import_file(file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise ConfigurationError(f"no file {file!r} in {Path.cwd()}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return module_of_file(path.stem, file)
