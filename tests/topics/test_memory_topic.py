"""Topics in memory, and connectors, which are found by the scheme of a URL."""

import asyncio
import importlib.metadata
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from topics.topic_case import (
    ManualClock,
    begun,
    created,
    numbered,
    numbers_of,
    patiently,
    read_to_end,
    values_of,
    write,
    write_transaction,
)

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicError, TransactionExpired
from streamiter.topics import MemoryBroker, MemoryConnector, OutgoingBatch, ReadRequest, connector_for, topic
from streamiter.topics.urls import known_schemes


async def test_the_end_of_a_transaction_takes_an_offset() -> None:
    """Code that expects offsets without gaps passed all tests, and failed on Kafka."""
    clicks = await created(MemoryBroker().topic("clicks"))
    transactions = await clicks.open_transactions("t")
    for values in ([b"a", b"b"], [b"c"]):
        await write_transaction(transactions, clicks, values, commit=True)
    assert [record.offset for record in await read_to_end(clicks)] == [0, 1, 3]
    assert (await clicks.describe()).offsets == {0: (0, 5)}


async def test_a_reader_stops_before_an_open_transaction() -> None:
    """A reader in memory passed an open transaction, unlike in Kafka, where it waits at the last stable offset."""
    clicks = await created(MemoryBroker().topic("clicks"))
    transactions = await clicks.open_transactions("t")
    await write(clicks, [b"before"])
    await transactions.begin()
    await transactions.write(clicks, OutgoingBatch([b"inside"]))
    await write(clicks, [b"behind"])
    assert values_of(await read_to_end(clicks)) == [b"before"]
    await transactions.abort()
    assert values_of(await read_to_end(clicks)) == [b"before", b"behind"]


async def test_time_stamps_come_from_the_clock() -> None:
    """A simulated run got the real time in its records."""
    clock = ManualClock(5.0)
    clicks = await created(MemoryBroker(clock=clock).topic("clicks"))
    await write(clicks, [b"a"])
    clock.advance(1.5)
    await write(clicks, [b"b"])
    assert [record.timestamp_ms for record in await read_to_end(clicks)] == [5000, 6500]


async def test_a_transaction_left_open_is_aborted_in_time() -> None:
    """A run that hung between two checkpoints held up all readers for ever."""
    clock = ManualClock()
    clicks = await created(MemoryBroker(clock=clock).topic("clicks"))
    transactions = await clicks.open_transactions("t", timeout_s=60.0)
    await transactions.begin()
    await transactions.write(clicks, OutgoingBatch([b"late"]))
    await write(clicks, [b"behind"])
    reader = await clicks.open_reader(ReadRequest(clock=clock))
    reading = asyncio.ensure_future(reader.read())
    clock.advance(59.0)
    await asyncio.sleep(0)
    assert not reading.done()
    clock.advance(2.0)
    batch = await patiently(reading)
    assert batch is not None
    assert batch.values == [b"behind"]
    with pytest.raises(TransactionExpired, match="60 s"):
        await transactions.commit()


async def test_the_timer_does_not_end_a_later_transaction() -> None:
    """The timer of a transaction that had ended aborted the next transaction."""
    clock = ManualClock()
    clicks = await created(MemoryBroker(clock=clock).topic("clicks"))
    transactions = await clicks.open_transactions("t", timeout_s=60.0)
    for number in range(3):
        await transactions.begin()
        await transactions.write(clicks, OutgoingBatch(numbered([number])))
        clock.advance(50.0)
        await transactions.commit()
    assert numbers_of(await read_to_end(clicks)) == [0, 1, 2]


async def test_retention_by_count_is_exact_and_spares_open_transactions() -> None:
    """Retention dropped records of an open transaction, which were then neither visible nor aborted."""
    clicks = await created(MemoryBroker().topic("clicks"), settings={"retention_records": "3"})
    await write(clicks, numbered(range(10)))
    assert (await clicks.describe()).offsets == {0: (7, 10)}
    assert numbers_of(await read_to_end(clicks)) == [7, 8, 9]
    transactions = await begun(clicks, "t")
    await transactions.write(clicks, OutgoingBatch(numbered([10])))
    await write(clicks, numbered(range(11, 20)))
    assert (await clicks.describe()).offsets == {0: (10, 20)}
    await transactions.commit()
    assert numbers_of(await read_to_end(clicks)) == [18, 19]  # the commit has the offset 20


async def test_a_reader_that_fell_behind_retention_gets_an_error() -> None:
    """A slow reader continued at the earliest record, and lost records without an error."""
    clicks = await created(MemoryBroker().topic("clicks"), settings={"retention_records": "3"})
    reader = await clicks.open_reader(ReadRequest())
    await write(clicks, numbered(range(10)))
    with pytest.raises(OffsetOutOfRange, match=r"offset 0 fell out of retention; expected 7 to 10"):
        await reader.read()


async def test_written_records_do_not_change_with_the_caller_s_list() -> None:
    """A caller filled its list again, and the stored records changed with it."""
    clicks = await created(MemoryBroker().topic("clicks"))
    values: list[bytes | None] = [b"a"]
    await write(clicks, values)
    values[0] = b"b"
    assert values_of(await read_to_end(clicks)) == [b"a"]


