"""The host of a run, such as this machine or a cluster, and the settings with which it starts each process.

A host starts and kills processes, and says when one has ended. It carries no data: each process connects to the
supervisor, and their conversation goes over links. The settings of a process are plain data, and the flow is shipped
as a reference, ``module:flow`` or ``path/to/file.py:flow``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from streamiter.engine.checkpointing.restore import check_restore_option
from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.engine.processes.link import Address
from streamiter.engine.processes.silence import SILENCE_S, ProcessLook
from streamiter.engine.storage.store import Checkpoints, is_url
from streamiter.errors import ConfigurationError, GraphError
from streamiter.values.numbers import positive, whole_number
from streamiter.values.times import Seconds, in_seconds

SUPERVISOR: Final = -1
"""The number of the supervisor at its links."""

PULSE_S: Final = 1.0
"""The time between two signs of life; less if five of them would not fit into the limit of silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """When a process is lost, and how many losses end the run: options of each kind of host."""

    silence_s: Seconds = SILENCE_S
    """How long a process may give no sign of life, in seconds, or as a ``timedelta``. A process that is silent because
    a function holds Python's lock is not lost, as ``lock_s`` says."""
    lock_s: Seconds | None = None
    """How long a function may hold Python's lock, in seconds, or as a ``timedelta``; None: as long as it likes, as in
    one process. Linux tells whether a silent process exists; elsewhere it is lost after ``silence_s``."""
    # A loss that comes back has a cause that a restart does not remove. A machine that restarts takes a few minutes.
    losses_max: int = 3
    """How often the flow starts again after a loss within ``losses_within_s``; one more loss ends the run."""
    losses_within_s: Seconds = 600.0
    """The time in which losses are counted, in seconds, or as a ``timedelta``."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("silence_s", "lock_s", "losses_within_s"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive(f"{owner}: {name}", in_seconds(value)))
        whole_number(f"{owner}: losses_max", self.losses_max, 0)


def limits_of(options: LossLimits) -> LossLimits:
    """Return these options alone: other options of a kind of host may be secrets, or no plain data."""
    return LossLimits(**{each.name: getattr(options, each.name) for each in dataclasses.fields(LossLimits)})


def pulse_s(limits: LossLimits) -> float:
    """Return the time between two signs of life."""
    return min(PULSE_S, in_seconds(limits.silence_s) / 5)


DEFAULT_LIMITS: Final = LossLimits()


class PlainOptions(msgspec.Struct, frozen=True):
    """The options of ``flow.run`` that all processes are given; None where they have their default."""

    channel_limits: ChannelLimits | None = None
    stall_after_s: float | None = None
    checkpoints: dict[str, str | int | float | None] | None = None
    """The fields of ``Checkpoints``."""
    restore: str | int | None = "last"
    changed_steps: tuple[str, ...] = ()

    @classmethod
    def of(cls, flow: str, given: Mapping[str, Any]) -> PlainOptions:
        """Return the options as plain data. Raises ConfigurationError for an option that cannot be."""
        options: dict[str, Any] = {
            name: in_seconds(value) for name, value in given.items() if value is not None or name == "restore"
        }
        if unknown := [name for name in options if name not in cls.__struct_fields__]:
            raise ConfigurationError(
                f"flow {flow!r}: expected only options together with on= that other processes can be given, given "
                f"{unknown[0]}=; leave it out, or run the flow in one process. The others are "
                f"{', '.join(cls.__struct_fields__)}"
            )
        check_restore_option(flow, options.get("restore", "last"))
        checkpoints = options.pop("checkpoints", None)
        names = tuple(sorted(options.pop("changed_steps", ())))
        return cls(**options, changed_steps=names, checkpoints=checkpoints and _plain_checkpoints(flow, checkpoints))

    def job_options(self) -> JobOptions:
        """Return the options of the job of a process."""
        given: dict[str, Any] = {"channel_limits": self.channel_limits, "stall_after_s": self.stall_after_s}
        if self.checkpoints is not None:
            given["checkpoints"] = Checkpoints(**self.checkpoints)  # type: ignore[arg-type]
        options = JobOptions(**{name: value for name, value in given.items() if value is not None})
        restore: Any = self.restore
        return dataclasses.replace(options, restore=restore, changed_steps=frozenset(self.changed_steps))


def _plain_checkpoints(flow: str, checkpoints: Checkpoints) -> dict[str, str | int | float | None]:
    fields = {each.name: getattr(checkpoints, each.name) for each in dataclasses.fields(checkpoints)}
    store = fields["store"]
    if isinstance(store, (str, os.PathLike)):
        fields["store"] = str(store) if is_url(store) else os.path.abspath(store)
    elif store is not None:
        raise ConfigurationError(
            f"flow {flow!r}: expected Checkpoints of a folder or a URL together with on=, given {store!r}; other "
            "processes open the store themselves"
        )
    return fields


def check_topics(flow: RunnableFlow, *, many_machines: bool) -> None:
    """Raise GraphError for a topic that the processes of a flow do not share, with each other and with the program."""
    for step in flow.steps:
        if step.topic is None or step.topic.seen_from == "network":
            continue
        here = step.topic.seen_from
        if here == "process" or many_machines:
            others = "processes" if here == "process" else "machines"
            instead = "" if many_machines else ", or of sqlite://"
            raise GraphError(
                f"step {step.name!r}: expected a topic that all {others} share together with on=, given "
                f"{step.topic.url}, of which each {here} has its own; use a topic of kafka://{instead}",
                where=step.where,
            )


class ProcessSettings(msgspec.Struct, frozen=True):
    """All that a process is given at its start, as plain data."""

    number: int
    """The number of the process, from 0."""
    processes: int
    """The number of processes of the run."""
    run: str
    """The id of the run. If a second supervisor resumes the run after a loss of the first, a hyphen and the id of the
    second one follow."""
    attempt: int
    """How many times the processes were started again after a loss."""
    secret: bytes
    """The secret of the run, for the handshakes of its links."""
    supervisor: Address
    """The address at which the supervisor listens."""
    listen: Address
    """The address at which the process listens; port 0 is a free port."""
    flow: str
    """The reference to the flow."""
    options: PlainOptions
    """The options of the job."""
    limits: LossLimits = DEFAULT_LIMITS
    """When a process is lost."""
    import_path: tuple[str, ...] = ()
    """``sys.path`` of the process; empty: its own."""
    arguments: tuple[str, ...] = ()
    """``sys.argv`` of the process, on which the program's flow may depend; empty: its own."""

    def job_options(self) -> JobOptions:
        """Return the options of the job of this attempt, whose run has a name of its own."""
        own = f"{self.run}-{self.attempt}"
        earlier = f"{self.run.partition('-')[0]}-"
        return dataclasses.replace(self.options.job_options(), new_id=lambda: own, earlier_runs=earlier)

    def __repr__(self) -> str:
        return f"ProcessSettings(process {self.number} of {self.processes}, {self.flow})"


class HostedProcess(Protocol):
    """A process that a host has started."""

    def kill(self) -> None:
        """End the process at once; no effect if it has ended."""

    async def look(self, process: int, note: int) -> ProcessLook | None:
        """Ask the kernel of the machine about a process and the note that it has written; None: no answer.

        The process itself cannot answer.
        """

    async def ended(self) -> str:
        """Wait until the process has ended; return how, such as "it ended with exit code 1"."""


class Host(Protocol):
    """Starts the processes of a run."""

    async def room(self) -> int:
        """Return how many processes the next attempt has, when there is room for them."""

    def address(self, name: str) -> Address:
        """Return an address at which the supervisor, or a process of this host, can listen. Each name is used once."""

    async def start(self, settings: ProcessSettings) -> HostedProcess:
        """Start a process, which calls :func:`~streamiter.engine.processes.process.run_process` with the settings."""
