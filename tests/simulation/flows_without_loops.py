"""These flows have keyed state, timers, partitions, mini-batches, side outputs, or inputs read in turn."""

import asyncio
from typing import Any

from streamiter import Flow, Operator, OutputTag, connect, tumbling
from streamiter.testing import Simulation

LATE = OutputTag("late")


class CountWithReminder(Operator):
    """Emits each key's count, and one reminder a second after the key's first record."""

    def open(self, context: Any) -> None:
        self.context = context

    def process(self, record: Any, out: Any) -> None:
        state = self.context.state
        if not state:
            self.context.set_timer(1.0, "is there")
        state["count"] = state.get("count", 0) + 1
        out.emit([self.context.key, state["count"]])

    def on_timer(self, payload: str, out: Any) -> None:
        out.emit([self.context.key, payload])


def keyed_state_and_timers(simulation: Simulation) -> Flow:
    """Return a flow of two subtasks that counts by key over partitions, with timers and an unbounded source."""
    flow = Flow("keyed", parallelism=2)
    records = [{"user": f"u{number % 5}", "n": number} for number in range(30)]
    clicks = flow.source(simulation.input("clicks", records, partitions=3, key=lambda r: r["user"], over_s=3.0))
    counted = clicks.key_by(lambda r: r["user"]).process(CountWithReminder, name="count")
    counted.sink(simulation.output("counts", partitions=2, order="any"), key=lambda r: r[0])
    return flow


def running_totals(simulation: Simulation) -> Flow:
    """Return a flow of two subtasks whose outputs for a key have the order of the key's records."""
    flow = Flow("totals", parallelism=2)
    numbers = simulation.input("numbers", range(40), partitions=4, key=lambda n: str(n % 6), over_s=1.0)
    keyed = flow.source(numbers).key_by(lambda n: n % 6)
    totals = keyed.stateful_map(
        lambda state, n: ((state[0] + n, state[1] + 1), [n % 6, state[0] + n, state[1]]), (0, 0), name="total"
    )
    totals.sink(simulation.output("totals", partitions=3, order="key"), key=lambda r: str(r[0]))
    return flow


def another_parallelism(simulation: Simulation) -> Flow:
    """Return the same keys, partitions and timers with one to three subtasks; each restart changes the number."""
    flow = Flow("rescaled", parallelism=(simulation.seed + simulation.run) % 3 + 1)
    numbers = simulation.input("numbers", range(30), partitions=3, key=lambda n: str(n % 6), over_s=1.0)
    keyed = flow.source(numbers).key_by(lambda n: f"u{n % 6}")
    counted = keyed.process(CountWithReminder, name="count")
    counted.sink(simulation.output("counts", order="any"), key=lambda r: r[0])
    return flow


def calls_of_a_service(simulation: Simulation) -> Flow:
    """Return a flow with calls of different lengths, some of which fail once; the parallelism changes at restarts."""
    flow = Flow("calls", parallelism=(simulation.seed + simulation.run) % 3 + 1)
    numbers = simulation.input("numbers", range(30), partitions=3, key=lambda n: str(n % 6), over_s=1.0)
    failed: set[int] = set()

    async def ask(number: int) -> list[int]:
        await asyncio.sleep(0.01 * (number % 7))
        if number % 5 == 0 and number not in failed:
            failed.add(number)
            raise OSError("overloaded")
        return [number % 6, number]

    options: Any = {"concurrency": 4, "timeout_s": 60, "retries": 2, "backoff_s": 0.05}
    read = flow.source(numbers, name="read")
    in_order = read.key_by(lambda n: n % 6).map_async(ask, name="in order", **options)
    in_order.sink(simulation.output("in order", order="key"), key=lambda r: str(r[0]))
    in_any = read.rebalance().map_async(ask, ordered=False, name="in any order", **options)
    in_any.sink(simulation.output("in any order", order="any"))
    return flow


def mini_batches(simulation: Simulation) -> Flow:
    """Return a flow with mini-batches from transport batches of any size, and a remainder at the end."""
    flow = Flow("mini-batches")
    numbers = flow.source(simulation.input("numbers", range(45), over_s=0.5), stop={0: 45})
    sums = numbers.batch(7, name="sevens").map(lambda batch: [len(batch), int(sum(batch))])
    sums.sink(simulation.output("sums"))
    return flow


