"""The commands ``run`` and ``draw``: they find the flow that ``module:flow`` names, and run or draw it.

Options for drawings and the list of examples in a help text are shared with other commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from streamiter import LocalProcesses, Ray
from streamiter.cli.figures import INTERRUPTED, errors_of_output, print_statistics, watched
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import StopMode
from streamiter.engine.job.running import OnInterrupt, Watched, run_in_own_loop, run_jobs
from streamiter.engine.processes.loading import load_flow
from streamiter.errors import ConfigurationError
from streamiter.flow.flow import Flow, Processes
from streamiter.values.numbers import whole_number_in

if TYPE_CHECKING:
    from streamiter.flow.drawing.formats import DrawingFormat
    from streamiter.networks.network import Network

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FLOW",
        help="A Flow, or a function without arguments that returns one: clicks:flow, path/to/clicks.py:flow",
        show_default=False,
    ),
]


Hosts = Literal["local", "ray"]


def run(
    target: TargetArgument,
    on_interrupt: Annotated[OnInterrupt, typer.Option(help="The effect of the first Ctrl-C or SIGTERM.")] = "suspend",
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Take checkpoints into this folder or object store (s3://bucket/prefix), and resume from the last one "
            "there.",
        ),
    ] = None,
    interval_s: Annotated[
        float | None,
        typer.Option(
            "--checkpoint-interval", help="Seconds between two checkpoints, or two commits of positions; 10 by default."
        ),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(help="Where to resume: last, none (start from the beginning), or the number of a checkpoint."),
    ] = None,
    changed_steps: Annotated[
        list[str] | None,
        typer.Option(
            "--changed-step",
            help="A step that was added or removed since the checkpoint, or a source that must start again; repeat "
            "for several.",
        ),
    ] = None,
    processes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Run the flow in N processes.")] = None,
    on: Annotated[Hosts, typer.Option(help="Where the processes run: on this machine, or on Ray.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster: auto for that of this machine, or host:port; without it Ray is started."),
    ] = None,
    silence_s: Annotated[
        float | None,
        typer.Option(help="Seconds of a process without a sign of life before it is looked at; 5 by default."),
    ] = None,
    lock_s: Annotated[
        float | None,
        typer.Option(help="Seconds for which a function may hold Python's lock; by default without limit."),
    ] = None,
    losses_max: Annotated[
        int | None, typer.Option(help="How many losses in that time do not end the run; 3 by default.")
    ] = None,
    losses_within_s: Annotated[
        float | None, typer.Option(help="Seconds in which losses are counted; 600 by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final statistics as one JSON document.")] = False,
) -> None:
    """Run a flow until its inputs end, and report how its loops ended; with live figures on a terminal.

    Elsewhere a line of JSON with the figures is logged every 30 s.

    The first Ctrl-C or SIGTERM suspends the flow (exit code 0): it reads nothing more and handles what it has read,
    except for mini-batches that wait in a loop; with --checkpoints these are stored for the next run. With
    --on-interrupt drain the inputs end instead, a bounded loop ends with the current epoch, and the flow emits its
    results so far. A second signal aborts the flow (exit code 130), a third one even if a step does not return.
    """
    options = _checkpoint_options(checkpoints, interval_s, restore, changed_steps or [])
    limits = {"silence_s": silence_s, "lock_s": lock_s, "losses_max": losses_max, "losses_within_s": losses_within_s}
    limits = {option: limit for option, limit in limits.items() if limit is not None}
    if processes is None and (on != "local" or address is not None or limits):
        raise ConfigurationError(
            "--on, --address, --silence-s, --lock-s, --losses-max and --losses-within-s: expected --processes N with "
            "them, given none; add it"
        )
    host = None if processes is None else _host(on, processes, target, address, limits)
    statistics = run_in_own_loop(run_flow(load_flow(target, Flow), on_interrupt, options, host))
    print_statistics(statistics, as_json=as_json)
    if statistics.state == "aborted":
        raise typer.Exit(INTERRUPTED)


def _host(on: Hosts, processes: int, target: str, address: str | None, limits: Mapping[str, Any]) -> Processes:
    if on == "ray":
        return Ray(processes, address=address, flow=target, **limits)
    if address is not None:
        raise ConfigurationError(f"--address: expected --on ray with it, given {address!r} alone; add --on ray")
    return LocalProcesses(processes, flow=target, **limits)


async def run_flow(
    flow: Flow, on_interrupt: OnInterrupt, options: Mapping[str, object], host: Processes | None = None
) -> JobStatistics:
    """Run a flow, with live figures on a terminal; ``options`` are those of ``flow.start``."""

    def figures(job: Watched, stops: Sequence[StopMode]) -> AbstractAsyncContextManager[None]:
        return watched(job, stops=stops)

    if host is not None:
        return await host._run_flow(flow, options, on_interrupt, figures)
    return await run_jobs(flow.start, options, first=on_interrupt, while_running=figures)


def _checkpoint_options(
    folder: str | None, interval_s: float | None, restore: str | None, changed_steps: Sequence[str]
) -> dict[str, object]:
    options: dict[str, object] = {"restore": _restore(restore), "changed_steps": changed_steps}
    if folder is None and interval_s is None:
        return options
    # Imports the stores, which a flow without checkpoints does not need.
    from streamiter.engine.storage.store import Checkpoints

    return {
        "checkpoints": Checkpoints(folder) if interval_s is None else Checkpoints(folder, interval_s=interval_s),
        **options,
    }


def _restore(given: str | None) -> Literal["last"] | int | None:
    if given is None or given == "last":
        return "last"
    if given == "none":
        return None
    if (number := whole_number_in(given)) is not None:
        return number
    raise ConfigurationError(
        f'--restore: expected "last", "none" or the number of a checkpoint, given {given!r}; '
        "streamiter checkpoints list shows the checkpoints"
    )


OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file: .mmd, .svg or .png.")
]
FormatOption = Annotated[
    Literal["mermaid", "svg", "png"] | None,
    typer.Option("--format", help="The format, whatever the suffix of the file.", show_default=False),
]

_FORMAT_OF_SUFFIX: Final[Mapping[str, DrawingFormat]] = {".mmd": "mermaid", ".svg": "svg", ".png": "png"}


def format_for(output: Path | None, drawing_format: DrawingFormat | None) -> DrawingFormat:
    """Return the given format, else the format of the file's suffix; Mermaid without a file."""
    if drawing_format is not None:
        return drawing_format
    if output is None:
        return "mermaid"
    try:
        return _FORMAT_OF_SUFFIX[output.suffix.lower()]
    except KeyError:
        raise ConfigurationError(
            f"--output {output}: expected a file named .mmd (Mermaid), .svg or .png, given "
            f"{output.suffix or 'no suffix'}; rename it or say --format mermaid, svg or png"
        ) from None


