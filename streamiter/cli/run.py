"""``streamiter run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from streamiter.cli.failures import INTERRUPTED
from streamiter.cli.loading import Target, load_flow
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow
from streamiter.numbers import whole_number_in
from streamiter.runtime.running import OnInterrupt, run_in_own_loop, run_jobs
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
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="FOLDER",
            help="Folder of the checkpoints: take them, and go on from the last.",
        ),
    ] = None,
    interval_s: Annotated[
        float | None, typer.Option("--checkpoint-interval", help="Seconds between two checkpoints; 10.")
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            "--restore", help="What to go on from: last, none (begin anew) or a checkpoint's number."
        ),
    ] = None,
    changed_steps: Annotated[
        list[str] | None,
        typer.Option(
            "--changed-step",
            help="A step that came or went since the checkpoint, or a source that is to begin anew; more than once for "
            "several.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the final statistics as one JSON document.")
    ] = False,
) -> None:
    """Run a flow until its inputs end, with live figures on a terminal; at the end, how its loops have ended.

    Ctrl-C and SIGTERM suspend it (exit code 0): nothing more is read, and what was read is handled, but for
    mini-batches that wait in a loop; with --checkpoints all of it is kept for the next run. With --on-interrupt
    drain the inputs end instead, a bounded loop with the epoch under way, and the result so far comes out. A
    second one aborts it (exit code 130), a third one also where a step does not return.
    """
    # Not for the other commands.
    from streamiter.cli.figures import print_statistics

    options = _checkpoint_options(checkpoints, interval_s, restore, changed_steps or [])
    statistics = run_in_own_loop(run_flow(load_flow(target), on_interrupt.value, options))
    print_statistics(statistics, as_json=as_json)
    if statistics.state == "aborted":
        raise typer.Exit(INTERRUPTED)


async def run_flow(flow: Flow, on_interrupt: OnInterrupt, options: Mapping[str, Any]) -> JobStatistics:
    """Run with live figures on a terminal, quietly elsewhere; ``options`` are those of ``flow.start``."""
    from streamiter.cli.figures import watched

    return await run_jobs(
        flow.start,
        options,
        first=on_interrupt,
        while_running=lambda job, stops: watched(job, stops=stops),
    )


def _checkpoint_options(
    folder: str | None, interval_s: float | None, restore: str | None, changed_steps: Sequence[str]
) -> dict[str, Any]:
    if folder is None:
        given = {
            "--checkpoint-interval": interval_s is not None,
            "--restore": restore is not None,
            "--changed-step": bool(changed_steps),
        }
        for option in (option for option, is_given in given.items() if is_given):
            raise ConfigurationError(
                f"{option}: expected --checkpoints FOLDER with it, given none; say where checkpoints are kept"
            )
        return {}
    # With the stores, which a flow without checkpoints does without.
    from streamiter.checkpoints.settings import Checkpoints

    checkpoints = Checkpoints(folder) if interval_s is None else Checkpoints(folder, interval_s=interval_s)
    return {"checkpoints": checkpoints, "restore": _restore(restore), "changed_steps": changed_steps}


def _restore(given: str | None) -> Any:
    if given is None or given == "last":
        return "last"
    if given == "none":
        return None
    if (number := whole_number_in(given)) is not None:
        return number
    raise ConfigurationError(
        f'--restore: expected "last", "none" or the number of a checkpoint, given {given!r}; '
        "streamiter checkpoints list shows what there is"
    )
