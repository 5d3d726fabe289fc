"""The flow of `sums.py` as a program: ``summing.py OPTIONS``, with `Options` as JSON."""

from __future__ import annotations

import logging
import sys

import msgspec
from job_faults.sums import Topics, sums_flow

from streamiter import Checkpoints, topic


class Options(msgspec.Struct):
    """The arguments of the program."""

    flow: str
    numbers: str
    sums: str
    folder: str
    interval_s: float
    alignment_timeout_s: float
    transaction_timeout_s: float


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    options = msgspec.json.decode(sys.argv[1], type=Options)
    kept = Checkpoints(
        options.folder,
        interval_s=options.interval_s,
        alignment_timeout_s=options.alignment_timeout_s,
        transaction_timeout_s=options.transaction_timeout_s,
    )
    topics = Topics.same(topic(options.numbers), topic(options.sums))
    print(sums_flow(options.flow, topics).run(checkpoints=kept).state)


if __name__ == "__main__":
    main()
