"""A real Kafka broker for tests and benchmarks is fetched by Maven, listens on loopback, and is always stopped.

One process is broker and controller. Use the broker in code::

    with running_kafka() as kafka:
        print(kafka.bootstrap)

or from a shell, until Ctrl-C (``PYTHONPATH=tests``)::

    python -m support.kafka_server
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.kafka_jars import class_archive, formatted_folder, kafka_jars, what_is_missing

__all__ = [
    "FULL_SPEED",
    "QUICK_START",
    "KafkaDidNotStart",
    "KafkaServer",
    "free_ports",
    "guard",
    "log_tail",
    "running_kafka",
    "what_is_missing",
]

# A cold start takes 4 s on two free cores, and ten times as long on a busy machine.
START_TIMEOUT_S = 60.0
# A clean stop takes under 2 s: the broker writes snapshots of the producer states, which a restart reads.
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05
_STARTED = "Kafka Server started"
_CLUSTER_ID = "c3RyZWFtaXRlci10ZXN0LQ"

# A small heap and only the quick compiler: a test needs an early start more than high speed.
QUICK_START = ("-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
# A broker of a benchmark runs with the compiler that it has in production.
FULL_SPEED = ("-Xmx1g", "-Xms1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")

_LOGGING = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
# It warns of each abort of a transaction that is empty, which a client requests to find out whether it was replaced.
logger.transactions.name = kafka.coordinator.transaction.TransactionCoordinator
logger.transactions.level = error
"""

_TEST_SETTINGS: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "num.partitions": "1",
    # One broker cannot replicate.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # The first use creates a folder for each partition; 50 folders would take seconds.
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    # Records of tests have arbitrary time stamps, most of them long past.
    "log.retention.ms": "-1",
    # By default these checks run every few minutes, which is too long for tests.
    "log.retention.check.interval.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "log.cleaner.backoff.ms": "200",
    # By default, a controller without work writes a record every half second, which is a third of its processor time.
    "metadata.max.idle.interval.ms": "0",
    # A killed broker can start again only after its old session has expired: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


class KafkaDidNotStart(RuntimeError):
    """The broker ended or did not answer; the message contains the end of its log."""


