"""The fields that a label is made of are no features: a function of the label is watched, and its code is read.

A label that is a field may be made in an earlier step: the source of the step's function says of which fields.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from functools import partial
from inspect import findsource, getattr_static
from itertools import chain, islice, pairwise
from os.path import dirname
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from streamiter.learn.labels import FIRST_LABELS, Label
from streamiter.operators.declared_state import COPIED, FIRST, LEAST, DeclaredState, Form, declared, for_all

_log = logging.getLogger("streamiter.learn")


class LabelFields(DeclaredState):
    """Calls the user's function of a label, and notes the fields that it reads of the first records, or may read.

    It may read a field that its code names, in a branch that has not run so far. A warning tells once, in the log
    ``streamiter.learn``, where the fields cannot be told.

    >>> made_of = LabelFields(lambda trip: trip["delay"] > 15)
    >>> made_of({"km": 3.5, "delay": 20}), made_of.fields
    (True, ['delay'])
    """

    _named: frozenset[str] = declared(form=Form(sorted, take_on=lambda named, of_state: None), share=FIRST)
    fields: list[str] = declared(
        made=list, form=COPIED, share=for_all(lambda many: list(dict.fromkeys(chain.from_iterable(many))))
    )
    """The fields of the records so far that were read, or that its code names."""
    _left = declared(FIRST_LABELS, share=LEAST)
    """The number of records that it still looks at."""
    _is_told = declared(False, share=for_all(any))

    def __init__(self, label: Callable[[Any], Label], step: str = "read") -> None:
        self._label = label
        self.step = step
        self._named = texts_in(label)

    @classmethod
    def of(cls, label: str | Callable[[Any], Label], features: object) -> LabelFields | None:
        """Return the function that notes the fields of a label; None where they need not be known."""
        return cls(label) if features is None and callable(label) else None

    @property
    def left_out(self) -> frozenset[str]:
        """The fields that are no features, of all records."""
        return self._named.union(self.fields)

    def __call__(self, record: Any) -> Label:
        if not self._left:
            return self._label(record)
        self._left -= 1
        # Another type than a plain dict may have attributes that the function reads.
        observed = ObservedRecord(record) if type(record) is dict else None
        try:
            return self._label(record if observed is None else observed)
        finally:
            read = {} if observed is None else observed.fields_read
            named = self._named.intersection(record if isinstance(record, Mapping) else ())
            self.fields += [field for field in (*read, *sorted(named.difference(read))) if field not in self.fields]
            if not self._is_told and (observed is None or observed.is_read_as_a_whole or not read):
                self._is_told = True
                _log.warning(
                    "step %r: expected a label= that reads fields of the record by their names, so that they are no "
                    "features, given one for which this cannot be told; give features=, so that the label is not "
                    "learned from itself",
                    self.step,
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if set(state["named"]) != self._named:  # It is another function.
            self._left = FIRST_LABELS

    @classmethod
    def merged(cls, states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Return the joined state, as if one had seen the records of all of them."""
        given = [state for state in states if state is not None]
        return cls.redistribute(given, 1)[0] if given else None


def texts_in(function: object) -> frozenset[str]:
    """Return the texts that may be names of fields in a function, and in the functions of its folder that it calls.

    They are in its code, its defaults and closure, in the arguments of a ``partial``, and in attributes and globals
    that it names; texts that it compares with a value, or returns, are left out. A computed name is not found.

    >>> sorted(texts_in(lambda trip: trip["delay"] > 15 or trip.get("state") == "late"))
    ['delay', 'state']
    """
    found: set[str] = set()
    _add_texts(function, None, found, [])
    return frozenset(found)


# A longer sequence of texts is data.
_NAMES_IN_A_SEQUENCE: Final = 1_000
_USES_A_VALUE: Final = frozenset({"COMPARE_OP", "CONTAINS_OP", "CALL_KW", "RETURN_VALUE"})


def _add_texts(one: object, owner: object, found: set[str], seen: list[FunctionType]) -> None:
    """Add the texts of a function, or of an object that it refers to, to the texts found; a method has an ``owner``."""
    if isinstance(one, str):
        found.add(one)
    elif isinstance(one, (tuple, list, set, frozenset)):
        found.update(each for each in islice(one, _NAMES_IN_A_SEQUENCE) if isinstance(each, str))
    elif isinstance(one, (MethodType, staticmethod, classmethod)):
        _add_texts(one.__func__, getattr(one, "__self__", owner), found, seen)
    elif isinstance(one, partial):
        for part in (one.func, *one.args, *one.keywords.values()):
            _add_texts(part, owner, found, seen)
    elif isinstance(one, FunctionType):
        if one not in seen and (not seen or _folder(one) == _folder(seen[0])):
            seen.append(one)
            for part in _parts_of(one, owner):
                _add_texts(part, owner, found, seen)
    elif isinstance(call := getattr_static(type(one), "__call__", None), FunctionType):
        _add_texts(call, one, found, seen)


def _folder(function: FunctionType) -> str:
    return dirname(function.__code__.co_filename)


def _parts_of(function: FunctionType, owner: object) -> Iterator[object]:
    """Yield the constants of a function's code, and the objects that it refers to by name."""
    codes = [function.__code__]
    for code in codes:
        for instruction, following in pairwise(get_instructions(code)):
            if isinstance(instruction.argval, CodeType):
                codes.append(instruction.argval)
            elif instruction.opname == "LOAD_CONST" and following.opname not in _USES_A_VALUE:
                yield instruction.argval
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # It has no value so far.
            yield cell.cell_contents
    names = {name for code in codes for name in code.co_names}
    spaces = [getattr(owner, "__dict__", {}), *map(vars, type(owner).__mro__), function.__globals__]
    known = [space[name] for space in spaces for name in names if name in space]
    yield from known
    for space in known:
        if isinstance(space, (ModuleType, type)):
            yield from (vars(space)[name] for name in names if name in vars(space))


