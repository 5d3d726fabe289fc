"""``Embeddings``: the settings of a member of the ready-made model that has a vector for each feature."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from streamiter.errors import ConfigurationError, ModelError, OtherModel, did_you_mean, shortened
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.parameter_server.admission import Admission
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Floats, whole_number

_log = logging.getLogger("streamiter.learn")

_KINDS: Final[tuple[EmbeddingKind, ...]] = get_args(EmbeddingKind)
# A row of the table then has 2 kB, and a layer of a thousand units and fields 256 MB.
_FACTORS_MAX: Final = 256
_UNITS_MAX: Final = 1_024
_LAYERS_MAX: Final = 8


@dataclass(frozen=True)
class Embeddings(Admission):
    """Vectors of features, which the ready-made model then has beside its other members: this user likes this item.

    A *feature* is a text of a field, such as one user. Each has a weight and a vector of ``factors`` numbers, and so
    has each numeric column. Several texts of one field, a list or the words of a text, count as their mean. There are
    two *experts*, with learning rates that are good for different streams, and each is a member of the mixture. Both
    add up the products of all pairs of vectors, as a factorization machine does (``kind="fm"``). The first one may
    also have a network with layers of ``hidden`` units, whose inputs are the vectors (``"deepfm"``), or a network only
    (``"wide and deep"``).

    A feature has a weight from its first learned row on. It gets a vector of its own when it is admitted; until then it
    has a rough one, of 4 bits for each number. ``admit``, ``expire``, ``at_most`` and ``time`` are those of
    :class:`~streamiter.parameter_server.Admission`. If labels come later, the time of a row is that of the question,
    without ``time=``.

    Of several classes each has weights, vectors and a network of its own, and so has the class that has not come yet: a
    feature takes as many times the memory, and a row the time.

    Raises ConfigurationError for values that cannot be used.

    >>> Embeddings(kind="fm", factors=4, expire="30d", time="at").expire_ms
    2592000000
    """

    kind: EmbeddingKind = "deepfm"
    factors: int = 8
    hidden: tuple[int, ...] = (32, 16)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            meant = did_you_mean(str(self.kind), _KINDS)
            raise ConfigurationError(
                f"Embeddings(kind=): expected {', '.join(map(repr, _KINDS))}, given {self.kind!r}{meant}"
            )
        whole_number("Embeddings(factors=)", self.factors, 1, _FACTORS_MAX)
        if not isinstance(self.hidden, (list, tuple)) or not 1 <= len(self.hidden) <= _LAYERS_MAX:
            raise ConfigurationError(
                f"Embeddings(hidden=): expected the numbers of units of 1 to {_LAYERS_MAX} layers, such as (32, 16), "
                f"given {self.hidden!r}"
            )
        units = [whole_number("Embeddings(hidden=)", each, 1, _UNITS_MAX) for each in self.hidden]
        object.__setattr__(self, "hidden", tuple(units))
        super().__post_init__()

    @property
    def width(self) -> int:
        """The number of numbers of a feature: its weight and its vector."""
        return 1 + self.factors

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers of units of the layers."""
        return () if self.kind == "fm" else self.hidden

    def definition(self) -> dict[str, Any]:
        """Return the settings on which the state of the vectors depends, as plain data."""
        return {"kind": self.kind, "factors": self.factors, "units": list(self.units)}

    def fit(self, owner: str, given: Mapping[str, Any], *, keeps: bool) -> bool:
        """Whether vectors of a :meth:`definition` fit these settings; with ``keeps`` others begin anew.

        Raises OtherModel, without ``keeps``, for a definition of other vectors.
        """
        if (own := self.definition()) == dict(given):
            return True
        if not keeps:
            raise OtherModel(
                f"{owner}: expected embeddings of {own}, given those of {dict(given)}; make the model with the same "
                'embeddings, or with other_settings="keep", so that new ones begin'
            )
        _log.warning("%s: embeddings of %s begin anew, since those of the version are of %s", owner, own, dict(given))
        return False

    def times_of_rows(self, owner: str, named: NamedRows, times_ms: Floats | None) -> Floats | None:
        """Return the times of rows if features expire: those of the field ``time``, or the given ones.

        Raises ModelError for rows without times.
        """
        if not self.expire_ms:
            return None
        found = times_ms if self.time is None else named.times_ms
        if found is None and len(named):
            raise ModelError(
                f"{owner}: expected a time for each row, since embeddings expire, given rows without; give records and "
                "the field of their time, Embeddings(expire=…, time=…), or labels that come later in event time"
            )
        return found


def check_embeddings(owner: str, given: object, other_loss: str | None) -> None:
    """Raise ConfigurationError for anything but ``Embeddings``, and for losses of numbers but the squared."""
    if not isinstance(given, Embeddings):
        raise ConfigurationError(f"{owner}(embeddings=): expected Embeddings(…), given {shortened(given)}")
    if other_loss is not None:
        raise ConfigurationError(
            f"{owner}(embeddings=): expected truth values, classes or numbers with the squared loss, given "
            f"loss={other_loss!r}; leave embeddings out"
        )


def settings_of_embeddings(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the :meth:`Embeddings.definition` of published members with embeddings."""
    layers = published["experts"][0]["layers"]
    units = [len(layer["bias"]) for layer in layers[:-1]]
    return {"kind": published["kind"], "factors": published["factors"], "units": units}
