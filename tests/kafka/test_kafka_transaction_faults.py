"""Answers are lost, brokers die or freeze: a transaction is committed once, or it is known to have failed.

The brokers have transactions of version 2; the tests also run with version 1, which older brokers have.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kafka_fixtures import skip_without_java
from support.kafka_server import KafkaServer, running_kafka
from support.waiting import PATIENCE_S
from topics.topic_case import begun, created, numbered, numbers_of, patiently, read_to_end, values_of, write

from streamiter.errors import ProducerFenced, TopicUnavailable, TransactionExpired
from streamiter.topics import OutgoingBatch, Topic, Transactions, topic
from streamiter.topics.compacted import last_value
from streamiter.values.helpers.clock import SystemClock
from streamiter_kafka import cluster
from streamiter_kafka.trouble import BrokerTrouble
from streamiter_kafka.wire import FeaturesRequest

PATIENT = {"give_up_after_s": PATIENCE_S, "request_timeout_s": 2.0}
QUICK = {"give_up_after_s": 1.0, "request_timeout_s": 0.3}

MakeTopic = Callable[..., Topic]


class LossyNetwork:
    """Loses answers of the broker or requests to it, by the name of the request."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.answers: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.lost: list[str] = []
        self._send = cluster.send

    def lose_answers(self, request: str, count: int = 1) -> None:
        self.answers[request] = count

    def lose_requests(self, request: str, count: int = 1) -> None:
        self.requests[request] = count

    async def send(self, connection: Any, request: object, *others: Any) -> Any:
        self.sent.append(type(request).__name__)
        name = self.sent[-1].removesuffix("V2")
        if self._loses(self.requests, name):
            raise BrokerTrouble(f"{name} lost")
        answer = await self._send(connection, request, *others)
        if self._loses(self.answers, name):
            raise BrokerTrouble(f"answer to {name} lost")
        return answer

    def _loses(self, counts: dict[str, int], name: str) -> bool:
        if not counts.get(name):
            return False
        counts[name] -= 1
        self.lost.append(name)
        return True


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the version of transactions; for version 1, the broker does not tell the features of its cluster."""
    if request.param == 1:
        monkeypatch.setattr(FeaturesRequest, "_CLASSES", ())
    return int(request.param)


@pytest.fixture
def kafka_topic(kafka_topic: MakeTopic, version: int) -> MakeTopic:
    """Return a maker of topics on the shared broker, for both versions of transactions."""
    return kafka_topic


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> LossyNetwork:
    """Return a network that loses messages between the connector and a real broker."""
    lossy = LossyNetwork()
    monkeypatch.setattr(cluster, "send", lossy.send)
    return lossy


async def write_number(transactions: Transactions, to: Topic, number: int) -> None:
    await patiently(transactions.write(to, OutgoingBatch(numbered([number]), keys=[b"flow"])))


# -- lost answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["answers", "requests"])
@pytest.mark.parametrize(
    ("version", "request_"),
    [
        *[(version, f"{name}Request") for version in (1, 2) for name in ("InitProducerId", "Produce", "EndTxn")],
        (1, "AddPartitionsToTxnRequest"),
        (1, "RenewProducerRequest"),
        (2, "FeaturesRequest"),
    ],
    indirect=["version"],
)
async def test_a_lost_message_neither_loses_nor_doubles_records(
    kafka_topic: MakeTopic, network: LossyNetwork, request_: str, lost: str
) -> None:
    """A request was sent again after a lost answer, and its records were lost or doubled."""
    made = await created(kafka_topic(**PATIENT), partitions=2)
    lose = network.lose_answers if lost == "answers" else network.lose_requests
    lose(request_, 2)
    if request_ == "RenewProducerRequest":
        network.lose_answers("EndTxnRequest")  # makes the renewal necessary
    transactions = await made.open_transactions(f"{made.name}-t")
    for transaction in range(3):
        if transaction:
            lose(request_, 1)
        await patiently(transactions.begin())
        for number in range(4):
            batch = OutgoingBatch(numbered([4 * transaction + number]), partition=number % 2)
            await patiently(transactions.write(made, batch))
        if transaction == 1:
            await patiently(transactions.abort())
        else:
            await patiently(transactions.commit())
            assert len(await read_to_end(made)) == (4 if transaction == 0 else 8)
    await transactions.close()
    assert request_ in network.lost
    assert sorted(numbers_of(await read_to_end(made))) == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("lost", ["answers", "requests"])
async def test_the_outcome_of_a_commit_without_an_answer_can_be_read(
    kafka_topic: MakeTopic, network: LossyNetwork, lost: str
) -> None:
    """A commit without an answer was taken for failed, and its visible outputs were written a second time."""
    made = await created(kafka_topic(**QUICK))
    transactions = await begun(made, f"{made.name}-t")
    await write_number(transactions, made, 0)
    await patiently(transactions.commit())
    await patiently(transactions.begin())
    await write_number(transactions, made, 1)
    (network.lose_answers if lost == "answers" else network.lose_requests)("EndTxnRequest", 10**6)
    with pytest.raises(TopicUnavailable):
        await patiently(transactions.commit())
    network.lose_answers("EndTxnRequest", 0)
    network.lose_requests("EndTxnRequest", 0)
    await patiently(transactions.close())
    again = await patiently(made.open_transactions(f"{made.name}-t"))
    record = await patiently(last_value(made, b"flow", clock=SystemClock()))
    assert record is not None
    assert record.value == (b"1" if lost == "answers" else b"0")
    await patiently(again.begin())
    await write_number(again, made, 2)
    await patiently(again.commit())
    await again.close()
    assert numbers_of(await read_to_end(made)) == ([0, 1, 2] if lost == "answers" else [0, 2])


async def test_a_request_to_end_that_arrives_late_does_not_end_the_next_transaction(
    kafka_topic: MakeTopic, network: LossyNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that had been sent again arrived late and ended the next transaction, so half a checkpoint was
    visible.
    """
    made = await created(kafka_topic(**PATIENT))
    late: list[tuple[Any, ...]] = []

    async def hold_back(connection: Any, request: object, *others: Any) -> Any:
        if type(request).__name__.startswith("EndTxn") and not late:
            late.append((connection, request, *others))
            raise BrokerTrouble("no answer")
        return await network.send(connection, request, *others)

    transactions = await begun(made, f"{made.name}-t")
    await write_number(transactions, made, 0)
    monkeypatch.setattr(cluster, "send", hold_back)
    await patiently(transactions.commit())
    await patiently(transactions.begin())
    await write_number(transactions, made, 1)
    await until_written(made, 3)  # the first commit has the offset 1
    await patiently(network.send(*late[0]))
    assert numbers_of(await read_to_end(made)) == [0]
    await write_number(transactions, made, 2)
    await patiently(transactions.commit())
    await transactions.close()
    assert numbers_of(await read_to_end(made)) == [0, 1, 2]


