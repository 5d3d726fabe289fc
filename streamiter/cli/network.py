"""What the commands on configuration files of networks share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from streamiter.cli.figures import print_table, say
from streamiter.cli.run import Format, FormatOption, OutputOption, examples, format_for, write_drawing
from streamiter.cli.topics import AsJson

if TYPE_CHECKING:
    from streamiter.networks.network import Network, NetworkSummary

__all__ = [
    "load_network",
    "network_app",
]


ConfigurationFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A configuration file, as deepfm.json", show_default=False),
]


def load_network(file: Path) -> Network:
    """The network of the file; what it says that nothing knows is told on stderr, a line each."""
    # Networks are imported by the commands that need them: the others start without.
    from streamiter.networks.configuration import read_configuration
    from streamiter.networks.network import Network

    configuration = read_configuration(file)
    for text in configuration.warnings:
        say(f"warning: {text}", err=True)
    return Network(configuration)


def check(file: ConfigurationFile) -> None:
    """Check a configuration file, without running it: exit code 1 and what is wrong, or how large the network is.

    Keys that are unknown are warnings.

    ``streamiter network check``.
    """
    network = load_network(file)
    summary = network.summary()
    typer.echo(f"{summary.title}, {summary.totals}")


def draw_network(
    file: ConfigurationFile, output: OutputOption = None, drawing_format: FormatOption = None
) -> None:
    """Draw the layers of a network: as Mermaid text, SVG or PNG.

    ``streamiter network draw``.
    """
    chosen = format_for(output, drawing_format)
    write_drawing(_drawn(load_network(file), chosen), output)


def _drawn(network: Network, drawing_format: Format) -> str | bytes:
    match drawing_format:
        case Format.PNG:
            return network.draw(format="png")
        case Format.SVG:
            return network.draw(format="svg")
        case Format.MERMAID:
            return network.draw()


def show(
    file: ConfigurationFile,
    as_json: AsJson = False,
    as_canonical: Annotated[
        bool,
        typer.Option(
            "--canonical", help="The file in canonical form instead: all defaults said, layers in order."
        ),
    ] = False,
) -> None:
    """Show the layers of a network: inputs, outputs, parameters.

    ``streamiter network show``.
    """
    if as_json and as_canonical:
        raise typer.BadParameter(
            "expected one of --json and --canonical, given both", param_hint="'--canonical'"
        )
    network = load_network(file)
    if as_canonical:
        from streamiter.networks.configuration import as_text

        typer.echo(as_text(network.to_json()), nl=False)
        return
    summary = network.summary()
    if as_json:
        document = {
            "network": network.configuration.source,
            "features": network.features,
            "dtype": str(network.dtype),
        }
        typer.echo(orjson.dumps({**document, "layers": _rows(summary)}).decode())
    elif sys.stdout.isatty():
        print_table(
            summary.headings,
            [row.cells for row in summary.rows],
            numbers=("parameters",),
            title=summary.title,
            caption=summary.totals,
        )
    else:
        typer.echo(str(summary))


def _rows(summary: NetworkSummary) -> list[dict[str, Any]]:
    return [
        {
            "layer": row.layer,
            "type": row.type,
            "inputs": row.inputs,
            "output_dim": row.output_dim,
            "parameters": row.parameters,
            "parameters_per_feature": row.parameters_per_feature,
            "status": row.status,
        }
        for row in summary.rows
    ]


# ``streamiter network``: show, draw, check.

network_app = typer.Typer(
    help="Look at configuration files of networks.", no_args_is_help=True, rich_markup_mode=None
)
network_app.command(
    "show",
    epilog=examples(
        "streamiter network show deepfm.json",
        "streamiter network show deepfm.json --canonical > graph.json",
        "streamiter network show deepfm.json --json | jq .layers",
    ),
)(show)
network_app.command(
    "draw",
    epilog=examples(
        "streamiter network draw deepfm.json", "streamiter network draw deepfm.json -o deepfm.svg"
    ),
)(draw_network)
network_app.command(
    "check",
    epilog=examples(
        "streamiter network check deepfm.json",
        "streamiter network check deepfm.json && streamiter train --config deepfm.json --data census",
    ),
)(check)
