"""The options that steps have in common."""

from __future__ import annotations

from typing import NamedTuple

from streamiter.operators.rejection import RejectionPolicy
from streamiter.operators.service import Service
from streamiter.topics.topic import Topic

__all__ = ["StepOptions"]


class StepOptions(NamedTuple):
    """What every method that adds a step takes."""

    name: str | None
    parallelism: int | None
    on_error: RejectionPolicy = "fail"
    dead_letter: Topic | None = None
    service: Service | None = None
