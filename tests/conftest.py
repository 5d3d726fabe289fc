"""Fixtures and settings for all tests."""

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from _pytest.doctest import DoctestModule
from support.kafka_fixtures import (
    breakable_broker,
    broker_to_break,
    kafka_broker,
    logs_of_brokers,
    stop_unused_broker,
    topic_prefix,
)
from support.ray_fixtures import cluster
from support.registry_server import schema_registry
from support.s3_server import s3_server, s3_url
from support.small_disk import small_disk
from support.soak import for_each_soak_seed, soak_header, without_time_limits

from streamiter.testing import RestoreProcess

__all__ = [
    "breakable_broker",
    "broker_to_break",
    "cluster",
    "for_each_soak_seed",
    "kafka_broker",
    "s3_server",
    "s3_url",
    "schema_registry",
    "small_disk",
    "topic_prefix",
]

# A failed assert in the shared checks of a contract shows its values, as in a test module.
pytest.register_assert_rewrite(
    "support.refusals",
    "checkpoints.store_contract",
    "topics.contract_lifecycle",
    "topics.contract_range",
    "topics.contract_reading",
    "topics.contract_transactions",
    "topics.contract_writing",
    "topics.topic_case",
)

# On two busy cores, single examples and their generation are slow; tests of hangs have their own time limits.
# Each run has other examples, so that many short runs find as much as a few long ones.
hypothesis.settings.register_profile(
    "streamiter", max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# ``make mutate`` only needs the failure of a test: it uses the same examples each time, and does not reduce them.
hypothesis.settings.register_profile(
    "mutation",
    hypothesis.settings.get_profile("streamiter"),
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("streamiter")


@pytest.fixture(scope="session")
def restore_process() -> Iterator[RestoreProcess]:
    """Return the fresh process that all checks of restores share: its start takes a second."""
    with RestoreProcess() as process:
        yield process


def pytest_configure() -> None:
    """Let tests that send themselves Ctrl-C receive it, and collect no garbage before the tests.

    A process in the background of a script ignores Ctrl-C, so these tests waited for ever. All that pytest makes while
    it collects the tests is kept, so looking for garbage there only takes a fifth of the time.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search for examples only in files that have some: the search took a fifth of the collection."""
    collectors = yield
    if ">>>" in file_path.read_text(encoding="utf-8"):
        return collectors
    return [each for each in collectors if not isinstance(each, DoctestModule)]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Show the seeds of a soak test."""
    return soak_header(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the shared brokers to the report of a test that failed."""
    report = yield
    if report.failed:
        report.sections.extend(logs_of_brokers(item.config))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the broker that tests break, where the next test breaks none."""
    stop_unused_broker(item, nextitem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the time limits of soak tests, and let tests that break a broker come first.

    Each process of the tests that has one of these starts such a broker. At the beginning they are in one process.
    """
    without_time_limits(items)
    items.sort(key=lambda item: "broker_to_break" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Exclude all objects that exist before the tests from garbage collection: the 10,000 tests and their imports.

    Otherwise each collection that a test starts takes a tenth of a second. Automatic collections run less often than
    usual: after every 700 new objects they would take a fifth of the time of tests that run many jobs. What is garbage
    already stays: to collect it takes most of a second.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
