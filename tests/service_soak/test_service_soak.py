"""A service that is left running survives the death of each process around it, and its own."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from service_soak.ask import Asked
from service_soak.events import good_numbers
from service_soak.oracle import Findings, TopicContents, check, read_topics, requests_of
from service_soak.produce import next_number
from service_soak.quick_start import quick_start
from service_soak.stack import ProcessLife, ServiceStack, running_stack
from support.kafka_server import KafkaServer
from support.soak import in_soak
from support.waiting import PATIENCE_S

from streamiter import topic

_LOOK_S = 0.02


_FROZEN = "frozen broker"


# The soak test has longer freezes: after 60 s the topics are given up, and the service starts its job again. It is one
# case, since two services of one name cannot use one broker.
@pytest.mark.parametrize(
    "victims", [[("service", 0.0), ("broker", 0.0), (_FROZEN, 4.0)], *in_soak([(_FROZEN, 20.0), (_FROZEN, 63.0)])]
)
async def test_service_and_broker_are_killed_and_nothing_is_lost_or_doubled(
    breakable_broker: KafkaServer, topic_prefix: str, tmp_path: Path, victims: Sequence[tuple[str, float]]
) -> None:
    """A service learned the records since its last checkpoint twice after a kill, and published versions with gaps."""
    stack = ServiceStack(breakable_broker, tmp_path, topic_prefix, rate=1000, asks_per_s=50, is_forked=True)
    async with running_stack(stack, publish_every="100ms"):
        for victim, outage_s in victims:
            await _learns(stack)
            await stack.kill(victim, outage_s)
        await _learns(stack)
        await stack.producer.stop()
        good = len(good_numbers(await next_number(topic(stack.topics["events"]))))
        await _until(stack, lambda: stack.last_version()[2] >= good)
        await stack.client.stop()
        code = await stack.service.stop()
    contents, asked = await read_topics(stack.topics), requests_of(tmp_path)
    findings = check(contents, asked, stack.service.lives)
    assert findings.faults == []
    assert (code, stack.service.surprising_ends) == (0, [])
    assert findings.learned > 2000
    assert findings.compared_versions > 10
    assert findings.compared_answers > 10
    began_s, ended_s = stack.broker_outages[-1]
    answered = [each for each in asked if each.probabilities and began_s < each.sent_s < each.done_s < ended_s]
    assert len(answered) > 10  # The oracle has found no refusal.
    _faults_are_found(contents, asked, stack.service.lives)


def _faults_are_found(contents: TopicContents, asked: Sequence[Asked], lives: Sequence[ProcessLife]) -> None:
    """Check the oracle: each kind of fault in the results of a real run is found."""
    *rest, last = contents.updates
    # The first life may have been killed a millisecond after its first answer.
    first_answer = next(each for each in asked if each.probabilities and each.sent_s > lives[-1].began_s)
    other_weights = last.parameters | {"weights": last.parameters["weights"] + 1e-9}
    for tampered, faults in (
        (replace(contents, events=contents.events + 1), {"versions"}),
        (replace(contents, dead_letters=contents.dead_letters[1:]), {"dead letters"}),
        (replace(contents, dead_letters=[*contents.dead_letters, contents.dead_letters[0]]), {"dead letters"}),
        (replace(contents, updates=[*rest[:5], *rest[6:], last]), {"versions", "answers"}),
        (replace(contents, updates=[*rest, msgspec.structs.replace(last, parameters=other_weights)]), {"versions"}),
    ):
        assert _kinds(check(tampered, asked, lives)) & faults
    for request in (
        replace(first_answer, probabilities=[0.5, *first_answer.probabilities[1:]]),
        replace(first_answer, version=10**6),
        replace(first_answer, status=500),
        replace(first_answer, status=0, sent_s=first_answer.done_s + 1e-3, done_s=first_answer.done_s + 2e-3),
    ):
        assert _kinds(check(contents, [*asked, request], lives)) & {"answers", "requests"}


def _kinds(findings: Findings) -> set[str]:
    return {fault.partition(":")[0] for fault in findings.faults}


async def _learns(stack: ServiceStack) -> None:
    """Wait for a thousand more learned events, and for an answer by a version of this life."""
    before = stack.last_version()[2]
    await _until(stack, lambda: stack.last_version()[2] >= before + 1000)


async def _until(stack: ServiceStack, condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as error:
        for child in stack.children:
            error.add_note(f"{child.name}:\n{child.log_tail()}")
        raise


def test_the_quick_start_has_three_commands() -> None:
    """A sentence before the commands hid them from the program that tries them."""
    clone, serve, ask = quick_start()
    assert (clone.split()[:2], serve.split()[:2], ask.split()[0]) == (["git", "clone"], ["make", "demo"], "curl")
