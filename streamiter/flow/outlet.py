"""The outlet: where a stream comes from, and how its records find the subtasks of the next step."""

from __future__ import annotations

from typing import NamedTuple

from streamiter.records import OutputTag
from streamiter.runtime.graph import Step
from streamiter.runtime.partitioning import Partitioning

__all__ = ["Outlet"]


class Outlet(NamedTuple):
    """One output of one step, with the partitioning chosen for the next."""

    step: Step
    tag: OutputTag | None = None
    partitioning: Partitioning | None = None
