"""Objects that can be copied, pickled and saved: each is made again from its settings and its state.

The *settings* are the arguments that the object was made with; :class:`Savable` keeps them. The *state* is plain data,
as in checkpoints. A copy and an unpickled object are made from both; a file has both in the encoding of plain data,
without pickle.

A file is the line ``streamiter object 1``, the CRC-32 of the rest (4 bytes, big endian), and a frame of plain data with
an :class:`_Object`. Reading it calls constructors of streamiter, and of classes of the user's modules that are imported
already and that are :class:`Savable` or dataclasses.
"""

from __future__ import annotations

import inspect
import os
import reprlib
import sys
import zlib
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from streamiter.errors import ModelError, PlainDataError, shortened
from streamiter.values.helpers.files import replace_file

_FIRST_LINE: Final = b"streamiter object 1\n"
_CHECKSUM_BYTES: Final = 4

_OWN: Final = "streamiter"

# Arguments may be the parameters of a model.
_SHOWN: Final = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxother, _SHOWN.maxstring = 3, 60, 60


class Savable:
    """An object that is made of its settings and its state, so that it can be copied, pickled and saved.

    A class whose objects learn has :meth:`state` and :meth:`restore`. Objects without them have settings only.

    A copy, also that of ``copy.copy``, shares nothing with the original, and continues as the original would, to the
    last bit. Attributes that a program adds to an object are not copied.
    """

    _given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments that the object was made with."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        made._given = _kept(args), _kept(options)
        return made

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings: the arguments that the object was made with, and the defaults of the others, by name.

        Another object is made with ``type(model)(**model.get_params())``. ``deep`` has no effect.

        >>> from streamiter.learn import ADWIN
        >>> ADWIN(confidence=0.05).get_params()
        {'confidence': 0.05, 'check_every': 32}
        """
        args, options = self._given
        signature = inspect.signature(type(self).__init__)
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        settings: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            settings |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return settings

    def __repr__(self) -> str:
        args, options = self._given
        given = [*map(_SHOWN.repr, args), *(f"{name}={_SHOWN.repr(value)}" for name, value in options.items())]
        return f"{type(self).__name__}({', '.join(given)})"

    def state(self) -> Any:
        """Return a copy of the state as plain data; None for an object that has settings only."""
        return None

    def restore(self, state: Any) -> None:
        """Restore a :meth:`state`."""

    def _start_with(self, state: Any) -> None:
        """Take on a state right after the object was made with its settings."""
        self.restore(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), *self._given, self.state())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and state to a file, without pickle; :meth:`load` makes an equal object of it.

        The file is complete at any time. Raises ``ModelError`` for settings that are not plain data, such as functions,
        and ``OSError`` for a file that cannot be written.

        >>> import tempfile
        >>> from streamiter.learn import StandardScaler
        >>> scaler = StandardScaler()
        >>> scaler.learn([[1.0], [3.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scaler.save(f"{folder}/scaler")
        ...     StandardScaler.load(f"{folder}/scaler").parameters()["mean"].tolist()
        [2.0]
        """
        from streamiter.values.plain_data import PlainData

        name = type(self).__name__
        try:
            frame = PlainData([_Object]).encode(_stored(self), name=name)
        except PlainDataError as error:
            raise ModelError(f"{name}.save: {error}; pickle it, or leave this setting out") from error
        checksum = zlib.crc32(frame).to_bytes(_CHECKSUM_BYTES, "big")
        replace_file(Path(path), _FIRST_LINE + checksum + frame)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the object that :meth:`save` wrote.

        Raises ``ModelError`` for a file of another kind, of another class, or that is damaged, and ``OSError`` for one
        that cannot be read.
        """
        from streamiter.values.plain_data import PlainData

        subject = f"{cls.__name__}.load({os.fspath(path)!r})"
        data = Path(path).read_bytes()
        if not data.startswith(_FIRST_LINE):
            raise ModelError(f"{subject}: expected a file that save() wrote, given one that begins with {data[:20]!r}")
        start = len(_FIRST_LINE) + _CHECKSUM_BYTES
        checksum, frame = data[len(_FIRST_LINE) : start], data[start:]
        if zlib.crc32(frame).to_bytes(_CHECKSUM_BYTES, "big") != checksum:
            raise ModelError(f"{subject}: expected the bytes that save() wrote, given damaged ones; save it again")
        try:
            made = _loaded(PlainData([_Object]).decode(frame), subject)
        except PlainDataError as error:
            raise ModelError(f"{subject}: {error}; save it again") from error
        if not isinstance(made, cls):
            raise ModelError(
                f"{subject}: expected a {cls.__name__}, given a {type(made).__name__}; write "
                f"{type(made).__name__}.load(…)"
            )
        return made


def _kept(value: Any) -> Any:
    """Return an argument as it is now: its owner may change a list or an array later."""
    if isinstance(value, np.ndarray):
        base: Any = value
        while isinstance(base, np.ndarray) and not base.flags.writeable:
            base = base.base
        return value.copy() if isinstance(base, np.ndarray) else value
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return {name: _kept(part) for name, part in value.items()} if type(value) is dict else value


def _remade(cls: type[Savable], args: tuple[Any, ...], options: dict[str, Any], state: Any) -> Savable:
    made = cls(*args, **options)
    made._start_with(state)
    return made


# ---- files


class _Object(msgspec.Struct, frozen=True):
    """An object in a file."""

    cls: str
    """The class, as ``module:name``."""
    settings: dict[str, Any]
    state: Any


def _stored(value: Any) -> Any:
    """Return a value with an :class:`_Object` in the place of each object that has settings."""
    if isinstance(value, Savable):
        return _Object(_name_of(type(value)), _stored(value.get_params()), value.state())
    if is_dataclass(value) and not isinstance(value, type):
        defaults = {each.name: each.default for each in fields(value) if each.init}
        settings = {name: getattr(value, name) for name in defaults}
        given = {name: setting for name, setting in settings.items() if setting is not defaults[name]}
        return _Object(_name_of(type(value)), _stored(given), None)
    if type(value) in (list, tuple):
        return type(value)(map(_stored, value))
    return {name: _stored(part) for name, part in value.items()} if type(value) is dict else value


def _name_of(cls: type) -> str:
    """Return the name of a class in the highest package that has it, because the modules below may change."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__qualname__, None) is cls:
            return f"{module}:{cls.__qualname__}"
    raise ModelError(f"save: expected classes at the top level of a module, given {cls!r}; move it there")