def write_drawing(drawable: Flow | Network, drawing_format: DrawingFormat, output: Path | None) -> None:
    """Draw a flow or a network, and write the drawing to the file, or to standard output."""
    content = drawable.draw(format="png") if drawing_format == "png" else drawable.draw(format=drawing_format).encode()
    if output is None:
        sys.stdout.buffer.write(content)
        return
    with errors_of_output("--output", output):
        output.write_bytes(content)


def draw(target: TargetArgument, output: OutputOption = None, drawing_format: FormatOption = None) -> None:
    """Draw the graph of a flow, without running it: as Mermaid text, SVG or PNG."""
    chosen = format_for(output, drawing_format)
    write_drawing(load_flow(target, Flow), chosen, output)


# This character keeps typer from joining lines.
_AS_IT_IS = "\b"


def examples(*lines: str, title: str = "Examples:") -> str:
    """Return the examples at the end of a command's help: a title, and the lines unchanged."""
    return "\n".join([_AS_IT_IS, title, *(f"  {line}" for line in lines)])


Command = tuple[Callable[..., None], *tuple[str, ...]]
"""The function of a command, and the examples at the end of its help."""


def add_commands(app: typer.Typer, **commands: Command) -> None:
    """Add commands by their names."""
    for name, (function, *lines) in commands.items():
        app.command(name, epilog=examples(*lines))(function)


def command_group(help_text: str, **commands: Command) -> typer.Typer:
    """Return a group of commands, such as ``streamiter topics``."""
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    add_commands(group, **commands)
    return group
