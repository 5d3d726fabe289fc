"""Follow a model, and note each version in a file, as a program that tests kill: ``follower.py URL MODEL FILE``."""

from __future__ import annotations

import asyncio
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from streamiter.models import model_updates
from streamiter.topics import topic
from streamiter.values.plain_data import PlainData

LINE_BYTES: Final = 8 + 1 + 64 + 1


def noted(records: int | None, parameters: Any) -> str:
    """Return a line for a version: the number of its records, and a hash of all its bits."""
    return f"{records or 0:08d} {sha256(PlainData().encode(parameters)).hexdigest()}\n"


async def follow(url: str, model: str, notes: Path) -> None:
    """Note the newest version, and each one behind it."""
    with notes.open("ab", buffering=0) as file:
        async with model_updates(topic(url), model, start="latest_model") as updates:
            async for update in updates:
                file.write(noted(update.records, update.parameters).encode())


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
