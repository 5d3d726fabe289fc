"""Create what the stack needs before its other programs start: the topics, and a token for the service.

    pip install ".[kafka]"
    KAFKA=127.0.0.1:9092 TOKEN_FILE=token python examples/online_service/prepare.py

Environment variables, in addition to those of service.py::

    TOKEN_FILE  token   the file of the token; one that exists is kept
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from service import created_topics, until_terminated

TOKEN_FILE = Path(os.environ.get("TOKEN_FILE", "token"))


async def main() -> None:
    for topic in await created_topics():
        print(f"{topic} exists", flush=True)
    write_token()
    print(f"the token is in {TOKEN_FILE}", flush=True)


def write_token() -> None:
    """Write a random token, unless there is one. A full disk may have left an empty file."""
    if not (TOKEN_FILE.exists() and TOKEN_FILE.stat().st_size):
        # Its owner may write it, its group may read it: Prometheus is in this group.
        TOKEN_FILE.touch(mode=0o640)
        TOKEN_FILE.write_text(secrets.token_urlsafe(32), encoding="ascii")


if __name__ == "__main__":
    until_terminated(main())