class KafkaServer:
    """One broker in ``directory``, which tests can stop, start again at the same address, and freeze."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        jvm_options: tuple[str, ...] = QUICK_START,
        format_options: tuple[str, ...] = (),
    ) -> None:
        """Configure a broker; ``listeners`` maps the names of more listeners to their security protocols.

        ``settings`` add to or replace settings of ``server.properties``; ``format_options`` are options of the tool
        that prepares the folder (users for SCRAM, for example).
        """
        self.directory = directory
        self._format_options = format_options
        self._jvm_options = jvm_options
        self._settings = dict(settings or {})
        self._protocols = {"CONTROLLER": "PLAINTEXT", "PLAINTEXT": "PLAINTEXT", **(listeners or {})}
        self._ports = dict(zip(self._protocols, free_ports(len(self._protocols)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """Return ``host:port`` of the listener without encryption or passwords."""
        return self.address("PLAINTEXT")

    @property
    def log_file(self) -> Path:
        """Return the file with the broker's output."""
        return self.directory / "broker.log"

    def address(self, listener: str) -> str:
        """Return ``host:port`` of a listener."""
        return f"127.0.0.1:{self._ports[listener]}"

    def start(self) -> None:
        """Start the broker and return when it answers; raise :class:`KafkaDidNotStart` with its log if it fails."""
        if self._process is not None:
            return
        self.format()
        started_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._launch()
        self._wait_until_started(started_at)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the broker with SIGTERM as an administrator would; after ``timeout_s`` use SIGKILL and return False."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """Stop the broker at once with SIGKILL, as a power cut would."""
        self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Freeze the broker: connections stay open, and the broker does not answer.

        On a busy machine, a thread may continue for some time after the signal, and answer.
        """
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let the broker continue after :meth:`pause`."""
        self._running().send_signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """Return the end of the broker's output."""
        return log_tail(self.log_file)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("this broker is not running: call start() first")
        return self._process

    def format(self) -> None:
        """Prepare the folder for a new broker, unless it has been prepared."""
        properties = self._write_files()
        data = self.directory / "data"
        if (data / "meta.properties").exists():
            return
        if formatted := self._formatted():
            shutil.copytree(formatted, data)
            return
        command = [
            *self._java(),
            "kafka.tools.StorageTool",
            "format",
            "-t",
            _CLUSTER_ID,
            "-c",
            str(properties),
            *self._format_options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise KafkaDidNotStart(f"formatting {self.directory} failed:\n{done.stdout}{done.stderr}")

    def _formatted(self) -> Path | None:
        """Return a folder that the tool has prepared for a broker with the same id and without users, or None."""
        folder = formatted_folder()
        return folder if folder.is_dir() and not self._format_options else None

    def _write_files(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "log4j2.properties").write_text(_LOGGING)
        properties = self.directory / "server.properties"
        lines = [f"{name}={value}" for name, value in self._properties().items()]
        properties.write_text("\n".join(lines) + "\n")
        return properties

    def _properties(self) -> dict[str, str]:
        addresses = [f"{name}://{self.address(name)}" for name in self._protocols]
        advertised = [f"{name}://{self.address(name)}" for name in self._protocols if name != "CONTROLLER"]
        protocols = [f"{name}:{protocol}" for name, protocol in self._protocols.items()]
        return {
            **_TEST_SETTINGS,
            "log.dirs": str(self.directory / "data"),
            "listeners": ",".join(addresses),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(protocols),
            "controller.quorum.voters": f"1@{self.address('CONTROLLER')}",
            **self._settings,
        }

    def _java(self) -> list[str]:
        java = shutil.which("java") or "java"
        logging_config = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.properties'}"
        return [java, *self._jvm_options, *self._archived(), logging_config, "-cp", f"{kafka_jars()}/*"]

    def _archived(self) -> list[str]:
        """Return the options to load the classes from an archive if it exists, which halves the time to start."""
        archive = class_archive()
        usable = self._jvm_options == QUICK_START and archive.is_file()
        return [f"-XX:SharedArchiveFile={archive}"] if usable else []

    def _launch(self) -> None:
        command = [*self._java(), "kafka.Kafka", str(self.directory / "server.properties")]
        with self.log_file.open("ab") as log:
            # In its own session the broker does not receive Ctrl-C; pytest does, and then stops the broker.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._guard = guard(self._process.pid)

    def _wait_until_started(self, from_byte: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._running().poll() is not None:
                break
            if _STARTED in self._log_since(from_byte):
                return
            time.sleep(_POLL_S)
        tail = self.log_tail()
        self.kill()
        raise KafkaDidNotStart(f"no broker at {self.bootstrap} after {START_TIMEOUT_S:.0f} s; its log:\n{tail}")

    def _log_since(self, from_byte: int) -> str:
        with self.log_file.open("rb") as log:
            log.seek(from_byte)
            return log.read().decode(errors="replace")

    def _end(self, with_signal: signal.Signals, timeout_s: float) -> bool:
        """End the process with a signal; return whether it ended within ``timeout_s``."""
        process, self._process = self._process, None
        if process is None:
            return True
        in_time = True
        process.send_signal(signal.SIGCONT)  # a frozen process would not receive SIGTERM
        process.send_signal(with_signal)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            in_time = False
            process.kill()
            process.wait(START_TIMEOUT_S)
        self._dismiss_guard()
        return in_time

    def _dismiss_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(b"stopped\n", timeout=START_TIMEOUT_S)


def log_tail(file: Path) -> str:
    """Return the last 30 lines of the output of a broker."""
    if not file.exists():
        return "(no log)"
    return "\n".join(file.read_text(errors="replace").splitlines()[-30:])


def guard(pid: int) -> subprocess.Popen[bytes]:
    """Start a guard that kills ``pid`` if this process ends without stopping the broker."""
    script = f"read -r line || kill -9 {pid}"
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that are free now.

    No system gives them to clients: a broker that was down for a moment did not start again, because a connection of
    another test had got its port.
    """
    found: list[int] = []
    while len(found) < count:
        port = _DRAW.randrange(10_000, 30_000)
        with socket.socket() as each, contextlib.suppress(OSError):
            each.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


# Workers of the tests must not all try the same ports.
_DRAW = random.SystemRandom()


@contextlib.contextmanager
def running_kafka(
    *,
    settings: Mapping[str, str] | None = None,
    listeners: Mapping[str, str] | None = None,
    jvm_options: tuple[str, ...] = QUICK_START,
    format_options: tuple[str, ...] = (),
) -> Iterator[KafkaServer]:
    """Run a broker for a ``with`` block, in a folder that is removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="streamiter-kafka-"))
    server = KafkaServer(
        directory, settings=settings, listeners=listeners, jvm_options=jvm_options, format_options=format_options
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _main() -> None:
    reason = what_is_missing()
    if reason:
        raise SystemExit(reason)
    with contextlib.suppress(KeyboardInterrupt), running_kafka(jvm_options=FULL_SPEED) as server:
        print(f"Kafka at {server.bootstrap}, its log in {server.log_file}, process {os.getpid()}; Ctrl-C stops it")
        signal.pause()


if __name__ == "__main__":
    _main()
