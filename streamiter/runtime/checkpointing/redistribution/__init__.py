"""From the state of a job to that of one with other parallelism, or with other chains.

What belongs to a key goes to the subtask that owns the key now. What waited at a gate, or came back in a loop, is
dealt out as the edge it came by deals out records. How far a step had come is one thing for all its new
subtasks: where the old ones differ and something depends on it, the restart is refused.

In this order: :mod:`old_job` is what the snapshot says, :mod:`standing` how far each step has come,
:mod:`instances`, :mod:`positions` and :mod:`rounds` are what steps keep, :mod:`gates` what waits before them, and
:mod:`tasks` brings it together. Before all that :mod:`topic_logs` fetches what lies in topics.
"""

from streamiter.runtime.checkpointing.redistribution.old_job import OldJob
from streamiter.runtime.checkpointing.redistribution.tasks import fits, redistributed, with_batches

__all__ = ["OldJob", "fits", "redistributed", "with_batches"]
