"""What the commands on configuration files of networks share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamiter.cli.wrapping import say

if TYPE_CHECKING:
    from streamiter.networks.network import Network

__all__ = ["ConfigurationFile", "load_network"]

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
