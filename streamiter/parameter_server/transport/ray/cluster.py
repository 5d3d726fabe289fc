"""The Ray that shards run in: the user's, or one of our own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from streamiter.errors import ConfigurationError

__all__ = ["RayCluster", "imported_ray"]


def imported_ray() -> Any:
    """The package; raises ConfigurationError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            'ParameterServer(on="ray"): expected the package ray, which is not installed; '
            "install it with: pip install 'streamiter[ray]', or keep the shards in this process"
        ) from error
    return ray


# Nobody on other machines has to do with it.
_LOOPBACK: Final = "127.0.0.1"


@final
class RayCluster:
    """Ray as it is, if this process has called ``ray.init``; otherwise one on this machine that ``close`` ends.

    Starting one takes some seconds, without a dashboard and without usage statistics.
    """

    def __init__(self) -> None:
        self.ray = imported_ray()
        self._ours = None if self.ray.is_initialized() else _Started(self.ray)

    def close(self) -> None:
        """End the one that was started here. May be called more than once, and in any thread."""
        if self._ours is not None:
            ours, self._ours = self._ours, None
            ours.end()


@final
class _Started:
    """Keeps the thread that has started Ray until its end.

    The kernel ends Ray's processes together with that thread. In the main thread Ray would take over SIGTERM.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._has_started = threading.Event()
        self._is_to_end = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with _usage_statistics_off(), _no_cluster(self._ray):
                self._ray.init(
                    address="local",  # Without it, Ray would look for a cluster that somebody else has started.
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=_LOOPBACK,
                )
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._has_started.set()
        self._is_to_end.wait()
        self._ray.shutdown()

    def end(self) -> None:
        self._is_to_end.set()
        self._thread.join()


@contextmanager
def _usage_statistics_off() -> Iterator[None]:
    """Unless the user has asked for them."""
    name = "RAY_USAGE_STATS_ENABLED"
    is_ours = name not in os.environ
    if is_ours:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(name, None)


@contextmanager
def _no_cluster(ray: Any) -> Iterator[None]:
    """On Linux, Ray makes the machine's address of 127.0.0.1 and listens everywhere, unless it is told as elsewhere.

    What tells it is a variable of the environment that it reads when it is imported, and that its processes inherit.
    A version without this constant only listens more widely.
    """
    constants = ray._private.ray_constants
    name, constant = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
    before, was = os.environ.get(name), getattr(constants, constant, None)
    os.environ[name] = "0"
    setattr(constants, constant, False)
    try:
        yield
    finally:
        setattr(constants, constant, was)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
