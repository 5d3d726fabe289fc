"""``streamiter topics create``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from streamiter.cli.topic_arguments import Url, lasting_topic
from streamiter.errors import TopicNotFound
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import Topic, TopicDescription

__all__ = ["create"]


def create(
    url: Url,
    partitions: Annotated[int, typer.Option(metavar="N", min=1, help="How many partitions it has.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            metavar="NAME=VALUE",
            help="A setting of the topic; may be repeated. Kafka: those of Kafka, and replication.factor. "
            "SQLite: retention_ms, retention_records, retention_bytes, compact, max_record_bytes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Create a topic, if it is not there.

    One that is there keeps its records and its settings; if it has fewer partitions it gains the missing ones.
    """
    target, wanted = lasting_topic(url), _parsed(settings or [])
    before, after = run_in_own_loop(_create(target, partitions, wanted))
    typer.echo(_outcome(target.url, before, after), err=True)
    if before is not None and any(after.settings.get(name) != value for name, value in wanted.items()):
        typer.echo("It keeps the settings that it was created with; --setting changes nothing.", err=True)


def _parsed(settings: Sequence[str]) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"expected NAME=VALUE, given {setting!r}", param_hint="'--setting'")
        if name in parsed:
            raise typer.BadParameter(
                f"expected each name once, given {name!r} twice", param_hint="'--setting'"
            )
        parsed[name] = value
    return parsed


async def _create(
    target: Topic, partitions: int, settings: Mapping[str, str]
) -> tuple[TopicDescription | None, TopicDescription]:
    """The topic before (None: it was not there) and after."""
    try:
        before = await target.describe()
    except TopicNotFound:
        before = None
    await target.create(partitions=partitions, settings=settings)
    return before, await target.describe()


def _outcome(url: str, before: TopicDescription | None, after: TopicDescription) -> str:
    partitions = f"{after.partitions:,} partition{'' if after.partitions == 1 else 's'}"
    if before is None:
        return f"created {url} with {partitions}"
    if before.partitions < after.partitions:
        return f"{url} has {partitions} now, {before.partitions:,} before"
    return f"{url} is there already, with {partitions}"
