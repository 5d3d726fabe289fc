"""The transaction of a job: the effect on the job when the transaction has ended."""

from __future__ import annotations

import pytest
from topics.topic_case import ManualClock, patiently

from streamiter.engine.checkpointing.commit import JobTransaction
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.errors import ProducerFenced, TransactionExpired
from streamiter.topics import MemoryBroker
from streamiter.values.plain_data import PlainData

TIMEOUT_S = 60.0
FLOW = "sums"
CHECKPOINT = CheckpointId(1, "run")


async def opened(broker: MemoryBroker, clock: ManualClock, *, is_newest_run: bool) -> JobTransaction:
    """Return an open transaction of a run which is the newest for the store, or not."""
    await broker.topic("sums").create()

    async def asked() -> bool:
        return is_newest_run

    transaction = JobTransaction(
        FLOW, broker.topic("sums"), clock=clock, timeout_s=TIMEOUT_S, plain_data=PlainData(), is_newest_run=asked
    )
    await patiently(transaction.open())
    return transaction


async def take_over(broker: MemoryBroker) -> None:
    """Take over as a newer run does."""
    await patiently(broker.topic("sums").open_transactions(f"streamiter-{FLOW}"))


async def error_at_commit(transaction: JobTransaction) -> ProducerFenced:
    with pytest.raises(ProducerFenced) as caught:
        await patiently(transaction.commit(CHECKPOINT, continues=True))
    await patiently(transaction.close())
    return caught.value


async def test_a_transaction_that_is_open_for_too_long_is_not_reported_as_another_run() -> None:
    """After a pause of the machine, a service ended because of "another run" that did not exist."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=True)
    clock.advance(2 * TIMEOUT_S)
    assert isinstance(await error_at_commit(transaction), TransactionExpired)


async def test_a_run_whose_transaction_was_open_for_too_long_ends_if_there_is_a_newer_run() -> None:
    """A run slept, was replaced, started again by itself, and ended the run that had replaced it."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=False)
    clock.advance(2 * TIMEOUT_S)
    error = await error_at_commit(transaction)
    assert not isinstance(error, TransactionExpired)
    assert "another run of the flow has taken over, so this one must end" in str(error)


@pytest.mark.parametrize("is_newest_run", [True, False])
@pytest.mark.parametrize("age_s", [0.9 * TIMEOUT_S, 1.1 * TIMEOUT_S])
async def test_a_fence_is_a_timeout_only_if_the_time_is_up_and_no_newer_run_is_known(
    age_s: float, is_newest_run: bool
) -> None:
    """One condition alone was wrong: a newer run claims the store a moment later, or the old run has slept too long."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=is_newest_run)
    await take_over(broker)
    clock.advance(age_s)
    error = await error_at_commit(transaction)
    assert isinstance(error, TransactionExpired) == (age_s > TIMEOUT_S and is_newest_run)
