"""The plan: which steps run together in one task.

``PYTHONPATH=tests python tests/runtime/test_plan.py`` writes the tasks of ``plans.txt`` as they are now.
"""

import asyncio
from pathlib import Path
from typing import Any

from support.refusals import scripts_test, write_scripts

from streamiter import Flow, Operator, OutputTag, connect
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.operators import Output

FILE = Path(__file__).with_name("plans.txt")


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


class Left(Operator):
    def process_left(self, record: Any, out: Output) -> None:
        out.emit(record)


class Both(Left):
    process_right = Left.process_left


NAMES: dict[str, Any] = {each.__name__: each for each in (Awaited, InThread, Choosy, Left, Both, connect)}
NAMES["TAG"] = OutputTag("side")


class Plans:
    """Plans the flow of each line, of parallelism one or two."""

    def act(self, line: str) -> str:
        flows = {"one": Flow("f"), "two": Flow("f", parallelism=2)}
        eval(line, NAMES | flows)
        [flow] = (flow for flow in flows.values() if flow.steps)
        job = Job(flow.name, flow.steps, flow.plain_data, JobOptions())
        return "; ".join(
            f"{task.name}: {' '.join(step.step for step in task.steps)}" for task in job.statistics().tasks
        )


test_the_tasks_of_a_flow_are_those_of_the_file = scripts_test(FILE, Plans)


def test_a_union_of_a_stream_with_itself_brings_each_record_twice() -> None:
    """Two edges between the same steps were one channel."""
    flow = Flow("f")
    source = flow.from_items([1, 2], name="in")
    twice = source.union(source).collect()
    flow.run()
    assert sorted(twice.items) == [1, 1, 2, 2]


if __name__ == "__main__":
    write_scripts(FILE, Plans)
