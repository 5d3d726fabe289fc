"""``streamiter network check``."""

from __future__ import annotations

import typer

from streamiter.cli.network_arguments import ConfigurationFile, load_network

__all__ = ["check"]


def check(file: ConfigurationFile) -> None:
    """Check a configuration file, without running it: exit code 1 and what is wrong, or how large the network is.

    Keys that are unknown are warnings.
    """
    network = load_network(file)
    summary = network.summary()
    typer.echo(f"{summary.title}, {summary.totals}")
