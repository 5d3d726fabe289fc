"""The settings of a run of the benchmarks: sizes, rounds, and a Kafka broker for benchmarks that need one."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["PROJECT", "Session", "running"]

PROJECT = Path(__file__).parents[1]

# A terminated job takes a last checkpoint, which must fit into this time.
_END_S = 30.0


@contextlib.contextmanager
def running(command: Sequence[str], *, limit_s: float, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process in the project's folder; terminate it at the end of the block, and kill it if it does not end.

    The process is also killed after ``limit_s`` seconds, so that no read of its output waits for ever.
    """
    process = subprocess.Popen(command, cwd=PROJECT, stdout=stdout, text=True)
    limit = threading.Timer(limit_s, process.kill)
    limit.daemon = True
    limit.start()
    with process:  # closes the pipes of the process
        try:
            yield process
        finally:
            limit.cancel()
            process.terminate()
            try:
                process.wait(_END_S)
            finally:
                process.kill()


class Session:
    """One run of the benchmarks, as a context manager that stops the broker it has started."""

    def __init__(self, *, quick: bool = False, repeat: int = 5, kafka: str | None = None) -> None:
        """Prepare a run; ``kafka`` is the address of a broker that runs already."""
        self.quick = quick
        self.repeat = repeat
        self._given_kafka = kafka or os.environ.get("STREAMITER_TEST_KAFKA")
        self._resources = contextlib.ExitStack()

    def size(self, full: int, quick: int) -> int:
        """Return the size of a trial's work: ``full``, or ``quick`` in a quick run."""
        return quick if self.quick else full

    @functools.cached_property
    def kafka(self) -> str:
        """Return ``host:port`` of the given broker, or of a broker that this session starts."""
        if self._given_kafka:
            return self._given_kafka
        sys.path.append(str(PROJECT / "tests"))
        from support.kafka_server import FULL_SPEED, running_kafka

        server: Any = self._resources.enter_context(running_kafka(jvm_options=FULL_SPEED))
        return str(server.bootstrap)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()
