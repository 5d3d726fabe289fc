"""``streamiter network show``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from streamiter.cli.network_arguments import ConfigurationFile, load_network
from streamiter.cli.tables import print_table
from streamiter.cli.topic_arguments import AsJson

if TYPE_CHECKING:
    from streamiter.networks.summary import Summary

__all__ = ["show"]


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
    """Show the layers of a network: inputs, outputs, parameters."""
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


def _rows(summary: Summary) -> list[dict[str, Any]]:
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
