"""Finding the flow that ``module:flow`` names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_paths
from types import ModuleType
from typing import Annotated, TypeVar

import typer

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.flow.flow import Flow

__all__ = ["Target", "load_flow"]

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FLOW",
        help="A Flow, or a function without arguments that makes one: clicks:flow, path/to/clicks.py:flow",
        show_default=False,
    ),
]

Result = TypeVar("Result")


def load_flow(target: str) -> Flow:
    """The flow named ``module:name`` or ``path/to/file.py:name``: a Flow, or a function that makes one.

    The current folder (for a file, its own) is on the import path, as with ``python -m`` (``python file.py``).
    What goes wrong in the user's own code is a ``ConfigurationError`` with its file and line.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(
            f"expected module:flow or file.py:flow, given {target!r}; for example: clicks.py:flow"
        )
    importing = _import_file if module_name.endswith(".py") else _import_module
    module = _users(lambda: importing(module_name), f"{module_name} cannot be imported")
    found = _attribute(module, module_name, name)
    if callable(found):
        _check_makes_a_flow(found, target, module)
    flow = _users(found, f"{target} failed") if callable(found) else found
    if inspect.iscoroutine(flow):
        flow.close()  # Nobody awaits it, and Python would say so.
    if not isinstance(flow, Flow):
        raise ConfigurationError(
            f"{target}: expected a Flow or a function that returns one, given {_described(found, flow)}"
        )
    return flow


def _check_makes_a_flow(found: Callable[..., object], target: str, module: ModuleType) -> None:
    """Refuse, before it is called, what cannot be called so or says itself that it returns nothing.

    A ``main() -> None`` would run the whole program first.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # of some that are not written in Python nothing is known
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
    """The flows there are, and the functions that say that they return one."""
    flows = [name for name, value in vars(module).items() if isinstance(value, Flow) or _says_flow(value)]
    return f"its flows are {', '.join(flows)}" if flows else "it has no Flow at the top level"


def _says_flow(value: object) -> bool:
    return inspect.isfunction(value) and value.__annotations__.get("return") in (Flow, "Flow")


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
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
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _users(call: Callable[[], Result], trouble: str) -> Result:
    """Run code of the user's; our own errors say what is wrong, all others are told with file and line."""
    try:
        return call()
    except StreamiterError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{trouble}: {_place(error)}{type(error).__name__}: {error}") from error


def _place(error: BaseException) -> str:
    """The innermost line that is not of a library."""
    if isinstance(error, SyntaxError):
        return ""  # its message has file and line
    libraries = (
        __file__,
        "<frozen",
        *(get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(libraries)
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
