"""Arguments that the commands on topics share."""

from __future__ import annotations

from typing import Annotated

import typer

from streamiter.errors import ConfigurationError
from streamiter.topics import Topic, topic
from streamiter.topics.secrets import shown_url

__all__ = ["AsJson", "Url", "check_lasting", "lasting_topic"]

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A topic, as kafka://127.0.0.1:9092/clicks", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]


def lasting_topic(url: str) -> Topic:
    """The topic at ``url``, of which another program can know."""
    check_lasting(url)
    return topic(url)


def check_lasting(url: str) -> None:
    """Topics in memory are those of one program: what this one writes there would be gone at once."""
    if url.lower().startswith("memory:"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected a topic that lasts, given one in the memory of a single program; "
            "use a file instead: 'sqlite:///data.db?topic=clicks'"
        )
