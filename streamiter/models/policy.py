"""What to do about records that claim to be updates of a model and cannot be read."""

from __future__ import annotations

from typing import Literal

from streamiter.errors import ConfigurationError
from streamiter.topics.topic import Topic

__all__ = ["OnError", "checked_policy"]

OnError = Literal["fail", "skip"]
"""``"fail"``: an error with topic, partition and offset; ``"skip"``: left out and counted."""


def checked_policy(given: OnError, topic: Topic, model: str) -> OnError:
    """``given``, or ``ConfigurationError`` for another word."""
    if given not in ("fail", "skip"):
        raise ConfigurationError(
            f"model {model!r} of {topic.url}: expected on_error 'fail' or 'skip', given {given!r}"
        )
    return given
