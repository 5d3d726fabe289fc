"""The format `Protobuf`, whose schemas are in a registry.

After the id of the schema, a value has the place of its message in the file of the schema, then the message.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from streamiter.errors import ConfigurationError
from streamiter.topics.schema_formats import (
    PREFIX_BYTES,
    ReadValue,
    RegistryFormat,
    SchemaEncoder,
    SubjectStrategy,
    short_reason,
)
from streamiter.topics.schema_registry import Schema, SchemaReference, SchemaRegistry

if TYPE_CHECKING:
    from google.protobuf.message import Message


@final
class Protobuf(RegistryFormat):
    """Protobuf with a schema registry, both ways: records are messages of the generated classes ``messages``.

    Reading: a topic may have several types of messages; each value becomes a message of the class of its name. A value
    with a message of another name is a bad record. Fields that a class does not know are kept in the message, and
    missing ones have their default, by the rules of Protobuf.

    Writing: a sink takes messages of the first class. Its schema is registered under the ``subject``, with the files
    that it imports as references; the other options are those of `Avro`. Messages are not plain data: make dicts of
    them (``google.protobuf.json_format.MessageToDict``) before a step that keeps records.

    >>> from google.protobuf.timestamp_pb2 import Timestamp
    >>> Protobuf("http://127.0.0.1:8081", Timestamp)
    Protobuf('http://127.0.0.1:8081')
    """

    kind: ClassVar[str] = "PROTOBUF"
    library: ClassVar[str] = "google.protobuf"

    def __init__(
        self,
        registry: SchemaRegistry | str,
        *messages: type[Message],
        subject: str | None = None,
        strategy: SubjectStrategy = "topic",
        register: bool = True,
    ) -> None:
        super().__init__(registry, subject, strategy, register)
        if not messages or not all(hasattr(each, "DESCRIPTOR") for each in messages):
            raise ConfigurationError(
                f"Protobuf: expected classes of messages, as protoc generates them, given {messages or 'none'}"
            )
        self._messages = {each.DESCRIPTOR.full_name: each for each in messages}

    def _reader(self, schema: Schema, references: Mapping[str, Schema]) -> ReadValue:
        from google.protobuf.message import DecodeError as BadMessage

        names = _message_names(schema.text)
        classes = {places: self._messages[name] for places, name in names.items() if name in self._messages}

        def read(value: bytes) -> Message:
            begin, places = _places(value)
            message = classes.get(places)
            if message is None:
                given = names.get(places) or f"one at {list(places)}, where the schema has none"
                raise ValueError(f"expected a message {' or '.join(self._messages)}, given {given}")
            made = message()
            try:
                made.ParseFromString(value[begin:])
            except BadMessage as error:
                raise ValueError(
                    f"the value is no message {message.DESCRIPTOR.full_name}: {short_reason(error)}"
                ) from error
            return made

        return read

    def _encoder(self, topic: str) -> SchemaEncoder:
        name, message = next(iter(self._messages.items()))
        descriptor = message.DESCRIPTOR
        schema = self._schema_of(descriptor.file, {})
        schema_id = self.registry.id_of(self._subject_of(topic, lambda: name), schema, register=self._register)
        places = _written_places(descriptor)

        def write(record: Any) -> bytes:
            if not isinstance(record, message):
                raise TypeError(f"expected a message {name}, given {type(record).__name__}")
            try:
                return places + record.SerializeToString()
            except Exception as error:  # a required field of proto2 is missing
                raise ValueError(short_reason(error)) from error

        return SchemaEncoder(schema_id, write)

    def _schema_of(self, file: Any, registered: dict[str, SchemaReference]) -> Schema:
        """Return the schema of a file (a descriptor), whose imported files are registered as references."""
        for imported in file.dependencies:
            # Registries have the files of Google themselves.
            if imported.name not in registered and not imported.name.startswith("google/protobuf/"):
                used = self._schema_of(imported, registered)
                registered[imported.name] = self.registry.reference(imported.name, used, register=self._register)
        references = tuple(registered[each.name] for each in file.dependencies if each.name in registered)
        return Schema(self.kind, base64.b64encode(file.serialized_pb).decode(), references)


def _message_names(text: str) -> dict[tuple[int, ...], str]:
    """Return the full names of the messages of a schema by their places: a text of Protobuf, or a descriptor in base64.

    >>> _message_names("package q; message A { enum E { Z = 0; } message B {} } // message C {}")
    {(0,): 'q.A', (0, 0): 'q.A.B'}
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    names: dict[tuple[int, ...], str] = {}

    def add(messages: Iterable[Any], within: tuple[int, ...], prefix: str) -> None:
        for place, message in enumerate(messages):
            names[*within, place] = f"{prefix}{message.name}"
            add(message.nested_type, (*within, place), f"{prefix}{message.name}.")

    if re.fullmatch(r"[A-Za-z0-9+/=\s]+", text):
        file = FileDescriptorProto.FromString(base64.b64decode(text))
        add(file.message_type, (), f"{file.package}." if file.package else "")
        return names
    return _names_in_text(text)


