"""``make soak-service``: the whole stack at load for many minutes, with kills of each process and of the broker.

``python -m service_soak --minutes 30 --seed 7`` prints a line every half minute, and a report at the end. Its exit code
is 1 if the oracle has found a fault. In the last two fifths the service is not killed: there its memory, files and
threads must be flat, while brokers, producers and clients come and go.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from service_soak.events import good_numbers
from service_soak.oracle import Findings, check, read_topics, requests_of
from service_soak.produce import next_number
from service_soak.resources import trend
from service_soak.stack import ServiceStack, running_stack
from support.kafka_server import running_kafka, what_is_missing

from streamiter import topic

_LINE_S: Final = 30.0
# The kills of a run, at most; and the shortest time between two, in which a service starts and learns again.
_KILLS: Final = 40
_BETWEEN_S: Final = 12.0
_OUTAGE_S_MAX: Final = 30.0
# One outage of a long run is longer than a topic is tried for (60 s): the job fails, and the service starts it again.
_LONG_RUN: Final = 15.0
_LONG_OUTAGE_S: Final = 75.0
_SERVICE_SPARED: Final = 0.6
_LAST_KILL: Final = 0.92
_CATCH_UP_S: Final = 180.0
_VICTIMS: Final = ("broker", "frozen broker", "service", "producer", "consumer", "client")


@dataclass(frozen=True)
class Kill:
    """A planned kill."""

    at_s: float
    """Seconds after the start."""
    victim: str
    outage_s: float
    """For how long a broker stays down, or frozen."""


def kills(minutes: float, seed: int) -> Iterator[Kill]:
    """Yield the kills in order: all victims in turn, each turn in another order.

    >>> planned = list(kills(5, seed=7))
    >>> {kill.victim for kill in planned} == set(_VICTIMS)
    True
    >>> "service" in {kill.victim for kill in planned if kill.at_s > 180}
    False
    """
    draw, total_s = random.Random(seed), 60.0 * minutes
    between_s = max(_BETWEEN_S, total_s / _KILLS)
    at_s, victims, has_long = between_s, list[str](), minutes < _LONG_RUN
    while (at_s := at_s + draw.uniform(0.6, 1.4) * between_s) < _LAST_KILL * total_s:
        if not victims:
            victims = draw.sample(_VICTIMS, len(_VICTIMS))
        if at_s > _SERVICE_SPARED * total_s and victims[-1] == "service":
            victims.pop()
        if victims:
            kill = Kill(at_s, victims.pop(), draw.uniform(0.0, min(_OUTAGE_S_MAX, between_s)))
            if kill.victim == "broker" and at_s > _SERVICE_SPARED * total_s and not has_long:
                kill, has_long = replace(kill, outage_s=_LONG_OUTAGE_S), True
            yield kill


async def soak(stack: ServiceStack, minutes: float, seed: int) -> Findings:
    """Run the stack with all kills; return what the oracle has found."""
    began_s = time.monotonic()
    killed: Counter[str] = Counter()
    async with running_stack(stack):
        telling = asyncio.create_task(_tell(stack, began_s, killed))
        for kill in kills(minutes, seed):
            await asyncio.sleep(began_s + kill.at_s - time.monotonic())
            killed[kill.victim] += await stack.kill(kill.victim, kill.outage_s)
        await asyncio.sleep(began_s + 60.0 * minutes - time.monotonic())
        print("the producer stops, and the service learns from the rest", flush=True)
        await stack.producer.stop()
        good = len(good_numbers(await next_number(topic(stack.topics["events"]))))
        caught_up_s = await _within(_CATCH_UP_S, lambda: stack.last_version()[2] >= good)
        telling.cancel()
        codes = [(child.name, await child.stop()) for child in (stack.client, stack.consumer, stack.service)]
    print(f"killed: {dict(killed)}; the rest was learned after {caught_up_s:.1f} s; the oracle reads", flush=True)
    findings = check(await read_topics(stack.topics), requests_of(stack.folder), stack.service.lives)
    findings.add("ends", (f"{name} ended with {code} after SIGTERM" for name, code in codes if code))
    findings.add("ends", _surprises(stack))
    findings.add("the stack", ("no " + name for name in _VICTIMS if not killed[name]))
    return findings


def _surprises(stack: ServiceStack) -> Iterator[str]:
    """Yield the ends of processes that were not killed; the producer may end while the broker is away."""
    for child in stack.children:
        for life in child.surprising_ends:
            assert life.ended_s is not None
            is_outage = any(begin_s <= life.ended_s <= end_s + 30.0 for begin_s, end_s in stack.broker_outages)
            if child is stack.service or not is_outage:
                yield f"{child.name} ended with {life.code} on its own\n{life.last_words}"


async def _within(limit_s: float, condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while time.monotonic() < began_s + limit_s and not condition():
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


async def _tell(stack: ServiceStack, began_s: float, killed: Counter[str]) -> None:
    records = 0
    while True:
        await asyncio.sleep(_LINE_S)
        generation, version, learned = stack.last_version()
        life = stack.service.life
        now = life.resources[-1] if life is not None and life.resources else None
        used = "down" if now is None else f"{now.rss_bytes >> 20} MiB, {now.files} files, {now.threads} threads"
        print(
            f"{time.monotonic() - began_s:6.0f} s  version {generation}.{version}, {learned:,} learned, "
            f"{(learned - records) / _LINE_S:,.0f}/s; service {used}; {killed.total()} kills",
            flush=True,
        )
        records = learned


def report(stack: ServiceStack, findings: Findings) -> None:
    """Print what was counted, and all faults."""
    ms = 1000.0 * np.array(findings.seconds or [np.nan])
    print(
        f"events {findings.events:,}: learned {findings.learned:,}, dead letters {findings.dead_letters:,}\n"
        f"versions {findings.versions:,} of {findings.generations} generation(s); all weights of "
        f"{findings.compared_versions:,} equal those of an offline pass\n"
        f"predictions: {findings.compared_answers:,} answers compared with their versions; "
        f"p50 {np.percentile(ms, 50):.1f} ms, p99 {np.percentile(ms, 99):.1f} ms, longest {ms.max():.0f} ms"
    )
    for what, count in sorted(findings.answers.items()):
        print(f"  {what:<26}{count:>9,}")
    outages = [end_s - begin_s for begin_s, end_s in stack.broker_outages]
    print(f"the broker was away or frozen {len(outages)} times: {', '.join(f'{each:.0f}' for each in outages)} s")
    for child in stack.children:
        longest = max(child.lives, key=lambda life: len(life.resources))
        found = trend(longest.resources)
        print(f"{child.name}: {len(child.lives)} lives; the longest after its warm-up, {found or 'too short'}")
        if found is not None:
            findings.add(f"resources of the {child.name}", found.faults)
    print("FAULTS" if findings.faults else "no faults")
    for fault in findings.faults:
        print(f"  {fault}")


def main() -> int:
    """Run the program; return its exit code."""
    options = argparse.ArgumentParser(prog="python -m service_soak")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    options.add_argument("--rate", type=int, default=5000, help="events per second")
    options.add_argument("--asks", type=float, default=100.0, help="requests per second, of ten rows each")
    given = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Otherwise its processes would outlive this one.
    if reason := what_is_missing():
        print(reason, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="streamiter-soak-") as folder, running_kafka() as broker:
        print(
            f"{given.minutes:g} minutes, seed {given.seed}, {given.rate:,} events/s, {given.asks:g} requests/s; "
            f"again: make soak-service MINUTES={given.minutes:g} SEED={given.seed}",
            flush=True,
        )
        stack = ServiceStack(broker, Path(folder), "soak-", rate=given.rate, asks_per_s=given.asks, is_forked=False)
        findings = asyncio.run(soak(stack, given.minutes, given.seed))
        report(stack, findings)
        if findings.faults:
            print(f"the service's last lines:\n{stack.service.log_tail(60)}")
    return 1 if findings.faults else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
