"""The options of steps and of runs, as typed dicts: a misspelt option is an error of the type checker, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Literal, Required, TypedDict

from streamiter.errors import did_you_mean

if TYPE_CHECKING:
    from streamiter.engine.checkpointing.commit import JobSnapshot
    from streamiter.engine.plan.job_settings import ChannelLimits
    from streamiter.engine.storage.store import Checkpoints
    from streamiter.operators.output import DeadLetter, RejectionPolicy
    from streamiter.operators.services import Service
    from streamiter.topics.topic import SourceStart, StartPosition, StopPosition, Topic
    from streamiter.values.helpers.clock import Clock
    from streamiter.values.records import OutputTag
    from streamiter.values.times import Seconds


class GatheringOptions(TypedDict, total=False):
    """Options of a step that brings all records together in one subtask."""

    name: str | None
    """The name of the step, unique in the flow; None: the engine chooses one."""
    on_error: RejectionPolicy
    """What happens to a record for which a function raises: ``"fail"`` (the default) ends the job, ``"skip"`` drops
    and counts the record."""
    dead_letter: Topic | None
    """The topic that such records are written to instead."""


class StepOptions(GatheringOptions, total=False):
    """Options that steps have in common."""

    parallelism: int | None
    """The number of subtasks; None: the parallelism of the stream, or of the flow behind a repartitioned stream."""


class ProcessOptions(StepOptions, total=False):
    """Options of a step with an operator of the user."""

    parameter_server: Service | None
    """The parameter server whose workers the subtasks are."""


class JoinOptions(StepOptions, total=False):
    """Options of joins in event time, for their types; each join describes its own."""

    allowed_lateness_s: Seconds
    late: OutputTag | None


class ClockedJoinOptions(JoinOptions, total=False):
    """Options of joins in event time or by the clock, for their types."""

    time: Literal["event", "processing"]


class IntervalOptions(ClockedJoinOptions, total=False):
    """Options of ``interval_join``, for its types."""

    lower_s: Required[Seconds]
    upper_s: Required[Seconds | None]
    one_to_one: bool
    kept_max: int | None


class TableOptions(ClockedJoinOptions, total=False):
    """Options of a join with a table, for its types."""

    strict: bool
    wait_for_table: bool


class SourceOptions(StepOptions, total=False):
    """Options of ``flow.source``, which describes them."""

    start: SourceStart | None
    first_start: StartPosition | None
    stop: StopPosition
    on_lost: Literal["fail", "skip"]


class RunOptions(TypedDict, total=False):
    """Options of ``flow.run`` and ``flow.start``, which describes them."""

    clock: Clock | None
    channel_limits: ChannelLimits | None
    stall_after_s: Seconds | None
    checkpoints: Checkpoints | None
    restore: Literal["last"] | int | None
    changed_steps: Iterable[str]
    on_restore: Callable[[int], None] | None
    on_rejected: Callable[[DeadLetter], None] | None
    snapshot: JobSnapshot | None
    new_id: Callable[[], str] | None


def survives(options: StepOptions) -> bool:
    """Return whether the step continues after a refused record."""
    return options.get("on_error", "fail") != "fail" or options.get("dead_letter") is not None


def check_step_options(method: str, options: Mapping[str, object], allowed: type = StepOptions) -> None:
    """Raise TypeError for an option that ``allowed``, a TypedDict, does not have."""
    names = allowed.__annotations__
    for name in options:
        if name not in names:
            known = [*_own_options(method), *names]
            meant = did_you_mean(name, known)
            listed = ", ".join(f"{each}=" for each in known)
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}; its options are {listed}{meant}")


def _own_options(method: str) -> list[str]:
    """Return the arguments of the method that checks its options; the TypedDict of the options does not have them."""
    frame: FrameType | None = sys._getframe(1)  # The methods of users' programs are above the checks, not below.
    while frame is not None and frame.f_code.co_name != method:
        frame = frame.f_back
    if frame is None:
        return []
    code = frame.f_code
    return [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name != "self"]
