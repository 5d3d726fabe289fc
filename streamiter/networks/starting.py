"""What the parameters are before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamiter.errors import ModelError
from streamiter.models.last import last_update
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.networks.versions import checked_arrays
from streamiter.operators.rejection import shortened
from streamiter.topics.topic import Topic

__all__ = ["Published", "Start", "check_start", "starting_parameters"]

_GIVEN: Final = "parameters to begin with"


@dataclass(frozen=True)
class Published:
    """The parameters last published in a topic; where there are none yet, new ones.

    >>> from streamiter import topic
    >>> start = Published(topic("memory://models"), "census")
    """

    topic: Topic
    model: str


Start = Mapping[str, Any] | Published | None
"""Arrays by name, or what was published last; None: new ones, as the network and the seed say."""


def check_start(start: Start, network: Network) -> None:
    """Raise ModelError for arrays that are not those of the network; what was published is looked at later."""
    if start is None or isinstance(start, Published):
        return
    if not isinstance(start, Mapping):
        raise ModelError(
            f"{_GIVEN}: expected arrays by name, or Published(topic, model), given {shortened(start)}; "
            "those of a saved network are its parameters"
        )
    checked_arrays(network, start, _GIVEN)


async def starting_parameters(start: Start, network: Network, seed: int) -> dict[str, Array]:
    """All parameters by name.

    Raises ModelError for arrays that are not those of the network.
    """
    if isinstance(start, Published):
        update = await last_update(start.topic, start.model)
        if update is None:
            return network.initial_parameters(seed)
        subject = f"model {start.model!r} of {start.topic.url}, update {update.generation}.{update.version}"
        given = update.parameters if isinstance(update.parameters, dict) else {}
        return checked_arrays(network, given, subject)
    if start is not None:
        return checked_arrays(network, start, _GIVEN)
    return network.initial_parameters(seed)
