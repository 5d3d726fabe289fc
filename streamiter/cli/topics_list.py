"""``streamiter topics list``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import orjson
import typer

from streamiter.cli.tables import print_table
from streamiter.cli.topic_arguments import AsJson, check_lasting
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import TopicDescription, connector_for
from streamiter.topics.secrets import shown_url

__all__ = ["list_topics"]

_Found = list[tuple[str, TopicDescription]]
"""Topics by the names that their server, file or folder has for them."""


def list_topics(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="A server, file or folder, as kafka://127.0.0.1:9092", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List the topics of a server, file or folder.

    Each with its partitions and how many records are in it.
    """
    check_lasting(url)
    try:
        found = run_in_own_loop(_descriptions(url))
    except TopicNotFound as error:
        raise ConfigurationError(str(error)) from error  # Of a folder: nothing that could be created.
    if as_json:
        for name, description in found:
            typer.echo(orjson.dumps(_described(name, description)).decode())
    elif not found:
        typer.echo(f"no topics in {shown_url(url)}", err=True)
    elif sys.stdout.isatty():
        print_table(
            ("topic", "partitions", "records"),
            [(name, str(topic.partitions), f"{_records(topic):,}") for name, topic in found],
            numbers=("partitions", "records"),
        )
    else:
        for name, description in found:
            typer.echo(f"{name}\t{description.partitions}\t{_records(description)}")


async def _descriptions(url: str) -> _Found:
    connector = connector_for(url)
    names = sorted(await connector.list_topics(url, {}))
    return [(name, await connector.topic(_with_topic(url, name), {}).describe()) for name in names]


def _with_topic(url: str, name: str) -> str:
    """The URL of a topic of that name beside or below ``url``."""
    if url.lower().startswith("sqlite:"):
        return f"{url.partition('?')[0]}?topic={name}"
    place, _, query = url.partition("?")
    options = f"?{query}" if query else ""
    if url.lower().startswith("file:"):
        scheme, _, path = place.partition(":")
        return f"{scheme}:{path[: path.rfind('/') + 1]}{name}{options}"
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}{options}"


def _records(description: TopicDescription) -> int:
    return sum(end - start for start, end in description.offsets.values())


def _described(name: str, description: TopicDescription) -> dict[str, Any]:
    offsets = {str(partition): list(ends) for partition, ends in description.offsets.items()}
    return {
        "topic": name,
        "partitions": description.partitions,
        "records": _records(description),
        "offsets": offsets,
    }
