"""A loop of very many rounds whose last round is the result; tests run it as a process.

Argument: the effect of Ctrl-C, as for ``on_interrupt``.
"""

import sys

from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
from streamiter.iteration import last_round, terminate_after


def counted(number):
    if number == 100:
        print("in round 100", flush=True)
    return number + 1


def body(variables, data):
    numbers = variables[0].map(counted)
    return IterationBodyResult([numbers], [last_round(numbers)], terminate_after(numbers, rounds=10**9))


if __name__ == "__main__":
    flow = Flow("loop")
    [last] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = last.collect()
    statistics = flow.run(on_interrupt=sys.argv[1])
    [loop] = statistics.loops
    print(statistics.state, loop.ended_in, loop.end_reason, *collected.items, flush=True)
