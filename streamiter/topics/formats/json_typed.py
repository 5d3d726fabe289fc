"""JSON objects as instances of a class of your own."""

from __future__ import annotations

from typing import Any, final

import msgspec

from streamiter.records import Batch
from streamiter.topics.formats.failures import BAD_INPUT, NO_VALUE, decode_each, encode_each
from streamiter.topics.topic import OutgoingBatch, TopicBatch

__all__ = ["Typed"]


@final
class Typed:
    """JSON as ``msgspec.Struct`` instances, both ways: checked against the class while it is parsed.

    ``struct_type`` is a ``Struct`` class, or a union of tagged ones. The class decides what is required,
    what has a default and whether unknown fields are refused (``forbid_unknown_fields=True``).

    >>> class Click(msgspec.Struct):
    ...     user: str
    ...     price: float = 0.0
    >>> Typed(Click).decode(TopicBatch(values=[b'{"user": "ann", "price": 2}', b'{"user": "bob"}']))
    [Click(user='ann', price=2.0), Click(user='bob', price=0.0)]
    >>> Typed(Click).encode([Click("ann", 0.5)]).values
    [b'{"user":"ann","price":0.5}']
    >>> Typed(Click).decode(TopicBatch(values=[b'{"user": 7}', None]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 0 of the batch: Expected `str`, got `int` - at `$.user` (and 1 more)
    """

    def __init__(self, struct_type: Any) -> None:
        self._type = struct_type
        self._decode = msgspec.json.Decoder(struct_type).decode
        self._encode = msgspec.json.Encoder().encode

    @property
    def struct_types(self) -> tuple[type[msgspec.Struct], ...]:
        """The class, or those of the union, with all that their fields are made of."""
        return tuple(_structs_in(self._type))

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` for values that do not fit the class, and for tombstones."""
        try:
            return list(map(self._decode, batch.values))  # type: ignore[arg-type]
        except BAD_INPUT:  # one of them is bad: find out which
            return decode_each(batch.values, self._decode_one)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raises ``EncodeError`` for records that are not of the class."""
        return OutgoingBatch(encode_each(batch, self._encode_one))

    def _decode_one(self, value: bytes | None) -> Any:
        if value is None:
            raise ValueError(NO_VALUE)
        return self._decode(value)

    def _encode_one(self, record: Any) -> bytes:
        if not isinstance(record, self._type):
            raise TypeError(f"expected {_name(self._type)}, given {type(record).__name__}")
        return self._encode(record)

    def __repr__(self) -> str:
        return f"Typed({_name(self._type)})"


def _name(struct_type: Any) -> str:
    return getattr(struct_type, "__name__", str(struct_type))


def _structs_in(struct_type: Any) -> dict[type[msgspec.Struct], None]:
    import msgspec.inspect  # for flows only, when they are built

    found: dict[type[msgspec.Struct], None] = {}
    open_types: list[Any] = [msgspec.inspect.type_info(struct_type)]
    while open_types:
        each = open_types.pop()
        if isinstance(each, msgspec.inspect.StructType):
            if each.cls in found:
                continue
            found[each.cls] = None
        if isinstance(each, tuple):
            open_types += each
        elif isinstance(each, (msgspec.inspect.Type, msgspec.inspect.Field)):
            open_types += [getattr(each, name) for name in each.__struct_fields__]
    return found
