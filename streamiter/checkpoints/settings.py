"""What a job is told about its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass

from streamiter.checkpoints.store import CheckpointStore
from streamiter.errors import ConfigurationError
from streamiter.numbers import positive, whole_number

__all__ = ["Checkpoints"]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept, and how often one is taken.

    ``directory`` is a folder, made if it is missing, that other flows may use as well; or another
    :class:`~streamiter.checkpoints.store.CheckpointStore`. Every ``interval_s`` seconds a checkpoint is taken,
    and one more when the job ends or is suspended; the last ``keep`` stay. Records in transactional outputs
    become visible with the checkpoint after them, so the interval is their delay.

    One whose barrier has not passed all steps within ``alignment_timeout_s`` seconds is given up, with a warning; the
    next one is tried after the interval. A transaction that is open for longer than ``transaction_timeout_s`` seconds
    is aborted by its server; it must be longer than the interval and the alignment together.

    >>> Checkpoints("/var/lib/clicks", interval_s=30).keep
    3
    """

    directory: str | os.PathLike[str] | CheckpointStore
    interval_s: float = 10.0
    keep: int = 3
    alignment_timeout_s: float = 60.0
    transaction_timeout_s: float = 300.0
    """Five minutes: Kafka's brokers refuse more than fifteen unless told otherwise."""

    def __post_init__(self) -> None:
        # An empty one is a variable that is not set, rarely the folder one happens to be in.
        if not isinstance(self.directory, (str, os.PathLike, CheckpointStore)) or self.directory == "":
            raise ConfigurationError(
                f"Checkpoints: expected a folder or a CheckpointStore, given {self.directory!r}; "
                'write Checkpoints("/var/lib/…")'
            )
        for name in ("interval_s", "alignment_timeout_s", "transaction_timeout_s"):
            positive(f"Checkpoints: {name}", getattr(self, name))
        whole_number("Checkpoints: keep", self.keep, 1)

    def check_transactions(self, flow: str) -> None:
        """Raise ConfigurationError where a transaction would be aborted before its checkpoint."""
        if self.interval_s + self.alignment_timeout_s >= self.transaction_timeout_s:
            raise ConfigurationError(
                f"flow {flow!r}, Checkpoints: expected interval_s + alignment_timeout_s below transaction_timeout_s, "
                f"given {self.interval_s:g} + {self.alignment_timeout_s:g} and {self.transaction_timeout_s:g}; its "
                "outputs would be taken back before they are committed: raise transaction_timeout_s, or lower the rest"
            )
