"""Steps with event time that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/event_time/test_refusals.py`` writes the texts as they are now.
"""

import asyncio
from pathlib import Path
from typing import Any

from event_time.operators import Countdown, Stamped
from event_time.test_jobs import batches, timed
from support.refusals import refusals_test, write

import streamiter
from streamiter import Flow, OutputTag
from streamiter.errors import JobFailed

FILE = Path(__file__).with_name("refusals.txt")
SETTER = {"process": lambda step, record, out: step.context.set_event_timer(1)}
NAMES = {name: getattr(streamiter, name) for name in streamiter.__all__}
NAMES |= {"Countdown": Countdown, "Stamped": Stamped, "batches": batches, "LATE": OutputTag("late")}
NAMES |= {"Setter": type("Setter", (Stamped,), SETTER)}


def names_of(flow: Flow) -> dict[str, Any]:
    """Return the streams of a flow that the calls use: with event time and without, with keys and without."""
    items = flow.from_items([1])
    timed_items = items.event_time(lambda n: n, unit="ms", check_unit=False, name="times")
    keyed = {"timed": timed_items.key_by(lambda n: n), "untimed": items.key_by(lambda n: n)}
    return NAMES | keyed | {"flow": flow, "items": items, "numbers": timed(flow)}


async def when_added(code: str) -> object:
    """Evaluate a call as a line of ``call.py``, which is the line of the error."""
    return eval(compile(code, "call.py", "eval"), names_of(Flow("f")))


async def when_run(code: str) -> object:
    """Run the flow of a step; the error of a record is the cause of that of the job."""
    flow = Flow("f")
    eval(compile(code, "call.py", "eval"), names_of(flow)).collect()
    try:
        return await asyncio.to_thread(flow.run)
    except JobFailed as failed:
        raise failed.__cause__ or failed from None


CALLS = {"event time": when_added, "windows and joins": when_added, "while the flow runs": when_run}

test_a_step_is_refused_with_its_text = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