class Sieve(Operator):
    """Emits odd numbers to a side output."""

    def process(self, number: int, out: Any) -> None:
        out.emit(number, tag=LATE if number % 2 else None)


def side_outputs_and_dead_letters(simulation: Simulation) -> Flow:
    """Return a flow with undecodable values, rejected records and side outputs: three topics, one transaction."""
    flow = Flow("sieve")
    values = [b"not json" if number % 9 == 4 else str(number).encode() for number in range(40)]
    numbers = flow.source(
        simulation.input("numbers", values, over_s=0.5),
        on_error="dead_letter",
        dead_letter=simulation.output("undecodable"),
    )
    sieved = numbers.process(Sieve)
    sieved.sink(simulation.output("even"))
    late = sieved.side_output(LATE)
    late.map(lambda n: 100 // (n % 5), on_error="dead_letter", dead_letter=simulation.output("indivisible")).sink(
        simulation.output("late")
    )
    return flow


class Zip(Operator):
    """Pairs the records of two inputs in turn; records without a partner are emitted alone."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("b",) if self.left else ("a",)

    def process_a(self, record: Any, out: Any) -> None:
        if self.left:
            out.emit([self.left.pop(), None])
        self.left.append(record)

    def process_b(self, record: Any, out: Any) -> None:
        out.emit([self.left.pop() if self.left else None, record])

    def finish(self, out: Any) -> None:
        out.emit(["left", self.left])

    def snapshot(self) -> list[Any]:
        return list(self.left)

    def restore(self, state: list[Any]) -> None:
        self.left = list(state)


def wanted_inputs(simulation: Simulation) -> Flow:
    """Return a flow whose operator reads its inputs in turn; barriers pass records that it does not want yet."""
    flow = Flow("pairs")
    a = flow.source(simulation.input("a", range(20), over_s=0.3), stop={0: 20}, name="source a")
    b = flow.source(simulation.input("b", range(100, 115), over_s=0.6), stop={0: 15}, name="source b")
    pairs = connect(a=a, b=b).process(Zip, name="zip")
    pairs.sink(simulation.output("pairs"))
    return flow


def joined_at_the_end(simulation: Simulation) -> Flow:
    """Return a flow whose state lasts until the input ends; one sink writes at once, the others in a transaction."""
    flow = Flow("join")
    orders = flow.source(simulation.input("orders", [{"id": n % 7, "n": n} for n in range(20)]), stop="latest")
    names = flow.source(simulation.input("names", [{"id": n, "name": f"n{n}"} for n in range(5)]), stop="latest")
    joined = orders.join(names, on="id", name="join").map(lambda pair: [pair[0]["n"], pair[1]["name"]])
    joined.sink(simulation.output("joined", order="any"))
    orders.map(lambda order: order["n"]).sink(
        simulation.output("seen", delivery="at_least_once"), delivery="at_least_once"
    )
    orders.map(lambda order: order["n"]).reduce_all(lambda a, b: a + b, name="sum").sink(simulation.output("sum"))
    return flow


def history_first(simulation: Simulation) -> Flow:
    """Return a flow that reads a history, then a topic; the order of a key, event time and windows go on.

    Each restart changes the number of subtasks.
    """
    flow = Flow("history first", parallelism=(simulation.seed + simulation.run) % 3 + 1)
    rows = [{"key": n % 5, "n": n} for n in range(60)]
    made = (("history", rows[:40], 3, 0.0, "latest"), ("now", rows[40:], 2, 2.0, None))
    history, now = (
        flow.source(
            simulation.input(name, part, partitions=partitions, key=lambda row: str(row["key"]), over_s=over_s),
            stop=stop,
        ).event_time("n", unit="s", out_of_orderness_s=4, check_unit=False, name=f"time of {name}")
        for name, part, partitions, over_s, stop in made
    )
    keyed = history.then(now, name="then").key_by("key")
    listed = keyed.stateful_map(lambda before, row: ([*before, row["n"]], [row["key"], *before]), [], name="list")
    listed.sink(simulation.output("listed", partitions=3, order="key"), key=lambda record: str(record[0]))
    counts = keyed.window(tumbling(10)).aggregate("count", name="windows")
    counts.map(lambda window: [window.key, window.end, window.value]).sink(simulation.output("windows", order="any"))
    return flow
