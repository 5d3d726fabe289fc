"""The tools of the tests: the check of circles, `make mutate`, random examples, a shared broker, one download."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from support.circles import circle_in, imports_of
from support.examples import EXAMPLES, random_examples
from support.kafka_fixtures import GivenKafka, broker_of_workers
from support.mutation import LIST, ROOT, Mutant, report
from support.processes import process
from support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    "lower",
    [
        "def late():\n    from rooms_of_a_house import attic\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rooms_of_a_house.attic import Roof\n",
        "from rooms_of_a_house import Roof\n",
    ],
    ids=["late", "for types", "by way of the face of the package"],
)
def test_a_circle_is_found_although_python_can_import_it(
    lower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven circles of modules were hidden in late imports and in imports for types."""
    house = tmp_path / "rooms_of_a_house"
    house.mkdir()
    (house / "__init__.py").write_text("from rooms_of_a_house.attic import Roof as Roof\n")
    (house / "attic.py").write_text("from rooms_of_a_house import cellar\n\nclass Roof: ...\n")
    (house / "cellar.py").write_text(lower)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"rooms_of_a_house.attic", "rooms_of_a_house.cellar"} <= set(circle_in(imports_of("rooms_of_a_house")))


SPLIT = Mutant("streamiter.values.records.take", "return a", "return b")
JOIN = Mutant("streamiter.values.records.join", "x = 1", "x = 2")


def test_a_survivor_that_is_not_explained_fails_the_command() -> None:
    """The command always succeeded, so the list of changes that no test notices only grew."""
    lines, is_good = report([SPLIT, JOIN], {JOIN: "the same for all callers"})
    assert not is_good
    assert lines == [
        "\nstreamiter.values.records.join\n    - x = 1\n    + x = 2\n    = the same for all callers",
        "\nNOT NOTICED: write a test, or list it in mutants.toml with the reason:\n"
        "streamiter.values.records.take\n    - return a\n    + return b",
        "\n2 survivors: 1 not explained; 0 listed ones are gone",
    ]


def test_an_explanation_of_a_noticed_change_is_reported_and_fails_nothing() -> None:
    """A line was changed, and the explanation of its old change stayed in the list."""
    lines, is_good = report([], {JOIN: "the same for all callers"})
    assert is_good
    assert lines[0].startswith("\nlisted in mutants.toml, but noticed or no longer made; take it out:\n")
    assert lines[-1].endswith("0 survivors: 0 not explained; 1 listed ones are gone")


def test_the_list_names_existing_modules_and_tests() -> None:
    """A module was moved, and was not mutated any more, without an error."""
    listed = tomllib.loads(LIST.read_text())
    modules = [core["module"] for core in listed["core"]]
    tests = {test.split("::")[0] for core in listed["core"] for test in core["tests"]}
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    assert [test for test in sorted(tests) if not (ROOT / "tests" / test).exists()] == []
    named = [(core["module"], name) for core in listed["core"] for name in core.get("names", ["*"])]
    assert len(set(named)) == len(named)
    assert [
        (module, name)
        for module, name in named
        if name != "*" and not re.search(rf"^(async def|def|class) {name}\b", (ROOT / module).read_text(), re.M)
    ] == []
    cores = tuple(module.removesuffix(".py").replace("/", ".") + "." for module in modules)
    assert [each["where"] for each in listed["survivor"] if not each["where"].startswith(cores)] == []
    assert all(each["why"] for each in listed["survivor"])


def _numbers(random: Random) -> list[int]:
    return [random.randrange(100) for _ in range(random.randrange(30))]


@random_examples(_numbers)
def _below_99(numbers: list[int]) -> None:
    assert 99 not in numbers


def _failure() -> list[str]:
    with pytest.raises(AssertionError) as raised:
        _below_99()
    return raised.value.__notes__


def test_a_fault_is_reported_with_its_seed_and_the_smallest_example() -> None:
    """A plan of sixty steps failed, and only two of them mattered."""
    [note] = _failure()
    assert note.endswith("smaller example: [99]")
    assert re.match(r"seed \d+; again: STREAMITER_EXAMPLES_SEED=\d+\n", note)


def test_the_reported_seed_gives_the_failing_example_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure could not be repeated, so it could not be corrected."""
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", "11")
    [first] = _failure()
    seed = first.split("\n")[0].rpartition("=")[2]
    monkeypatch.setenv("STREAMITER_EXAMPLES_SEED", seed)
    [again] = _failure()
    assert again == first
    assert 99 in _numbers(Random(int(seed)))


@pytest.mark.parametrize("most", [3, 5])
def test_all_examples_run_and_other_arguments_are_those_of_the_test(most: int) -> None:
    """A decorator ran a test only once, or hid its parameters, and no test noticed it."""
    seen = []

    @random_examples(lambda random: random.randrange(2**60))
    def check(example: int, given: int) -> None:
        seen.append((example, given))

    check(most)
    check(given=most)
    assert [given for _, given in seen] == [most] * 2 * EXAMPLES
    assert len(set(seen)) == 2 * EXAMPLES


TESTS = Path(__file__).parent

# A program that is slow like Maven, so that the other processes start while it works.
MAVEN = """\
#!/bin/sh
echo fetched >> "$FETCHES"
mkdir jars
sleep 0.3
echo jar > jars/kafka.jar
"""


def test_processes_that_start_at_once_download_kafka_once(tmp_path: Path) -> None:
    """Two processes of Maven filled the same repository, and one of them read a half-written file of the other."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text(MAVEN)
    maven.chmod(0o755)
    fetches = tmp_path / "fetches"
    environment = os.environ | {
        "PATH": f"{maven.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FETCHES": str(fetches),
        "PYTHONPATH": str(TESTS),
    }
    program = "from support.kafka_jars import kafka_jars; print([jar.name for jar in kafka_jars().iterdir()])"
    with contextlib.ExitStack() as processes:
        command = [sys.executable, "-c", program]
        started = [processes.enter_context(process(command, env=environment, stdout=subprocess.PIPE)) for _ in range(3)]
        assert [each.communicate()[0] for each in started] == ["['kafka.jar']\n"] * 3
    assert fetches.read_text() == "fetched\n"


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
