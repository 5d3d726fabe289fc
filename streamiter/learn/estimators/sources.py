"""What models are fitted to: arrays, or what is in a topic now."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.learn.estimators.running import run_offline
from streamiter.learn.rows.checks import BadRows
from streamiter.learn.rows.examples import Examples, Extract, as_examples
from streamiter.learn.rows.feature_rows import Features
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, Columns
from streamiter.sparse_rows import SparseRows
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Decoder, StopPosition, Topic

__all__ = [
    "examples_in_topic",
    "labelled",
    "no_path",
    "read_topic",
    "refuse_arrays_with_topic",
    "refuse_options_of_topics",
]


def no_path(owner: str, given: str) -> ModelError:
    """The error for a text where data is expected: it is most likely the name of a file."""
    shown = shown_url(given) if ":" in given else given
    url = shown if ":" in given else f"file:{given}"
    return ModelError(
        f'{owner}: expected arrays or a topic, given the text {shortened(shown)}; to read a file, pass topic("{url}")'
    )


def refuse_arrays_with_topic(owner: str, topic: Topic, **arrays: Any) -> None:
    """Raise ModelError for those that were given (are not None): the topic brings them."""
    for what, given in arrays.items():
        if given is not None:
            raise ModelError(
                f"{owner}: expected the topic {topic.name!r} to bring {what.replace('_', ' ')}, given an array of "
                "them; write extract= to take them from the records"
            )


def refuse_options_of_topics(owner: str, **options: Any) -> None:
    """Raise GraphError for those that were given (are not None), with arrays."""
    for option, given in options.items():
        if given is not None:
            raise GraphError(
                f"{owner}({option}=): expected it with a topic only, given it with an array; give the rows as they are"
            )


def read_topic(flow: Flow, topic: Topic, decode: Decoder | None, *, parallelism: int = 1) -> Stream:
    """The records that are in the topic as the flow starts."""
    # Files end anyway, and to know where would be to read them twice.
    stop: StopPosition = None if getattr(topic, "bounded", False) else "latest"
    return flow.source(topic, decode=decode, stop=stop, parallelism=parallelism)


def examples_in_topic(
    topic: Topic, decode: Decoder | None, extract: Extract | None, *, owner: str
) -> list[Examples]:
    """All of them, batch by batch, in memory. Ctrl-C raises KeyboardInterrupt; JobFailed for what are none."""

    def parts_of(batch: Batch) -> list[Examples]:
        return [
            labelled(owner, batch) if extract is None else as_examples(f"{owner}(extract=)", extract(batch))
        ]

    flow = Flow(owner)
    examples = read_topic(flow, topic, decode).map_batch(parts_of, name="examples").collect()
    run_offline(flow, title=owner, progress=False, first_stop="abort")
    parts: list[Examples] = examples.items
    return parts


def labelled(owner: str, batch: Batch, width: int | None = None) -> Examples:
    """Of records as libsvm and dummy files give them. Without a width, rows are as wide as the widest of them.

    Raises ConfigurationError where none of several records is like that, BadRows for some that are not.
    """
    if isinstance(batch, Columns) and {"label", "features"} <= set(batch.names):
        return Examples(batch["features"], batch["label"])
    bad = [row for row, record in enumerate(batch) if not _has_keys(record)]
    if bad:
        what = (
            f"{owner}: expected records with label, indices and values, given {str(batch[bad[0]])[:80]}; "
            "write extract= to make Examples of them"
        )
        if len(bad) == len(batch) > 1:
            raise ConfigurationError(what)
        raise BadRows(bad, what)
    starts = np.cumsum([0, *(len(record["indices"]) for record in batch)])
    indices = _joined([record["indices"] for record in batch], np.int64)
    values = _joined([record["values"] for record in batch], np.float64)
    if width is None:
        width = int(indices.max(initial=-1)) + 1
    features: Features = SparseRows(starts, indices, values, width)
    return Examples(features, np.array([record["label"] for record in batch]))


def _has_keys(record: Any) -> bool:
    return isinstance(record, dict) and {"label", "indices", "values"} <= record.keys()


def _joined(parts: list[Any], dtype: type[np.generic]) -> Any:
    """One after the other. An empty list is left out: it has a dtype of its own, which all would become."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if filled else np.empty(0, dtype)
