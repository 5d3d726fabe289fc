"""Finding the flow that ``module:flow`` names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow

__all__ = ["load_flow"]


def load_flow(target: str) -> Flow:
    """The flow named ``module:name`` or ``path/to/file.py:name``: a Flow, or a function that makes one.

    The current folder is on the import path, as with ``python -m``.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(
            f"expected module:flow or file.py:flow, given {target!r}; for example: streamiter run clicks:flow"
        )
    module = _import_file(module_name) if module_name.endswith(".py") else _import_module(module_name)
    try:
        found = getattr(module, name)
    except AttributeError:
        flows = [key for key, value in vars(module).items() if isinstance(value, Flow)]
        known = f"its flows are {', '.join(flows)}" if flows else "it has no Flow at the top level"
        raise ConfigurationError(f"module {module_name!r} has no {name!r}; {known}") from None
    flow = found() if callable(found) else found
    if not isinstance(flow, Flow):
        raise ConfigurationError(
            f"{target}: expected a Flow or a function that makes one, given {type(flow).__name__}"
        )
    return flow


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".", maxsplit=1)[0] and error.name != name:
            raise
        raise ConfigurationError(
            f"no module {name!r} in {Path.cwd()} or the installed packages; give module:flow or file.py:flow"
        ) from error


def _import_file(file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise ConfigurationError(f"no file {file!r} in {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
