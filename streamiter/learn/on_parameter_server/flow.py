"""The steps that training on a parameter server is made of, whatever the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamiter.flow.stream import Stream
from streamiter.learn.on_parameter_server.learner import Learner
from streamiter.learn.on_parameter_server.repeating import repeated
from streamiter.learn.on_parameter_server.versions import LOSSES, Versions
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker, WorkerOptions
from streamiter.parameter_server.server import ParameterServer

__all__ = ["REPEAT_MEMORY_BYTES", "ParameterServerTraining", "trained"]

# As for replayed streams: some ten million small rows, with a few workers a small part of a training machine.
REPEAT_MEMORY_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class ParameterServerTraining:
    """What training on a parameter server gives."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and each n-th before it with ``publish_every=n``; for ``publish_model``."""
    losses: Stream
    """For each mini-batch a dict: the ``worker``, its ``clock``, the mean ``loss`` before it, the ``records`` it had,
    and the seconds ``waited_s`` that the worker waited for the parameters."""


def trained(
    mini_batches: Stream,
    learner: Learner,
    server: ParameterServer,
    *,
    owner: str,
    epochs: int,
    publish_every: int | None,
    worker: type[ParameterServerWorker],
    memory_bytes: int,
    label: Callable[[str], str],
) -> ParameterServerTraining:
    """Workers, one for each subtask of the mini-batches, and behind them the versions of the model."""
    workers = mini_batches.parallelism
    options = WorkerOptions(learner, sys.maxsize if publish_every is None else publish_every)
    if epochs > 1:
        mini_batches = repeated(mini_batches, epochs, memory_bytes=memory_bytes, name=label("epochs"))
    told = mini_batches.process(
        lambda: worker(options), name=label("train"), parallelism=workers, parameter_server=server
    )
    models = told.process(
        lambda: Versions(learner, server, workers, owner), name=label("versions"), parallelism=1
    )
    return ParameterServerTraining(models, models.side_output(LOSSES))
