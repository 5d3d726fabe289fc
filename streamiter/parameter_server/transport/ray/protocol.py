"""What goes to and fro between a server's process, its clients' processes, and the hosts of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from streamiter.parameter_server.recovery import SnapshotEvery

__all__ = ["Beginning", "Describe", "GoBack", "HostProcess", "RayAddress", "Restore", "client_name"]


def client_name(worker: int) -> str:
    """The name of a worker's client in its sessions.

    >>> client_name(3)
    'worker 3'
    """
    return f"worker {worker}"


@dataclass(frozen=True, slots=True)
class RayAddress:
    """How clients in other processes find the shards; may be given to Ray's tasks and actors."""

    name: str
    hosts: tuple[Any, ...]
    """The actors' handles."""
    snapshots: SnapshotEvery | None
    heartbeat_timeout_s: float | None


class GoBack(NamedTuple):
    """A host's answer to a message from before its shard went back to a snapshot."""

    generation: int
    clocks: dict[str, int] | None
    """The clocks of the worker now, by matrix; None: the snapshot does not know the worker."""
    refusal: str | None = None
    """Why no parameters are read or changed: they are lost."""
    loss: str = ""
    """What was lost, and what all shards have gone back to."""


class HostProcess(NamedTuple):
    """Which process a host is, and where it runs."""

    instance: str
    """Another one after each start."""
    process_id: int
    node_id: str
    node_address: str


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a host begins a generation with. ``refusal``: with nothing, and why no parameters are read or changed."""

    generation: int
    matrices: tuple[Any, ...] = ()
    """``Create`` of each."""
    workers: tuple[int, ...] = ()
    snapshot: int = 0
    """The number of the last snapshot; 0: the matrices begin with their initial values."""
    refusal: str | None = None
    loss: str = ""
    """What was lost, and what all shards go back to."""


@dataclass(slots=True)
class Describe:
    """Reply: the ``Matrix`` of this name, or None."""

    matrix: str


@dataclass(slots=True)
class Restore:
    """``RestoreState`` that may be asked for twice: what has this ``identity`` is done once. Reply: None."""

    identity: str
    state: Any
    workers: tuple[int, ...] | None
