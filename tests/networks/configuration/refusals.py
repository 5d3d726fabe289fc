"""Helpers for tests of configurations with errors, and of their messages."""

from collections.abc import Callable
from typing import Any

import pytest
from networks.published import layer

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration import read_configuration

Change = Callable[[dict[str, Any]], object]


def refused(source: Any) -> str:
    """Read an invalid configuration, and return the text of the error."""
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(source)
    return str(caught.value)


def replaced(name: str, /, **keys: Any) -> Change:
    """Return a change of the document that gives a layer other keys; ... removes a key."""

    def change(document: dict[str, Any]) -> None:
        found = layer(document, name)
        found.update(keys)
        for key in [key for key, value in found.items() if value is ...]:
            del found[key]

    return change


def at_top(**keys: Any) -> Change:
    return lambda document: document.update(keys)


def within(section: str, **keys: Any) -> Change:
    return lambda document: document[section].update(keys)


def added(**keys: Any) -> Change:
    return lambda document: document["layers"].append(keys)


def small(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layers": list(layers)}
