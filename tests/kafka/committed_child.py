"""Run a flow without state, whose source has ``start="committed"``, until the process is killed or the input ends.

`test_kafka_committed.py` runs this file:
``committed_child.py <flow> <input> <output> <delivery> <stop> <interval> <transaction timeout>``.
"""

import sys

from streamiter import Checkpoints, Flow, topic


def main(name: str, numbers: str, doubled: str, delivery: str, stop: str, interval_s: str, timeout_s: str) -> None:
    flow = Flow(name)
    read = flow.source(topic(numbers), start="committed", stop="latest" if stop == "latest" else None)
    read.map(lambda number: 2 * number).sink(topic(doubled), delivery="at_least_once" if delivery else None)
    interval, timeout = float(interval_s), float(timeout_s)
    alignment_s = 0.9 * (timeout - interval)
    flow.run(
        checkpoints=Checkpoints(interval_s=interval, alignment_timeout_s=alignment_s, transaction_timeout_s=timeout)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
