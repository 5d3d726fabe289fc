"""Which inputs an operator wants to read next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streamiter.errors import ConfigurationError
from streamiter.runtime.port import Port

__all__ = ["WantedInputs"]


class WantedInputs:
    """What ``wanted_inputs()`` said last. If all inputs that it names have ended, all are wanted."""

    def __init__(self, ports: Sequence[Port], has_ended: Callable[[Port], bool]) -> None:
        self._ports = ports
        self._has_ended = has_ended
        self._asked_for: tuple[str, ...] | None = None
        self.names: frozenset[str] | None = None
        """The inputs to read now; None for all."""

    def ask(self, input_names: Iterable[str] | None) -> bool:
        """Want only these from now on, None for all; says whether that is something new.

        Raises ConfigurationError for what is no collection of names, and for a name that no input has.
        """
        try:
            asked_for = None if input_names is None else tuple(input_names)
        except TypeError:
            raise _no_names(input_names) from None
        if asked_for == self._asked_for:
            return False
        if isinstance(input_names, str):
            raise _no_names(input_names)
        self._check_names(asked_for or ())
        self._asked_for = asked_for
        self._decide()
        return True

    def reconsider(self) -> bool:
        """Some port has ended; says whether that may change what is wanted."""
        if self._asked_for is None:
            return False
        self._decide()
        return True

    def _decide(self) -> None:
        asked_for = self._asked_for
        if not asked_for:
            self.names = None if asked_for is None else frozenset()
            return
        ended = all(self._has_ended(port) for port in self._ports if port.input_name in asked_for)
        self.names = None if ended else frozenset(asked_for)

    def _check_names(self, asked_for: Sequence[str]) -> None:
        known = dict.fromkeys(port.input_name for port in self._ports)
        unknown = [name for name in asked_for if name not in known]
        if unknown:
            raise ConfigurationError(
                f"wanted_inputs(): expected names of inputs ({', '.join(known)}), given {unknown[0]!r}; "
                "return a tuple of them, or None for all"
            )


def _no_names(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"wanted_inputs(): expected a tuple or list of names, given {given!r}; "
        f"{f'return ({given!r},)' if isinstance(given, str) else 'return None for all inputs'}"
    )
