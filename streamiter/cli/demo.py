"""``streamiter demo``: online learning on a year of flights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["When", "demo"]


class When(StrEnum):
    """When labels are known."""

    delayed = "delayed"
    immediate = "immediate"


def demo(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", metavar="DIR", help="Where events and updates are kept.")
    ] = Path("demo-data"),
    flights: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N flights of the year.")
    ] = None,
    mini_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Events for one step of the model.")
    ] = 100,
    labels: Annotated[
        When,
        typer.Option(
            help="When it is known whether a flight was late: when it has arrived, or (to compare) at once."
        ),
    ] = When.delayed,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what earlier runs have written there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Learn online which flights will be late; no server needed.

    336,776 flights that left New York in 2013 become events in time order in a topic. A model predicts at each
    scheduled departure whether the flight will come in more than 15 minutes late, learns when it has
    arrived, and publishes every update to another topic, where it can be followed. Ctrl-C suspends.
    """
    # It brings all learners with it, which other commands would load for nothing.
    from streamiter.cli.demo_run import run_demo

    run_demo(
        directory,
        labels="immediate" if labels is When.immediate else "delayed",
        flights=flights,
        mini_batch=mini_batch,
        fresh=fresh,
        as_json=as_json,
    )
