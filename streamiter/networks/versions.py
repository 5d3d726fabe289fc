"""What a published version of a network is: its parameters by name, and the network itself as its canonical JSON.

So whoever follows a model needs nothing else to predict with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import holds
from streamiter.models.parameters import Parameters
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array

__all__ = ["NETWORK", "checked_arrays", "network_of_version", "version_of"]

NETWORK: Final = "network"
"""Under which the JSON stands beside the arrays, whose names have a dot each."""


def version_of(network: Network, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The parameters of a version."""
    return {NETWORK: json.dumps(network.to_json()), **arrays}


def network_of_version(parameters: Parameters, subject: str) -> tuple[Network, dict[str, Array]]:
    """The network, and its arrays. Raises ModelError, which begins with ``subject``, for what is no version of one."""
    text = parameters.get(NETWORK) if isinstance(parameters, dict) else None
    if not isinstance(text, str):
        given = ", ".join(map(repr, parameters)) if isinstance(parameters, dict) else "an array"
        raise ModelError(f"{subject}: expected {NETWORK!r} beside the arrays of a network, given {given}")
    assert isinstance(parameters, dict)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):  # A text would be read as the path of a file.
        raise ModelError(f"{subject}: expected {NETWORK!r} as a JSON object, given {text!r:.100}")
    network = Network.from_json(document)
    return network, checked_arrays(network, parameters, subject)


def checked_arrays(network: Network, given: Mapping[str, Any], subject: str) -> dict[str, Array]:
    """The parameters that the network has, of their shapes and its dtype.

    Raises ModelError where one is missing, of another shape, or not of finite numbers, and for arrays that the network
    does not have: it would be another network than the one they were trained in.
    """
    arrays: dict[str, Array] = {}
    parameters = network.graph().parameters
    others = given.keys() - {parameter.name for parameter in parameters} - {NETWORK}
    if others:
        raise ModelError(
            f"{subject}: expected no arrays but those of the network, given {', '.join(sorted(map(repr, others)))}; "
            "load it with the network that it was trained as, or leave them out"
        )
    for parameter in parameters:
        array = given.get(parameter.name)
        if getattr(array, "shape", None) != parameter.shape:
            shape = "none" if array is None else f"shape {getattr(array, 'shape', None)}"
            raise ModelError(
                f"{subject}: expected {parameter.name!r} of shape {parameter.shape}, given {shape}; "
                "load it with the network that it was trained as"
            )
        arrays[parameter.name] = _finite(parameter.name, array, network, subject)
    return arrays


def _finite(name: str, array: Any, network: Network, subject: str) -> Array:
    """In the network's dtype, in which a number of float64 may be too large."""
    with np.errstate(over="ignore"):
        numbers: Array | None = (
            array.astype(network.dtype, copy=False) if array.dtype.kind in "biuf" else None
        )
    if numbers is None or not holds(np.isfinite(numbers)):
        given = f"an array of {array.dtype}" if numbers is None else numbers[~np.isfinite(numbers)][0]
        raise ModelError(
            f"{subject}: expected {name!r} of finite numbers in {network.dtype}, given {given}; "
            "take another version of the model"
        )
    return numbers
