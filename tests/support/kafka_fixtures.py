"""The fixtures that give tests a Kafka broker; ``tests/conftest.py`` makes them known to all tests."""

import contextlib
import fcntl
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kafka_server import KafkaServer, log_tail, running_kafka, what_is_missing
from support.programs import missing
from support.waiting import PATIENCE_S

__all__ = [
    "GivenKafka",
    "breakable_broker",
    "broker_of_workers",
    "broker_to_break",
    "kafka_broker",
    "logs_of_brokers",
    "skip_without_java",
    "stop_unused_broker",
    "topic_prefix",
]

Running = contextlib.AbstractContextManager[KafkaServer]

# No test freezes or kills the broker that all tests share. If the machine stands still for longer than the 3 s of other
# brokers, a shorter session ends: its controller takes all partitions from the broker, and transactions wait.
_LONG_SESSION = {"broker.session.timeout.ms": "60000"}


@dataclass(frozen=True)
class GivenKafka:
    """A running broker that the tests must not stop."""

    bootstrap: str
    log_file: Path | None = None
    """Its log, if another process of the tests has started it."""

    def log_tail(self) -> str:
        """Return the end of the broker's output."""
        return log_tail(self.log_file) if self.log_file else ""


_SHARED_BROKERS = pytest.StashKey[list[KafkaServer | GivenKafka]]()


def logs_of_brokers(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Return a title and the end of the log of each broker that tests share: a failure of a test may be its fault."""
    for server in config.stash.get(_SHARED_BROKERS, []):
        yield f"log of the broker at {server.bootstrap}", server.log_tail()


@pytest.fixture(scope="session")
def kafka_broker(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaServer | GivenKafka]:
    """Return the broker that all tests share; each test uses topics with its own names.

    ``STREAMITER_TEST_KAFKA=host:port`` names a running broker.
    """
    given = os.environ.get("STREAMITER_TEST_KAFKA")
    if given:
        if error := _does_not_answer(given):
            pytest.fail(f"STREAMITER_TEST_KAFKA={given}: no broker answers ({error})")
        yield GivenKafka(given)
        return
    skip_without_java()
    is_worker = hasattr(pytestconfig, "workerinput")
    shared = tmp_path_factory.getbasetemp().parent
    with broker_of_workers(shared) if is_worker else own_broker() as broker:
        pytestconfig.stash.setdefault(_SHARED_BROKERS, []).append(broker)
        yield broker


def own_broker() -> Running:
    """Run the broker that no test breaks."""
    return running_kafka(settings=_LONG_SESSION)


@contextlib.contextmanager
def broker_of_workers(folder: Path, start: Callable[[], Running] = own_broker) -> Iterator[KafkaServer | GivenKafka]:
    """Return the broker that all processes of the tests share: one more costs 15 s of processor time.

    The process that comes first starts the broker, and stops it when no other uses it. The kernel ends the use of a
    process that is killed.
    """
    known = folder / "kafka-broker"
    with (folder / "kafka-broker.users").open("w") as users, contextlib.ExitStack() as started:
        fcntl.flock(users, fcntl.LOCK_SH)
        with (folder / "kafka-broker.start").open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            address, _, log = known.read_text().partition(" ") if known.exists() else ("", "", "")
            if not address or _does_not_answer(address):  # The process that started it was killed.
                broker: KafkaServer | GivenKafka = started.enter_context(start())
                started.callback(known.unlink)
                started.callback(fcntl.flock, users, fcntl.LOCK_EX)  # Waits for the other processes.
                known.write_text(f"{broker.bootstrap} {broker.log_file}")
            else:
                broker = GivenKafka(address, Path(log))
        yield broker


@pytest.fixture(scope="session")
def broker_to_break(pytestconfig: pytest.Config) -> Iterator[KafkaServer]:
    """Start a broker that tests stop and freeze in turn; its start takes as long as several tests.

    Its listener ``PASSWORD`` asks for a password. ``TOKENS`` takes unsecured tokens, and ends connections when these
    expire: tests of logins break nothing, but for another broker they would wait as long as for themselves.
    """
    skip_without_java()
    logins, module = "listener.name", "org.apache.kafka.common.security"
    settings = {
        f"{logins}.password.sasl.enabled.mechanisms": "PLAIN",
        f"{logins}.password.plain.sasl.jaas.config": (
            f'{module}.plain.PlainLoginModule required user_alice="right-horse";'
        ),
        f"{logins}.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
        f"{logins}.tokens.oauthbearer.sasl.jaas.config": (
            f'{module}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="a";'
        ),
        f"{logins}.tokens.oauthbearer.connections.max.reauth.ms": "3600000",
    }
    listeners = dict.fromkeys(("PASSWORD", "TOKENS"), "SASL_PLAINTEXT")
    with running_kafka(settings=settings, listeners=listeners) as server:
        pytestconfig.stash.setdefault(_SHARED_BROKERS, []).append(server)
        yield server


@pytest.fixture
def breakable_broker(broker_to_break: KafkaServer) -> Iterator[KafkaServer]:
    """Return the broker to break, which runs again after the test."""
    broker_to_break.start()
    yield broker_to_break
    broker_to_break.start()
    broker_to_break.resume()


def stop_unused_broker(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the broker that tests break behind the last of these: until the end it would take a fortieth of a core."""
    name = "broker_to_break"
    broker: KafkaServer | None = (getattr(item, "funcargs", None) or {}).get(name)
    if broker is not None and nextitem is not None and name not in getattr(nextitem, "fixturenames", ()):
        broker.stop()


@pytest.fixture
def topic_prefix() -> str:
    """Return a prefix that makes the names of a test's topics unique on a shared broker."""
    return f"test-{uuid.uuid4().hex[:12]}-"


def skip_without_java() -> None:
    """Skip tests that need a broker if no broker can be started, but never in CI."""
    if reason := what_is_missing():
        missing(reason)


def _does_not_answer(address: str) -> OSError | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
    except OSError as error:
        return error
    return None
