"""Traces of OpenTelemetry: a span for each checkpoint, and for each batch that blocks the event loop.

They are off unless the program has a provider of tracers. This command has one, where the extra ``tracing`` and the
package ``opentelemetry-distro`` are installed::

    OTEL_TRACES_EXPORTER=otlp opentelemetry-instrument streamiter serve service.toml
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from streamiter.engine.graph.statistics import JobStatistics

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

_NS_IN_MS: Final = 1_000_000


class Traces:
    """Writes spans, unless OpenTelemetry is not installed or has no provider. Times are milliseconds since 1970."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """``provider`` None: that of the program."""
        self._committed: int | None = None
        """The checkpoint of the last span."""
        self._tracer: Tracer | None = None
        try:
            from opentelemetry.trace import get_tracer
        except ImportError:
            return
        self._tracer = get_tracer("streamiter", tracer_provider=provider)

    def checkpoint(self, statistics: JobStatistics) -> None:
        """Write the span of the last checkpoint, unless it has one; others since the last call have none."""
        checkpoints = statistics.checkpoints
        if checkpoints is None or checkpoints.committed_at_ms is None or checkpoints.committed == self._committed:
            return
        self._committed = checkpoints.committed
        attributes: dict[str, str | int | float] = {
            "flow": statistics.flow,
            "checkpoint": checkpoints.committed or 0,
            "bytes": checkpoints.last_size_bytes,
            "alignment_s": checkpoints.last_alignment_s,
        }
        self._span("checkpoint", checkpoints.committed_at_ms, checkpoints.last_duration_s, attributes)

    def slow_batch(self, flow: str, task: str | None, ended_ms: int, seconds: float) -> None:
        """Write the span of a batch that has blocked the event loop."""
        self._span("slow batch", ended_ms, seconds, {"flow": flow, "task": task or "none"})

    def _span(self, name: str, ended_ms: int, seconds: float, attributes: dict[str, str | int | float]) -> None:
        if self._tracer is not None:
            ended_ns = ended_ms * _NS_IN_MS
            began_ns = ended_ns - round(seconds * 1e9)
            self._tracer.start_span(name, start_time=began_ns, attributes=attributes).end(ended_ns)