async def test_brokers_are_separate_but_a_url_always_leads_to_the_same_one() -> None:
    """Two tests shared a broker, or two topics of one process did not."""
    mine, processes = MemoryBroker().topic("apart"), topic("memory://apart")
    await mine.create()
    of_other_tests = await connector_for("memory://").list_topics("memory://", {})
    assert mine.commit_domain != processes.commit_domain
    assert processes.commit_domain == topic("memory://other").commit_domain
    await processes.create()
    assert await connector_for("memory://").list_topics("memory://", {}) == sorted([*of_other_tests, "apart"])
    transactions = await begun(processes, "t")
    with pytest.raises(TopicError, match="commit domain"):
        await transactions.write(mine, OutgoingBatch([b"a"]))
    await transactions.close()
    await processes.delete()


async def test_a_reader_is_woken_by_a_writer_in_another_thread_and_loop() -> None:
    """A flow in a thread never noticed records that a service wrote from its own loop."""
    clicks = await created(MemoryBroker().topic("clicks"))
    reader = await clicks.open_reader(ReadRequest())
    reading = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: asyncio.run(write(clicks, [b"a"])))
    thread.start()
    batch = await patiently(reading)
    thread.join()
    assert batch is not None
    assert batch.values == [b"a"]


async def test_closing_a_reader_ends_a_read_that_waits() -> None:
    """A task waited in a read for ever after its reader was closed."""
    clicks = await created(MemoryBroker().topic("clicks"))
    reader = await clicks.open_reader(ReadRequest())
    reading = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    await reader.close()
    with pytest.raises(TopicError, match="closed"):
        await patiently(reading)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the path in which a test can install a distribution with entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, entry_point: str, code: str = "") -> None:
    """Install a distribution as pip does: metadata, an entry point and a module."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[streamiter.topics]\n{entry_point}\n")
    (folder / f"{name}.py").write_text(code)


def test_the_connectors_of_the_project_are_registered() -> None:
    """A scheme was missing in the packaging, and the first user noticed it."""
    assert known_schemes() == ["file", "kafka", "memory", "sqlite"]
    assert isinstance(connector_for("memory://a"), MemoryConnector)
    assert isinstance(connector_for("MEMORY://a"), MemoryConnector)


def test_a_third_party_can_add_a_scheme(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector of another package was not found, although it had an entry point, which each topic searched for."""
    searches, search = list[Any](), importlib.metadata.entry_points
    topic("memory://roof")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **given: searches.append(given) or search(**given))
    install(
        installed,
        "pigeons",
        "pigeon = pigeons:Pigeons",
        "from streamiter.topics import MemoryConnector\nclass Pigeons(MemoryConnector): pass\n",
    )
    for scheme in ("memory", "pigeon", "pigeon", "memory"):
        assert topic(f"{scheme}://roof").name == "roof"
    assert len(searches) == 1
    assert "pigeon" in known_schemes()


def test_a_missing_extra_is_an_error_with_the_install_command(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error 'No module named aiokafka' did not say what to do."""
    pytest.importorskip("streamiter_kafka")  # whole, so that no half of it is left for the next tests
    for name in [name for name in sys.modules if name.split(".")[0] in ("aiokafka", "streamiter_kafka")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiokafka", None)  # stands for a package that is not installed
    with pytest.raises(ConfigurationError, match=r"pip install 'streamiter\[kafka\]'"):
        topic("kafka://127.0.0.1:9092/clicks")


def test_a_broken_connector_is_named(installed: Path) -> None:
    """A bug in another package's connector looked like a bug of this package."""
    install(installed, "broken", "broken = broken:Connector", "import a_module_that_is_not_there\n")
    install(installed, "wrong", "wrong = wrong:Connector", "class Connector: pass\n")
    with pytest.raises(ConfigurationError, match=r"broken:Connector cannot be imported .*not_there"):
        topic("broken://a")
    with pytest.raises(ConfigurationError, match="wrong:Connector to be a subclass"):
        topic("wrong://a")


def test_a_file_has_one_commit_domain_under_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs in one file belonged to two commit domains, or to another one in another working directory."""
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    monkeypatch.chdir(tmp_path)
    relative = topic("sqlite:///a.db?topic=x")
    monkeypatch.chdir("/")
    names = [
        relative,
        topic(f"sqlite:///{tmp_path}/a.db?topic=y"),
        topic(f"sqlite:///{tmp_path}/link.db?topic=x"),
        topic(f"sqlite:///{tmp_path}/../{tmp_path.name}/a.db?topic=x"),
    ]
    assert len({found.commit_domain for found in names}) == 1


def test_the_url_of_a_topic_leads_back_to_it(tmp_path: Path) -> None:
    """A name or a path that needs quoting led to another topic."""
    for url in ("memory://a b", f"sqlite:///{tmp_path}/my%20log.db?topic=a%26b%2Fü"):
        found = topic(url)
        again = topic(found.url)
        assert (again.url, again.name, again.commit_domain) == (found.url, found.name, found.commit_domain)
    assert found.name == "a&b/ü"
