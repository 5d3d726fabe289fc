"""What a published version of a network is: its parameters by name, and the network itself as its canonical JSON.

So whoever follows a model needs nothing else to predict with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from streamiter.errors import ModelError
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
    network = Network.from_json(json.loads(text))
    return network, checked_arrays(network, parameters, subject)


def checked_arrays(network: Network, given: Mapping[str, Any], subject: str) -> dict[str, Array]:
    """The parameters that the network has, of their shapes and its dtype.

    Raises ModelError where one is missing or of another shape, and for arrays that the network does not have: it would
    be another network than the one they were trained in.
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
        arrays[parameter.name] = array.astype(network.dtype, copy=False)  # type: ignore[union-attr]
    return arrays
