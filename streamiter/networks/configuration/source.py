"""Where a configuration comes from: a JSON file, or what such a file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration.where import Where

__all__ = ["read_source"]

_OF_A_MAPPING = "configuration"


def read_source(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], Where]:
    """The object at the top, and the name of the file for messages."""
    if isinstance(source, Mapping):
        return source, Where(_OF_A_MAPPING)
    if not isinstance(source, (str, PathLike)):
        raise ConfigurationError(
            f"{_OF_A_MAPPING}: expected the path of a JSON file, or a dict with what it says, "
            f"given {type(source).__name__}"
        )
    path = Path(source)
    where = Where(path.name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path}: expected a JSON file, given {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise where.error(f"expected JSON in UTF-8, given a wrong byte at {error.start}") from error
    document = _parsed(text, where)
    if not isinstance(document, dict):
        raise where.wrong_kind("a JSON object", document)
    return document, where


def _parsed(text: str, where: Where) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The object; plain JSON would keep the last of two layers of one name, and say nothing."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise where.error(
                f"expected each key of an object once, given {twice!r} twice; rename or remove one"
            )
        return found

    def no_number(constant: str) -> NoReturn:
        raise where.error(f"expected JSON, given {constant}, which is no number of JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        raise where.error(
            f"expected JSON, given something else in line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise where.error(f"expected numbers that can be read, given one that cannot: {error}") from error
    except RecursionError as error:
        raise where.error("expected JSON, given objects nested too deep to be read") from error
