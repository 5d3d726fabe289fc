"""What can be said of training on a parameter server, checked."""

from __future__ import annotations

from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker
from streamiter.numbers import whole_number
from streamiter.operators.rejection import shortened
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.matrix import DTYPES
from streamiter.parameter_server.server import ParameterServer

__all__ = ["check_bounded", "check_consistency", "check_dtype", "check_server", "check_worker", "count_of"]


def count_of(owner: str, option: str, given: Any) -> int:
    """A whole number from 1 on."""
    return whole_number(f"{owner}({option}=)", given, 1, error=GraphError)


def check_server(owner: str, server: Any, flow: Flow) -> None:
    """Raise GraphError for what is no server, and for one that another step works with.

    Every worker of a server takes part in every matrix: those of the other step would be waited for, and never clock.
    """
    if not isinstance(server, ParameterServer):
        raise GraphError(
            f"{owner}: expected a ParameterServer, given {shortened(server)}; make one: ParameterServer(shards=2)"
        )
    others = [step.name for step in flow.steps if step.service is server]
    if others:
        raise GraphError(
            f"{owner}: expected a server of its own, given {server.name!r}, which step {others[0]!r} works with; make "
            "another one: ParameterServer(name=…)"
        )


def check_consistency(owner: str, consistency: Any) -> None:
    """Raise GraphError for what is none."""
    if not isinstance(consistency, Consistency) or type(consistency) is Consistency:
        raise GraphError(
            f"{owner}(consistency=): expected BSP(), ASP() or SSP(staleness=…), given {shortened(consistency)}; "
            "take one of streamiter.parameter_server"
        )


def check_dtype(owner: str, dtype: Any) -> None:
    """Raise GraphError for a dtype that cannot hold fractions."""
    floats = [name for name in DTYPES if name.startswith("float")]
    if dtype not in floats:
        raise GraphError(f"{owner}(dtype=): expected {' or '.join(map(repr, floats))}, given {dtype!r}")


def check_worker(owner: str, worker: Any) -> None:
    """Raise GraphError for what is no class of workers."""
    if not (isinstance(worker, type) and issubclass(worker, ParameterServerWorker)):
        raise GraphError(
            f"{owner}(worker=): expected a class derived from ParameterServerWorker, given {shortened(worker)}; "
            "write class MyWorker(ParameterServerWorker)"
        )


def check_bounded(owner: str, stream: Stream, epochs: int) -> None:
    """Raise GraphError for a stream that never ends and is to be gone through more than once."""
    if epochs > 1 and not stream.is_bounded:
        raise GraphError(
            f"{owner}(epochs=): expected 1 for {stream.name!r}, which never ends, given {epochs}; read the topic with "
            'stop="latest", or go through it once'
        )
