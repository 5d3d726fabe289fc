"""What a loop must be for several processes to share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamiter.errors import GraphError
from streamiter.runtime.graph import Step

if TYPE_CHECKING:
    from streamiter.iteration.loop import Loop

__all__ = ["check_can_be_shared"]


def check_can_be_shared(loop: Loop, step: Step) -> None:
    """Raise GraphError for a loop in which something waits for complete epochs: no worker knows of any.

    ``step`` is one of its steps, whose line is told.
    """
    if loop.bounded:
        _refuse(step, "an unbounded iteration", "a bounded one", "use iterate_unbounded_streams")
    if loop.max_epochs_ahead is not None:
        given = f"max_epochs_ahead={loop.max_epochs_ahead}"
        _refuse(step, "max_epochs_ahead=None", given, "leave it out: a shared loop is asynchronous")
    if loop.has_stamped_data:
        _refuse(step, "data without epochs", "data of epochs_every", "leave epochs_every out")


def _refuse(step: Step, expected: str, given: str, instead: str) -> None:
    raise GraphError(
        f"step {step.name!r}: expected {expected} in a loop that workers share, given {given}; {instead}",
        where=step.where,
    )
