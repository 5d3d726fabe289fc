"""``streamiter checkpoints``: list, show, verify, prune."""

from __future__ import annotations

import typer

from streamiter.cli.checkpoints_list import list_checkpoints
from streamiter.cli.checkpoints_prune import prune
from streamiter.cli.checkpoints_show import show
from streamiter.cli.checkpoints_verify import verify
from streamiter.cli.examples import examples

__all__ = ["checkpoints_app"]

checkpoints_app = typer.Typer(
    help="Look after the checkpoints of flows.", no_args_is_help=True, rich_markup_mode=None
)
checkpoints_app.command(
    "list",
    epilog=examples(
        "streamiter checkpoints list checkpoints",
        "streamiter checkpoints list /var/lib/clicks --flow clicks --json | jq .checkpoint",
    ),
)(list_checkpoints)
checkpoints_app.command(
    "show",
    epilog=examples(
        "streamiter checkpoints show checkpoints",
        "streamiter checkpoints show checkpoints --flow clicks --checkpoint 17 --json | jq .steps",
    ),
)(show)
checkpoints_app.command(
    "verify",
    epilog=examples(
        "streamiter checkpoints verify checkpoints",
        "streamiter checkpoints verify /var/lib/clicks --flow clicks --checkpoint 17",
    ),
)(verify)
checkpoints_app.command(
    "prune",
    epilog=examples(
        "streamiter checkpoints prune checkpoints --keep 1",
        "streamiter checkpoints prune /var/lib/clicks --flow clicks --orphans",
    ),
)(prune)
