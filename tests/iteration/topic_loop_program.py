"""Tokens in a loop through a topic, as a program that can be killed: ``topic_loop_program.py OPTIONS`` (JSON)."""

from __future__ import annotations

import sys

import msgspec
from iteration.topic_loops_support import Kind, token_flow

from streamiter import Checkpoints, topic


class Options(msgspec.Struct):
    """The options of the program."""

    flow: str
    loop: str
    out: str
    folder: str
    interval_s: float
    tokens: int
    most: int
    kind: Kind


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    poll = {"poll_interval_s": 0.001} if options.loop.startswith("sqlite:") else {}
    flow = token_flow(
        topic(options.loop, **poll),
        topic(options.out, **poll),
        tokens=options.tokens,
        most=options.most,
        kind=options.kind,
        name=options.flow,
    )
    flow.run(checkpoints=Checkpoints(options.folder, interval_s=options.interval_s))


if __name__ == "__main__":
    main()
