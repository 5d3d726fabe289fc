"""Processes of the tests share one broker, which runs as long as one of them uses it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.kafka_fixtures import GivenKafka, broker_of_workers
from support.waiting import PATIENCE_S


class Listening(NamedTuple):
    bootstrap: str
    log_file: Path


class Brokers:
    """Sockets in the place of brokers, which are counted."""

    def __init__(self, log: Path) -> None:
        self.log, self.running, self.started = log, 0, 0

    @contextlib.contextmanager
    def start(self) -> Iterator[Any]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.started, self.running = self.started + 1, self.running + 1
            yield Listening(f"127.0.0.1:{listening.getsockname()[1]}", self.log)
            self.running -= 1


def test_the_broker_runs_until_its_last_user_has_ended(tmp_path: Path) -> None:
    """Each of three processes had its own broker: 30 s of processor time; one that ends early would fail the others."""
    brokers = Brokers(tmp_path / "log")
    (tmp_path / "log").write_text("the end")
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    found = first.enter_context(broker_of_workers(tmp_path, brokers.start))
    same = second.enter_context(broker_of_workers(tmp_path, brokers.start))
    assert isinstance(same, GivenKafka)
    assert (same.bootstrap, same.log_tail()) == (found.bootstrap, "the end")
    ending = threading.Thread(target=first.close)
    ending.start()
    with broker_of_workers(tmp_path, brokers.start) as third:
        second.close()
        assert (third.bootstrap, brokers.running) == (found.bootstrap, 1)
    ending.join(PATIENCE_S)
    assert (brokers.started, brokers.running) == (1, 0)
    with broker_of_workers(tmp_path, brokers.start):
        assert (brokers.started, brokers.running) == (2, 1)


def test_a_broker_whose_process_was_killed_is_replaced(tmp_path: Path) -> None:
    """After a crash of one process, the tests of all others would ask a port on which nothing listens."""
    brokers = Brokers(tmp_path / "log")
    with brokers.start() as gone:
        pass
    (tmp_path / "kafka-broker").write_text(f"{gone.bootstrap} {gone.log_file}")
    with broker_of_workers(tmp_path, brokers.start) as broker:
        assert brokers.running == 1
        assert not isinstance(broker, GivenKafka)