def _noting_field(method: Callable[..., Any]) -> Any:
    def call(record: ObservedRecord, field: Any, *others: Any) -> Any:
        if isinstance(field, str) and not record.is_read_as_a_whole:
            record.fields_read[field] = None
        return method(record, field, *others)

    return call


def _noting_all(method: Callable[..., Any]) -> Any:
    def call(record: ObservedRecord, *others: Any) -> Any:
        record.is_read_as_a_whole = True
        return method(record, *others)

    return call


class ObservedRecord(dict[str, Any]):
    """A copy of a record that notes which fields are read by their names, until all are, such as by ``**record``."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.fields_read: dict[str, None] = {}
        self.is_read_as_a_whole = False

    __getitem__ = _noting_field(dict.__getitem__)
    __contains__ = _noting_field(dict.__contains__)
    get = _noting_field(dict.get)
    pop = _noting_field(dict.pop)
    # With an __iter__ of its own, Python copies a dict by its methods.
    __iter__ = _noting_all(dict.__iter__)
    __or__ = _noting_all(dict.__or__)
    keys = _noting_all(dict.keys)
    values = _noting_all(dict.values)
    items = _noting_all(dict.items)
    copy = _noting_all(dict.copy)


class FieldsBefore:
    """Warns once of each feature that a label, a field, was made of by functions of steps before the training."""

    def __init__(self, label: str, functions: Iterable[Callable[..., Any]]) -> None:
        self._label = label
        self._makers = {
            text: function.__code__
            for function in functions
            if isinstance(function, FunctionType)
            for text in texts_behind(function, label)
        }

    @classmethod
    def of(cls, label: object, features: object, functions: Iterable[Callable[..., Any]]) -> FieldsBefore | None:
        """Return what warns of such fields; None where the user names the features, or the label is no field."""
        return cls(label, functions) if features is None and isinstance(label, str) else None

    def look_at(self, features: Iterable[str]) -> None:
        """Look for such fields among these features."""
        for field in sorted(self._makers.keys() & features):
            code = self._makers.pop(field)
            _log.warning(
                "train_online: the field %r is a feature, and the function at %s:%d makes the label %r of it; if a "
                "prediction is asked for without this field, leave it out of the records, or name the features with "
                "features=[…], so that the label is not learned from itself",
                field,
                code.co_filename,
                code.co_firstlineno,
                self._label,
            )


def texts_behind(function: FunctionType, field: str) -> frozenset[str]:
    """Return the texts that may be names of fields in what a function stores as this field of a dict.

    They are in the expression, in those of variables that it has, and in functions that it calls. A function without
    source, such as one of Python's prompt, tells none.

    >>> def with_label(trip):
    ...     hours = trip["delay"] / 60
    ...     return {**trip, "late": hours > 0.25, "far": trip["km"] > 900}
    >>> texts_behind(with_label, "late")
    frozenset({'delay'})
    """
    found: set[str] = set()
    code = function.__code__
    with suppress(OSError, SyntaxError):
        # Most functions make no label, and a source is read in some milliseconds.
        lines = findsource(function)[0] if _has_text(code, field) else []
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)) and _first_line(node) == code.co_firstlineno:
                cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
                known = {**function.__globals__, **dict(cells)}
                for name in _add_expressions(node, field, found) - {*code.co_varnames}:
                    one = known.get(name)
                    _add_texts(one.cell_contents if isinstance(one, CellType) else one, None, found, [function])
    return frozenset(found)


def _has_text(code: CodeType, text: str) -> bool:
    return any(
        one == text or (isinstance(one, tuple) and text in one) or (isinstance(one, CodeType) and _has_text(one, text))
        for one in code.co_consts
    )


def _first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min(each.lineno for each in (node, *decorators))


def _add_expressions(function: ast.AST, field: str, found: set[str]) -> set[str]:
    """Add the texts of the expressions behind a field to the texts found; return the names in these expressions."""
    stores = [store for node in ast.walk(function) for store in _stores(node)]
    names: set[str] = set()
    waiting = [value for is_field, name, value in stores if is_field and name == field]
    for value in waiting:
        parts = list(ast.walk(value))
        # A value that is compared is no name, and a record is more than the field that is read of it.
        compared = [each for part in parts if isinstance(part, ast.Compare) for each in (part.left, *part.comparators)]
        records = [part.value for part in parts if isinstance(part, (ast.Subscript, ast.Attribute))]
        texts = [part.value for part in parts if isinstance(part, ast.Constant) and part not in compared]
        found.update(text for text in texts if isinstance(text, str))
        new = {part.id for part in parts if isinstance(part, ast.Name) and part not in records} - names
        waiting += [value for is_field, name, value in stores if not is_field and name in new]
        names |= new
    return names


def _stores(node: ast.AST) -> Iterator[tuple[bool, str, ast.expr]]:
    """Yield what a node stores: whether in a field, or else in a variable, under which name, and the expression."""
    if isinstance(node, ast.Dict):
        yield from (
            (True, str(getattr(key, "value", "")), value) for key, value in zip(node.keys, node.values, strict=True)
        )
    elif isinstance(node, ast.Call):
        yield from ((True, each.arg, each.value) for each in node.keywords if each.arg is not None)
    elif isinstance(node, ast.NamedExpr):
        yield False, node.target.id, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield True, str(getattr(target.slice, "value", "")), node.value
            else:
                yield from ((False, each.id, node.value) for each in ast.walk(target) if isinstance(each, ast.Name))
