"""Helpers for tests of configurations with errors, and of their messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from networks.published import deep_fm, layer

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration import read_configuration

Change = Callable[[dict[str, Any]], object]


def refused(source: Any) -> str:
    """Read an invalid configuration, and return the text of the error."""
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(source)
    return str(caught.value)


def of_file(tmp_path: Path, document: Any) -> str:
    """Return the message for this document in a file called net.json."""
    path = tmp_path / "net.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return refused(path)


def assert_refused(tmp_path: Path, change: Change, said: str) -> None:
    """Check the message for a changed DeepFM, in a file and as a dict; ``said`` is without the file's name."""
    document = deep_fm()
    change(document)
    assert of_file(tmp_path, document) == f"net.json: {said}"
    assert refused(document) == f"configuration: {said}"


def case_id(value: Any) -> str:
    """Return the part of the message in front of the given value, as the name of a case."""
    return value.partition(" given ")[0] if isinstance(value, str) else ""


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