async def write_for_ever(transactions: Transactions, to: Topic) -> None:
    while True:
        await transactions.write(to, OutgoingBatch([b"late"]))
        await asyncio.sleep(0)


async def until_written(made: Topic, end: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await made.describe()).offsets[0][1] < end:
            pass  # the record is being sent


@pytest.mark.parametrize("version", [2], indirect=True)
@pytest.mark.parametrize("before", [0, 1, 2])
async def test_a_run_that_is_replaced_while_it_begins_takes_nothing_from_the_newer_run(
    kafka_topic: MakeTopic, network: LossyNetwork, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A run lost an answer and asked for a new epoch; a newer run had just begun, and its transaction was aborted."""
    made = await created(kafka_topic(**PATIENT))
    older = await begun(made, f"{made.name}-t")
    await write_number(older, made, 0)
    network.lose_answers("EndTxnRequest")
    await patiently(older.commit())
    newer: list[Transactions] = []
    requests: list[object] = []

    async def replace(connection: Any, request: object, *others: Any) -> Any:
        requests.append(request)
        if len(requests) == before + 1:
            newer.append(await made.open_transactions(f"{made.name}-t"))
            await newer[0].begin()
            await write_number(newer[0], made, 1)
            await until_written(made, 3)  # the first commit has the offset 1
        return await network.send(connection, request, *others)

    monkeypatch.setattr(cluster, "send", replace)
    with contextlib.suppress(ProducerFenced):
        await patiently(older.begin())
        await write_number(older, made, 2)
        await patiently(older.commit())
    await patiently(newer[0].commit())
    for each in (older, *newer):
        await each.close()
    assert numbers_of(await read_to_end(made)) == [0, 1]


async def test_losing_an_answer_takes_nothing_from_a_newer_owner(kafka_topic: MakeTopic, network: LossyNetwork) -> None:
    """A request for a new epoch took the id from a newer owner, or ended the newer owner's transaction."""
    made = await created(kafka_topic(**PATIENT))
    older = await begun(made, f"{made.name}-t")
    await write_number(older, made, 0)
    network.lose_answers("EndTxnRequest")
    await patiently(older.commit())
    newer = await begun(made, f"{made.name}-t")
    await write_number(newer, made, 1)
    await until_written(made, 3)  # the first commit has the offset 1
    with pytest.raises(ProducerFenced) as caught:
        await patiently(older.begin())
    assert not isinstance(caught.value, TransactionExpired)
    await patiently(newer.commit())
    await older.close()
    await newer.close()
    assert numbers_of(await read_to_end(made)) == [0, 1]


async def test_a_cancelled_commit_is_done_or_not_but_never_twice(kafka_topic: MakeTopic) -> None:
    """A caller reopened, read, and wrote the missing records after a cancelled commit, and some were stored twice."""
    made = await created(kafka_topic(**PATIENT))
    transactions = await made.open_transactions(f"{made.name}-t")
    for number in range(10):
        await patiently(transactions.begin())
        await write_number(transactions, made, number)
        committing = asyncio.ensure_future(transactions.commit())
        await asyncio.wait({committing}, timeout=0.002 * number)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await transactions.close()
        transactions = await made.open_transactions(f"{made.name}-t")
        committed = numbers_of(await read_to_end(made))
        if number not in committed:
            await patiently(transactions.begin())
            await write_number(transactions, made, number)
            await patiently(transactions.commit())
    await transactions.close()
    assert numbers_of(await read_to_end(made)) == list(range(10))


# -- owners --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "commit", "abort"])
async def test_a_replaced_run_takes_nothing_from_the_newer_run(kafka_topic: MakeTopic, call: str) -> None:
    """A replaced run asked the broker for the reason, which aborted the newer run's transaction: both runs ended."""
    made = await created(kafka_topic(**PATIENT))
    older = await begun(made, f"{made.name}-t")
    await write_number(older, made, 0)
    await until_written(made, 1)
    newer = await begun(made, f"{made.name}-t")
    await write_number(newer, made, 1)
    await until_written(made, 3)  # the abort of the older transaction has the offset 1
    with pytest.raises(ProducerFenced) as caught:
        await patiently(write_for_ever(older, made) if call == "write" else getattr(older, call)())
    assert not isinstance(caught.value, TransactionExpired)
    await older.close()
    await write_number(newer, made, 2)
    await patiently(newer.commit())
    await newer.close()
    assert numbers_of(await read_to_end(made)) == [1, 2]


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_a_run_that_timed_out_takes_nothing_from_a_newer_run(kafka_topic: MakeTopic, is_replaced: bool) -> None:
    """A run whose transaction had timed out looked for the present owner, and ended the newer run's transaction.

    Without a newer run, its commit failed with an error after which it did not resume.
    """
    made = await created(kafka_topic())
    older = await made.open_transactions(f"{made.name}-t", timeout_s=0.3)
    await patiently(older.begin())
    await write_number(older, made, 0)
    await until_written(made, 1)  # otherwise the transaction may begin behind the next record
    await write(made, OutgoingBatch([b"behind"]))
    async with asyncio.timeout(PATIENCE_S):
        while not await read_to_end(made):
            pass  # the broker ends the transaction, which lets "behind" be read
    if is_replaced:
        newer = await begun(made, f"{made.name}-t")
        await write_number(newer, made, 1)
        await until_written(made, 4)  # the record "behind" and the abort are written
    with pytest.raises(TransactionExpired, match="unless a newer writer has taken over"):
        await patiently(older.commit())
    await older.close()
    if is_replaced:
        await patiently(newer.commit())
        await newer.close()
    assert values_of(await read_to_end(made)) == [b"behind", *([b"1"] if is_replaced else [])]


async def test_a_run_replaced_without_an_open_transaction_reports_no_timeout(kafka_topic: MakeTopic) -> None:
    """A replaced run reported a timeout, although the broker measures no time without records."""
    made = await created(kafka_topic())
    older = await made.open_transactions(f"{made.name}-t", timeout_s=0.1)
    await patiently(older.begin())
    newer = await made.open_transactions(f"{made.name}-t")
    await asyncio.sleep(0.2)  # the connector measures real time
    with pytest.raises(ProducerFenced) as caught:
        await patiently(older.commit())
    assert not isinstance(caught.value, TransactionExpired)
    await older.close()
    await newer.close()


# -- the broker ----------------------------------------------------------------------------------------------


@pytest.fixture
def handle(breakable_broker: KafkaServer, topic_prefix: str, version: int) -> MakeTopic:
    """Return a maker of topics on the broker that will break, for both versions of transactions."""

    def make(name: str = "clicks", **options: object) -> Topic:
        return topic(f"kafka://{breakable_broker.bootstrap}/{topic_prefix}{name}", **options)

    return make


@pytest.mark.parametrize(("timeout_s", "version"), [(60.0, 2), (0.5, 2), (0.5, 1)], indirect=["version"])
async def test_a_commit_to_a_frozen_broker_is_done_once_or_not_at_all(
    breakable_broker: KafkaServer, handle: MakeTopic, timeout_s: float
) -> None:
    """A frozen broker executed abandoned requests later, and a commit was done twice."""
    made = await created(handle(give_up_after_s=PATIENCE_S, request_timeout_s=0.3))
    transactions = await made.open_transactions(f"{made.name}-t", timeout_s=timeout_s)
    await patiently(transactions.begin())
    await write_number(transactions, made, 0)
    await until_written(made, 1)
    breakable_broker.pause()
    committing = asyncio.ensure_future(transactions.commit())
    done, _ = await asyncio.wait({committing}, timeout=1.5)  # several requests give up meanwhile
    assert not done
    breakable_broker.resume()
    try:
        await patiently(committing)
        committed = True
    except TransactionExpired:
        committed = False
        await transactions.close()
        transactions = await patiently(made.open_transactions(f"{made.name}-t"))
    assert committed or timeout_s < 1
    assert values_of(await read_to_end(made)) == ([b"0"] if committed else [])
    await patiently(transactions.begin())
    await write_number(transactions, made, 1)
    await patiently(transactions.commit())
    await transactions.close()
    assert numbers_of(await read_to_end(made)) == ([0, 1] if committed else [1])


async def test_a_topic_deleted_with_records_of_the_transaction_does_not_hold_up_the_others(handle: MakeTopic) -> None:
    """A commit waited for the records of a topic that an administrator had deleted."""
    gone, kept = handle("gone", **PATIENT), handle("kept", **PATIENT)
    await gone.create()
    await kept.create()
    transactions = await begun(kept, f"{kept.name}-t")
    await write_number(transactions, gone, 0)
    await write_number(transactions, kept, 0)
    await until_written(gone, 1)
    await until_written(kept, 1)
    await gone.delete()
    await patiently(transactions.commit())
    await patiently(transactions.begin())
    await write_number(transactions, kept, 1)
    await patiently(transactions.commit())
    await transactions.close()
    assert numbers_of(await read_to_end(kept)) == [0, 1]


# -- older brokers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def older_broker() -> Iterator[KafkaServer]:
    """Start a broker without transactions of version 2, which soon forgets ids that are not used."""
    skip_without_java()
    settings = {
        "transactional.id.expiration.ms": "200",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    }
    with running_kafka(settings=settings, format_options=("--feature", "transaction.version=0")) as server:
        yield server


@pytest.mark.parametrize(
    ("broker", "requests"),
    [
        ("older_broker", {"AddPartitionsToTxnRequest", "ProduceRequest", "EndTxnRequest"}),
        ("kafka_broker", {"ProduceRequestV2", "EndTxnRequestV2"}),
    ],
)
async def test_a_commit_sends_only_the_requests_that_the_version_of_the_broker_needs(
    request: pytest.FixtureRequest, network: LossyNetwork, topic_prefix: str, broker: str, requests: set[str]
) -> None:
    """A broker before 4.0 got requests that it does not know, or a newer one a request more for each commit."""
    made = await created(topic(f"kafka://{request.getfixturevalue(broker).bootstrap}/{topic_prefix}clicks", **PATIENT))
    await patiently(commit_a_number(made))
    assert numbers_of(await read_to_end(made)) == [0]
    assert {name for name in network.sent if "Txn" in name or "Produce" in name} - {"InitProducerIdRequest"} == requests


async def test_a_forgotten_id_is_not_taken_for_another_owner(older_broker: KafkaServer) -> None:
    """A flow that was idle for a week ended with an error about "another run"."""
    made = await created(topic(f"kafka://{older_broker.bootstrap}/clicks", **PATIENT))
    transactions = await made.open_transactions("t")
    with pytest.raises(TransactionExpired, match=r"transactional\.id\.expiration\.ms"):
        await patiently(commit_nothing_for_ever(transactions))
    await transactions.close()
    await patiently(commit_a_number(made))
    assert numbers_of(await read_to_end(made)) == [0]


async def commit_a_number(to: Topic) -> None:
    """Write a number in a new transaction; try again if the busy machine let the id expire before the first request."""
    is_written = False
    while not is_written:
        transactions = await to.open_transactions("t")
        with contextlib.suppress(TransactionExpired):
            await transactions.begin()
            await write_number(transactions, to, 0)
            await transactions.commit()
            is_written = True
        await transactions.close()


async def commit_nothing_for_ever(transactions: Transactions) -> None:
    while True:
        await transactions.begin()
        await transactions.commit()
        await asyncio.sleep(0.02)  # the broker forgets ids in real time
