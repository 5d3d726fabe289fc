"""``streamiter run``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from streamiter.cli.failures import INTERRUPTED
from streamiter.cli.figures import print_statistics, watched
from streamiter.cli.loading import Target, load_flow
from streamiter.flow.flow import Flow
from streamiter.runtime.running import OnInterrupt, run_in_own_loop, stopping_on_signals
from streamiter.runtime.statistics import JobStatistics

__all__ = ["run", "run_flow"]


class Interrupt(StrEnum):
    """What ``--on-interrupt`` takes."""

    SUSPEND = "suspend"
    DRAIN = "drain"


def run(
    target: Target,
    on_interrupt: Annotated[
        Interrupt, typer.Option("--on-interrupt", help="What the first Ctrl-C or SIGTERM does.")
    ] = Interrupt.SUSPEND,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the final statistics as one JSON document.")
    ] = False,
) -> None:
    """Run a flow until its inputs end, with live figures on a terminal; at the end, how its loops have ended.

    Ctrl-C and SIGTERM suspend it (exit code 0): nothing more is read, and what was read is handled, but for
    mini-batches that wait in a loop. With --on-interrupt drain the inputs end instead, a bounded loop with the
    epoch under way, and the result so far comes out. A second one aborts it (exit code 130).
    """
    statistics = run_in_own_loop(run_flow(load_flow(target), on_interrupt.value))
    print_statistics(statistics, as_json=as_json)
    if statistics.state == "aborted":
        raise typer.Exit(INTERRUPTED)


async def run_flow(flow: Flow, on_interrupt: OnInterrupt) -> JobStatistics:
    """Run with live figures on a terminal, quietly elsewhere."""
    job = await flow.start()
    with stopping_on_signals(job, first=on_interrupt) as stops:
        async with watched(job, stops=stops):
            return await job.wait()
