"""``streamiter network``: show, draw, check."""

from __future__ import annotations

import typer

from streamiter.cli.examples import examples
from streamiter.cli.network_check import check
from streamiter.cli.network_draw import draw_network
from streamiter.cli.network_show import show

__all__ = ["network_app"]

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
