"""Runs a flow as if its subtasks were in several processes, in one event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamiter import Flow
from streamiter.engine.graph.channels import Channel
from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackLimits, spill_queue
from streamiter.engine.graph.graph import Step
from streamiter.engine.plan import placement, plan
from streamiter.engine.plan.placement import Traits, traits_of
from streamiter.engine.plan.plan import Planner
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.operators.operator import Operator
from streamiter.values.plain_data import PlainData
from streamiter.values.records import DataBatch, estimated_bytes


def over_a_link(batch: DataBatch, plain_data: PlainData) -> DataBatch:
    """Return the batch as it arrives in another process."""
    frames = FrameEncoding(plain_data)
    body = b"".join(frames.encode_batch(batch, estimated_bytes(batch.records)))
    return frames.decode_batch(memoryview(bytearray(body)))[0]


class ChannelOverLink(Channel):
    plain_data: PlainData

    def try_put(self, batch: DataBatch) -> bool:
        return super().try_put(over_a_link(batch, self.plain_data))


class FeedbackOverLink(FeedbackChannel):
    plain_data: PlainData

    def put(self, batch: DataBatch) -> None:
        super().put(over_a_link(batch, self.plain_data))


def divide(build: Callable[[], tuple[Flow, Any]], processes: int, patch: pytest.MonkeyPatch) -> tuple[Flow, Any]:
    """Return a flow whose batches are all encoded between tasks, and what ``build`` returned with it.

    Subtask i has the operator of the flow that ``build`` made in process i modulo ``processes``.
    """
    built = [build() for _ in range(processes)]
    flows = [flow for flow, _ in built]
    same = {step: [flow.steps[place] for flow in flows] for place, step in enumerate(flows[0].steps)}

    def instantiate(step: Step, subtasks: list[int], first: Operator | None) -> dict[int, Operator]:
        made = plan.operator_of(step) if first is None else first
        traits = traits_of(step, made)
        process = 1 if traits.central or traits.boundary else processes  # A loop's members join the loop of one flow.
        return {subtask: plan.operator_of(same[step][subtask % process]) if subtask else made for subtask in subtasks}

    def make_channel(planner: Planner, name: str, feedback: FeedbackLimits | None) -> Any:
        channel: Any
        if feedback is None:
            limits = planner.options.channel_limits
            channel = ChannelOverLink(name, limit_records=limits.records, limit_bytes=limits.size_bytes)
        else:
            channel = FeedbackOverLink(name, spill_queue(name, feedback, planner.plain_data))
        channel.plain_data = planner.plain_data
        return channel

    is_chained = placement._is_chained

    def is_chained_in_a_process(step: Step, traits: dict[Step, Traits]) -> bool:
        if not is_chained(step, traits):
            return False
        upstream = step.inputs[0].upstream
        return step.parallelism == 1 or traits[step].central == traits[upstream].central

    patch.setattr(plan, "operators_of", instantiate)
    patch.setattr(Planner, "_make_channel", make_channel)
    patch.setattr(placement, "_is_chained", is_chained_in_a_process)
    return built[0]
