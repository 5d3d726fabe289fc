"""The round under way of a step that begins anew in each epoch, for another number of subtasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamiter.runtime.checkpointing.redistribution.old_job import OldJob
from streamiter.runtime.graph import Step

__all__ = ["rounds_for"]

ShareOut = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def rounds_for(
    old: OldJob, step: Step, rounds: Sequence[dict[str, Any] | None], share_out: ShareOut, *, hears_ends: bool
) -> list[dict[str, Any]]:
    """What each new subtask goes on from; ``share_out`` shares out the states of the operators that live.

    Where one lives, there is one in each new subtask: it ends with the round, whether it got anything or not.
    """
    alive = [each for each in rounds if each is not None and each["epoch"] is not None]
    if not alive:
        return [{"epoch": None} for _ in range(step.parallelism)]
    told = [set(each["told"]) for each in alive]
    if len({each["epoch"] for each in alive}) > 1 or (hears_ends and any(each != told[0] for each in told)):
        raise old.not_between(
            step.name, step.parallelism, "some of them are further in their rounds than others"
        )
    heard = [name for name in alive[0]["told"] if all(name in each for each in told)]
    states = share_out([each["instance"] for each in alive])
    return [{"epoch": alive[0]["epoch"], "told": heard, "instance": state} for state in states]
