"""The work of ``benchmarks.windows_on_kafka`` in Quix Streams, as a program: ``python -m benchmarks.quix JOB``.

Quix Streams pins older versions of packages that the project uses, so it has a folder of its own, and runs in a process
of its own. The job and the outcome are JSON.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import msgspec

__all__ = ["Job", "Outcome"]

# With no message for so long, the application ends; the outcome then lacks results, and is refused.
_SILENCE_S = 20.0


class Job(msgspec.Struct):
    """The arguments of the program."""

    broker: str
    topics: list[str]
    """One topic whose records are counted, or two topics that are joined."""
    results: int
    """The application stops after this many results."""
    disorder_ms: int
    size_ms: int
    """The length of a window, or the greatest difference of the times of a pair."""


class Outcome(msgspec.Struct):
    """What the program prints."""

    seconds: float
    """From the first record to the last result."""
    cpu_seconds: float
    """Of the process, in this time."""
    results: int
    """The number of windows or pairs."""
    total: int
    """The sum of the counts, or the number of pairs."""


class _Application:
    """One application of Quix Streams, and the times of its first record and its last result."""

    def __init__(self, job: Job, folder: str) -> None:
        from quixstreams import Application

        self._job = job
        self._began_s = self._began_cpu_s = 0.0
        self._ended_s = self._ended_cpu_s = 0.0
        self._counts: list[int] = []
        self._application: Any = Application(
            broker_address=job.broker,
            consumer_group=f"quix-{time.time_ns()}",
            auto_offset_reset="earliest",
            state_dir=folder,
            use_changelog_topics=False,
            loglevel="WARNING",
        )

    def run(self) -> Outcome:
        frames = [self._frame(name) for name in self._job.topics]
        results = self._windows(*frames) if len(frames) == 1 else self._pairs(*frames)
        results.update(self._note)
        self._application.run(count=self._job.results, timeout=_SILENCE_S, collect=False)
        seconds, cpu_seconds = self._ended_s - self._began_s, self._ended_cpu_s - self._began_cpu_s
        return Outcome(seconds, cpu_seconds, len(self._counts), sum(self._counts))

    def _frame(self, name: str) -> Any:
        topic = self._application.topic(
            name, key_deserializer="str", value_deserializer="json", timestamp_extractor=self._time
        )
        return self._application.dataframe(topic)

    def _windows(self, frame: Any) -> Any:
        windows = frame.tumbling_window(duration_ms=self._job.size_ms, grace_ms=self._job.disorder_ms).count()
        return windows.final().apply(lambda window: window["value"])

    def _pairs(self, left: Any, right: Any) -> Any:
        return left.join_interval(
            right,
            on_merge=lambda left, right: 1,
            grace_ms=2 * self._job.size_ms,
            backward_ms=self._job.size_ms,
            forward_ms=self._job.size_ms,
        )

    def _time(self, value: Any, headers: Any, timestamp_ms: float, kind: Any) -> int:
        if not self._began_s:
            self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()
        return int(value["at"])

    def _note(self, count: int) -> None:
        self._counts.append(count)
        self._ended_s, self._ended_cpu_s = time.perf_counter(), time.process_time()


def main() -> None:
    """Run the job of the arguments, and print its outcome."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    with tempfile.TemporaryDirectory() as folder:
        print(msgspec.json.encode(_Application(job, folder).run()).decode())


if __name__ == "__main__":
    main()