def _loaded(stored: Any, subject: str) -> Any:
    """Return the value that :func:`_stored` was called with."""
    if isinstance(stored, _Object):
        cls = _class_of(stored.cls, subject)
        settings = {name: _loaded(value, subject) for name, value in stored.settings.items()}
        try:
            return _remade(cls, (), settings, stored.state) if issubclass(cls, Savable) else cls(**settings)
        except (TypeError, KeyError, ValueError) as error:
            raise ModelError(
                f"{subject}: expected settings and state of a {cls.__name__} of this version, given others: {error!r}"
            ) from error
    if type(stored) in (list, tuple):
        return type(stored)(_loaded(part, subject) for part in stored)
    return {name: _loaded(part, subject) for name, part in stored.items()} if type(stored) is dict else stored


def _class_of(name: str, subject: str) -> type:
    module, _, qualified = name.partition(":")
    own = module.split(".")[0] == _OWN
    within = import_module(module) if own else sys.modules.get(module)
    if within is None:
        raise ModelError(f"{subject}: expected the class {name} to be imported, given none; import {module} first")
    found = getattr(within, qualified, None)
    if not isinstance(found, type) or not (issubclass(found, Savable) or is_dataclass(found)):
        raise ModelError(f"{subject}: expected a class with settings, given {name}, which is {shortened(found)}")
    return found
