"""The ``msgspec.Struct`` classes that an encoding knows, by name."""

from __future__ import annotations

from typing import Any

import msgspec

from streamiter.checkpoints import extensions
from streamiter.checkpoints.packing import Extension, extension, pack
from streamiter.errors import ConfigurationError

__all__ = ["StructRegistry"]


class StructRegistry:
    """Struct classes by name, and for each what its encodings begin with."""

    __slots__ = ("classes", "openings")

    def __init__(self) -> None:
        self.classes: dict[str, type[msgspec.Struct]] = {}
        self.openings: dict[type[Any], Extension] = {}

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Add a class; without effect where it is known. Raises ``ConfigurationError``."""
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise ConfigurationError(
                f"structs of plain data: expected subclasses of msgspec.Struct, given {struct!r}; "
                "other classes cannot be stored: make it a Struct, or convert its instances to dicts"
            )
        known = self.classes.setdefault(struct.__name__, struct)
        if known is not struct:
            raise ConfigurationError(
                f"structs of plain data: expected one class of each name, given {_full_name(known)} and "
                f"{_full_name(struct)}; stored data names a struct by its class name alone: rename one"
            )
        self.openings[struct] = _opening(struct)

    def forget_after(self, count: int) -> None:
        """Keep the first ``count`` classes only."""
        while len(self.classes) > count:
            _, struct = self.classes.popitem()
            del self.openings[struct]


def _opening(struct: type[msgspec.Struct]) -> Extension:
    return extension(extensions.STRUCT, pack([struct.__name__, *struct.__struct_fields__]))


def _full_name(struct: type[msgspec.Struct]) -> str:
    return f"{struct.__module__}.{struct.__qualname__}"
