"""A stream in windows, of which an aggregate makes a stream of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from streamiter.errors import ConfigurationError, GraphError
from streamiter.flow.options import StepOptions
from streamiter.flow.stream import Stream
from streamiter.operators.timed.aggregates import BY_NAME
from streamiter.operators.timed.several_aggregates import Aggregates, AggregateSpec

Result = TypeVar("Result")
"""The type of the results of windows."""


class WindowedStream(Generic[Result]):
    """A keyed stream in windows: :meth:`aggregate` says what is computed of each window."""

    def __init__(self, build: Callable[[Aggregates, StepOptions], Stream[Result]], options: StepOptions) -> None:
        """``build`` adds the step of an aggregate; ``options`` are those of the step, which may have no name yet."""
        self._build = build
        self._options = options

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise GraphError(
                f'{name}: expected a stream, given windows without an aggregate; write .aggregate("count") before '
                f".{name}(…), or another aggregate"
            )

    def aggregate(
        self, *one: AggregateSpec, name: AggregateSpec | None = None, **named: AggregateSpec
    ) -> Stream[Result]:
        """Emit the aggregate of each window: one, or several by name, whose values are in a dict then.

        An aggregate is ``"count"``, ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"first"``, ``"last"``,
        ``"collect"``, ``"profile"``, :func:`~streamiter.quantile`, or :func:`~streamiter.fold` with functions. It takes
        the record itself, or a value of the record: write a pair with the name of a field, or a function. ``name`` is
        the name of the step, if it is a text that is no aggregate.

        - Sums fold from left to right; sums of ints are exact. NaN makes sum, mean, min, max and quantiles NaN. None is
          refused, and aggregates of numbers refuse all other values: the record follows ``on_error``, and is in none of
          the aggregates.
        - ``first``, ``last`` and ``collect`` go by the time of the records, simultaneous ones by arrival.
        - ``profile`` is what numbers or texts were, None included, for :func:`~streamiter.learn.compare_profiles`.

        >>> from streamiter import Flow, tumbling
        >>> flow = Flow("per minute")
        >>> orders = [{"user": "ann", "at": 1.0, "price": 5}, {"user": "ann", "at": 59.0, "price": 7}]
        >>> timed = flow.from_items(orders).event_time("at", unit="s")
        >>> minutes = timed.key_by(lambda order: order["user"]).window(tumbling(60))
        >>> results = minutes.aggregate(orders="count", spent=("sum", "price")).collect()
        >>> flow.run().state, [(each.key, each.start, each.end, each.value) for each in results.items]
        ('finished', [('ann', 0, 60000, {'orders': 2, 'spent': 12})])
        """
        options = self._options
        if isinstance(name, str) and name not in BY_NAME:
            if (other := options.get("name")) is not None:
                raise GraphError(
                    f"step {other!r}: expected one name, in .window(…) or in .aggregate(…), given {name!r} in the "
                    "other; leave one of them out"
                )
            options = {**options, "name": name}
        elif name is not None:
            named = {"name": name, **named}
        try:
            aggregates = Aggregates.of(one, named)
        except ConfigurationError as error:
            raise GraphError(str(error)) from None
        return self._build(aggregates, options)
