"""``streamiter topics``: create, list, produce, tail."""

from __future__ import annotations

import typer

from streamiter.cli.examples import examples
from streamiter.cli.topics_create import create
from streamiter.cli.topics_list import list_topics
from streamiter.cli.topics_produce import produce
from streamiter.cli.topics_tail import tail

__all__ = ["topics_app"]

topics_app = typer.Typer(
    help="Look into topics and write to them.", no_args_is_help=True, rich_markup_mode=None
)
topics_app.command(
    "create",
    epilog=examples(
        "streamiter topics create kafka://127.0.0.1:9092/clicks --partitions 4 --setting retention.ms=86400000",
        "streamiter topics create 'sqlite:///data.db?topic=clicks' --setting retention_records=1000000",
    ),
)(create)
topics_app.command(
    "list",
    epilog=examples(
        "streamiter topics list kafka://127.0.0.1:9092",
        "streamiter topics list sqlite:///demo-data/streamiter.db",
    ),
)(list_topics)
topics_app.command(
    "produce",
    epilog=examples(
        "streamiter topics produce kafka://127.0.0.1:9092/clicks clicks.jsonl --key user --create",
        "tail -f log.jsonl | streamiter topics produce 'sqlite:///log.db?topic=log' --create",
    ),
)(produce)
topics_app.command(
    "tail",
    epilog=examples(
        "streamiter topics tail kafka://127.0.0.1:9092/clicks -f",
        "streamiter topics tail 'sqlite:///data.db?topic=clicks' -n 1000 --json | jq .value",
        "streamiter topics tail 'sqlite:///data.db?topic=loop' --feedback --json | jq -c '[.epoch, .records]'",
    ),
)(tail)
