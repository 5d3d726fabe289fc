"""Which outputs of a flow are committed together, and which are at least once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from streamiter.runtime.task import Task
from streamiter.topics.topic import Topic
from streamiter.topics.topic_sink import TopicSink

__all__ = ["output_to_commit_with"]

_log = logging.getLogger("streamiter.job")


def output_to_commit_with(flow: str, tasks: Sequence[Task]) -> Topic | None:
    """One of the outputs that are committed with checkpoints; None where there are none. Says which are not.

    The first in the flow decides where they are committed; dead letters only where there are no results to commit.
    """
    sinks = dict(_sinks(tasks))
    exactly_once = [sink for sink in sinks.values() if sink.topic.has_transactions and not sink.at_least_once]
    exactly_once.sort(key=lambda sink: sink.is_for_dead_letters)  # Stable: else in the order of the flow.
    chosen = exactly_once[0].topic if exactly_once else None
    for step, sink in sinks.items():
        if sink.at_least_once:
            _log.info("flow %r, step %r: delivers at least once, as its delivery= says", flow, step)
        elif chosen is None or sink.topic.commit_domain != chosen.commit_domain:
            _log.warning(
                "flow %r, step %r: delivers at least once to %s: after a restart some records may come twice, "
                'since %s; delivery="at_least_once" says that this is meant',
                flow,
                step,
                sink.topic.url,
                "it has no transactions"
                if chosen is None or not sink.topic.has_transactions
                else f"the flow commits its outputs to {chosen.commit_domain}, and one transaction cannot span both",
            )
    return chosen


def _sinks(tasks: Sequence[Task]) -> Iterator[tuple[str, TopicSink]]:
    for task in tasks:
        for instance in task.instances:
            if isinstance(instance.operator, TopicSink):
                yield instance.step.name, instance.operator
