"""The plan: which steps run together in one task."""

import asyncio
from typing import Any

import pytest

from streamiter import Flow, Operator, OutputTag, connect
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.operators import Output

TAG = OutputTag("side")


class Pass(Operator):
    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


class Awaited(Operator):
    async def process(self, record: Any, out: Output) -> None:
        await asyncio.sleep(0)
        out.emit(record)


class InThread(Pass):
    runs_in_thread = True


class Choosy(Pass):
    def wanted_inputs(self) -> tuple[str, ...]:
        return ("input",)


class Both(Operator):
    def process_left(self, record: Any, out: Output) -> None:
        out.emit(record)

    def process_right(self, record: Any, out: Output) -> None:
        out.emit(record)


def planned(flow: Flow) -> dict[str, list[str]]:
    """Return the names of the tasks, each with its steps."""
    job = Job(flow.name, flow.steps, flow.plain_data, JobOptions())
    return {task.name: [step.step for step in task.steps] for task in job.statistics().tasks}


def test_forward_edges_of_equal_parallelism_are_one_task() -> None:
    """Each hop between tasks has a cost, and a chain of maps had a hop for each map."""
    flow = Flow("f", parallelism=2)
    flow.from_items([1], name="in").map(str, name="a").filter(bool, name="b").map_batch(list, name="c")
    assert planned(flow) == {"in[0]": ["in", "a", "b", "c"], "in[1]": ["in", "a", "b", "c"]}


def test_a_step_read_by_two_is_one_task_with_both() -> None:
    """A branch, which needs no channel, was planned as a separate task."""
    flow = Flow("f")
    source = flow.from_items([1], name="in")
    source.map(str, name="a").map(str, name="b")
    source.side_output(TAG).map(str, name="c")
    assert planned(flow) == {"in[0]": ["in", "a", "c", "b"]}


@pytest.mark.parametrize("factory", [Awaited, InThread, Choosy])
def test_steps_that_wait_begin_a_task(factory: type[Operator]) -> None:
    """The steps before a step that waits stopped during its wait."""
    flow = Flow("f")
    flow.from_items([1], name="in").process(factory, name="waits")
    assert planned(flow) == {"in[0]": ["in"], "waits[0]": ["waits"]}


def test_a_step_behind_a_coroutine_joins_it_and_one_behind_a_thread_does_not() -> None:
    """A step after a threaded step ran in its thread, instead of in the event loop."""
    flow = Flow("f")
    flow.from_items([1], name="in").process(Awaited, name="a").map(str, name="b").process(InThread, name="c").map(
        str, name="d"
    )
    assert planned(flow) == {"in[0]": ["in"], "a[0]": ["a", "b"], "c[0]": ["c"], "d[0]": ["d"]}


def test_fan_in_begins_a_task() -> None:
    """Several channels met at a step without an inbox, so they did not take turns and barriers did not align."""
    flow = Flow("f")
    left, right = flow.from_items([1], name="left"), flow.from_items([2], name="right")
    left.union(right).map(str, name="union")
    connect(left=left, right=right).process(Both, name="connected")
    assert planned(flow) == {
        "left[0]": ["left"],
        "right[0]": ["right"],
        "union[0]": ["union"],
        "connected[0]": ["connected"],
    }


def test_a_named_input_begins_a_task_even_alone() -> None:
    """The only stream of ``connect`` was not handled by the name of its input."""

    class Left(Operator):
        def process_left(self, record: Any, out: Output) -> None: ...

    flow = Flow("f")
    connect(left=flow.from_items([1], name="in")).process(Left, name="step")
    assert planned(flow) == {"in[0]": ["in"], "step[0]": ["step"]}


def test_another_parallelism_begins_a_task() -> None:
    """Records were not rebalanced between subtasks of different parallelism."""
    flow = Flow("f", parallelism=2)
    flow.from_items([1], name="in").map(str, name="narrow", parallelism=1)
    assert planned(flow) == {"in[0]": ["in"], "in[1]": ["in"], "narrow[0]": ["narrow"]}


def test_partitioning_begins_a_task_but_for_a_single_subtask() -> None:
    """One subtask on both sides, where partitioning has no choice, was planned as two tasks."""
    for parallelism, chained in ((1, True), (2, False)):
        flow = Flow("f", parallelism=parallelism)
        keyed = flow.from_items([1], name="in").key_by(int)
        keyed.reduce(max, name="reduce")
        names = list(planned(flow))
        assert ("reduce[0]" not in names) == chained


def test_a_union_of_a_stream_with_itself_brings_each_record_twice() -> None:
    """Two edges between the same steps were one channel."""
    flow = Flow("f")
    source = flow.from_items([1, 2], name="in")
    twice = source.union(source).collect()
    flow.run()
    assert sorted(twice.items) == [1, 1, 2, 2]
