"""Ray in this process: one that is started here and ends with its user, or a cluster that others have started."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, final

from streamiter.errors import ConfigurationError
from streamiter.values.helpers.importing import need_package

Untyped: TypeAlias = Any
"""The package ray, and its handles of actors and references to objects: they have no types here."""


def imported_ray(user: str) -> Untyped:
    """Return the package ray; raises ConfigurationError, which begins with ``user``, if it is not installed."""
    need_package(user, "ray", "ray", ", or leave out Ray and stay on this machine")
    import ray

    return ray


# No other machine needs to reach a Ray of our own.
_LOOPBACK: Final = "127.0.0.1"

# A connection in a network of machines takes milliseconds. Ray itself would try for some minutes.
_CONNECT_S: Final = 5.0


@final
class RayCluster:
    """The Ray of the user, if this process has called ``ray.init``; otherwise the Ray at an address, or a new one.

    A Ray that is started here is on this machine only, has no dashboard and sends no usage statistics. Starting it
    takes some seconds. ``close`` ends it, or the connection to the cluster. ``user`` begins each error.
    All processes get the same ``runtime_env``: only so does Ray send folders and modules of this machine.
    """

    def __init__(self, user: str, address: str | None = None, runtime_env: Mapping[str, Any] | None = None) -> None:
        self.ray = imported_ray(user)
        self._runtime_env = runtime_env
        self._user = user
        self._is_to_end = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.ray.is_initialized():
            if address is not None:
                self._check_answers(address)
            # The kernel ends Ray's processes together with the thread that started them, so this thread runs until Ray
            # is ended. In the main thread Ray would take over SIGTERM.
            started: Future[None] = Future()
            self._thread = threading.Thread(target=self._run, args=(address, started), name="ray", daemon=True)
            self._thread.start()
            started.result()

    @property
    def has_runtime_env(self) -> bool:
        """Whether all processes have the ``runtime_env`` already."""
        return self._thread is not None

    def _check_answers(self, address: str) -> None:
        """Raise ConfigurationError if no Ray listens at an address: without it, ``ray.init`` would wait for minutes."""
        where = address
        try:
            where = self.ray._private.services.canonicalize_bootstrap_address_or_die(address)
            host, _, port = where.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            found = "" if where == address else f" ({where})"
            raise ConfigurationError(
                f"{self._user}: expected the address of a Ray cluster that answers, given {address!r}{found}: {error}; "
                'start Ray on this machine with "ray start --head", or with "ray start --address=HOST:6379" as a node '
                'of a cluster, then give address="auto"'
            ) from error

    def _run(self, address: str | None, started: Future[None]) -> None:
        options: dict[str, Any] = {"logging_level": logging.ERROR}
        if self._runtime_env is not None:
            options["runtime_env"] = dict(self._runtime_env)
        try:
            if address is not None:
                self.ray.init(address=address, **options)
            else:
                with _starting(self.ray):
                    self.ray.init(
                        address="local",  # Without it, Ray would look for a cluster that another program has started.
                        include_dashboard=False,
                        _node_ip_address=_LOOPBACK,
                        **options,
                    )
        except Exception as error:
            refused = ConfigurationError(
                f"{self._user}: expected Ray to start, or to connect to a cluster, with address={address!r} and "
                f"runtime_env={self._runtime_env!r}, given {type(error).__name__}: {error}; correct them, or look at "
                'the cluster with "ray status"'
            )
            refused.__cause__ = error
            started.set_exception(refused)
            return
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._is_to_end.wait()
        self.ray.shutdown()

    def close(self) -> None:
        """End a Ray that was started here, or the connection. May be called more than once, and in any thread."""
        if (thread := self._thread) is not None:
            self._thread = None
            self._is_to_end.set()
            thread.join()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _starting(ray: Untyped) -> Iterator[None]:
    """Have Ray listen on 127.0.0.1 only, and send no usage statistics, unless the user has asked for them.

    On Linux, Ray replaces 127.0.0.1 by the machine's address, and listens on all addresses, unless it is told that
    this system has no clusters. A variable of the environment says so, which Ray reads when it is imported, and which
    its processes inherit. A version of Ray without this constant listens on all addresses.
    """
    constants, constant = ray._private.ray_constants, "ENABLE_RAY_CLUSTER"
    was = getattr(constants, constant, None)
    setattr(constants, constant, False)
    try:
        with _environment(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_USAGE_STATS_ENABLED=os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        ):
            yield
    finally:
        setattr(constants, constant, was)