_WORD: Final = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{};]|[A-Za-z_][\w.]*""", re.DOTALL
)


def _names_in_text(text: str) -> dict[tuple[int, ...], str]:
    """Return the full names of the messages of a ``.proto`` file by their places."""
    names: dict[tuple[int, ...], str] = {}
    package, words, blocks = "", list[str](), list[tuple[int, ...] | None]()
    counts: dict[tuple[int, ...], int] = {}
    for word in (match[0] for match in _WORD.finditer(text) if match[0][:2] not in ("//", "/*")):
        if word == "{":
            within = blocks[-1] if blocks else ()
            name = _name_of_message(words)
            if name is not None and within is not None:
                place = (*within, counts.get(within, 0))
                counts[within] = place[-1] + 1
                names[place] = f"{names[within]}.{name}" if within else f"{package}{name}"
                blocks.append(place)
            else:
                blocks.append(within if words[:1] == ["oneof"] else None)
            words = []
        elif word in ";}":
            if words[:1] == ["package"] and not blocks:
                package = f"{words[1]}."
            if word == "}" and blocks:
                blocks.pop()
            words = []
        else:
            words.append(word)
    return names


def _name_of_message(words: Sequence[str]) -> str | None:
    """Return the name of the message that begins with these words; a group of proto2 is a message, too."""
    if len(words) == 2 and words[0] == "message":
        return words[1]
    is_group = len(words) == 3 and words[0] in ("optional", "required", "repeated") and words[1] == "group"
    return words[2] if is_group else None


def _places(value: bytes) -> tuple[int, tuple[int, ...]]:
    r"""Return the index of the first byte of a message, and its place: its index in the file, then in each message.

    >>> _places(b"....." + b"\x00m"), _places(b"....." + b"\x04\x02\x00m")
    ((6, (0,)), (8, (1, 0)))
    """
    if value[PREFIX_BYTES : PREFIX_BYTES + 1] == b"\0":  # the first message of a file, as most are
        return PREFIX_BYTES + 1, (0,)
    at, count = _varint(value, PREFIX_BYTES)
    places = []
    for _ in range(count):
        at, place = _varint(value, at)
        places.append(place)
    return at, tuple(places)


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """Return the index after a number of variable size (zigzag), and the number."""
    number = shift = 0
    while at < len(value) and shift < 35:
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return at, (number >> 1) ^ -(number & 1)
        shift += 7
    raise ValueError("expected the place of a message after the id of the schema, given a value that is too short")


def _written_places(descriptor: Any) -> bytes:
    places: list[int] = []
    each: Any = descriptor
    while each is not None:
        around = each.containing_type.nested_types if each.containing_type else each.file.message_types_by_name.values()
        places.insert(0, list(around).index(each))
        each = each.containing_type
    if places == [0]:
        return b"\0"
    return b"".join(_written_varint(number) for number in (len(places), *places))


def _written_varint(number: int) -> bytes:
    number, written = number << 1, bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])
