"""Training a network on a stream that may never end, and publishing versions of it on the way."""

from __future__ import annotations

from typing import Any, Final

from streamiter.errors import GraphError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream
from streamiter.learn.estimators import labelled
from streamiter.learn.on_parameter_server.training import (
    REPEAT_MEMORY_BYTES,
    check_consistency,
    check_server,
    count_of,
    trained,
)
from streamiter.learn.rows import Extract, as_examples, blaming_rows, of_good_rows
from streamiter.networks.data import LabelledRows, as_labelled_rows, translated
from streamiter.networks.learner import NetworkLearner, NetworkWorker, Start, check_start
from streamiter.networks.mini_batches import prepared, to_record
from streamiter.networks.network import Network
from streamiter.networks.training import NetworkTraining, RowChecks
from streamiter.numbers import whole_number
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.parameter_server.consistency.models import Consistency
from streamiter.parameter_server.server import ParameterServer
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = ["train_network_online"]

_OWNER: Final = "train_network_online"


@all_or_nothing
def train_network_online(
    examples: Stream,
    network: Network,
    server: ParameterServer,
    *,
    consistency: Consistency,
    batch: int = 100,
    publish_every: int | None = None,
    workers: int | None = None,
    extract: Extract | None = None,
    start: Start = None,
    seed: int = 0,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> NetworkTraining:
    """Train a network on the records of a stream, which may be endless, each of them once.

    Each of the ``workers`` (as many as ``examples`` has subtasks, unless said otherwise) learns from mini-batches of
    ``batch`` records. Those of libsvm and dummy files are understood; of others ``extract(records)`` makes
    :class:`~streamiter.learn.Examples`. Labels are as ``translabel`` of the network says. Rows that are no examples
    follow ``on_error`` or go to ``dead_letter``.

    The first worker gives a version after every ``publish_every`` of its mini-batches, and the last one comes at the
    end of the stream. ``start=Published(topic, model)`` goes on from the version that was published last. How workers
    wait for each other, ``seed`` and ``start`` are as for :func:`~streamiter.networks.train_network`. The network must
    say how many features there are (``indexrange``).

    Raises GraphError and ModelError for what cannot run; a job without examples fails, and one that diverges.

    >>> from streamiter import Flow, topic
    >>> from streamiter.networks.serving import ServedNetwork
    >>> from streamiter.parameter_server import SSP
    >>> flow = Flow("clicks")
    >>> network = Network.from_json({
    ...     "data": {"indexrange": 3}, "default_optimizer": {"type": "FTRL"},
    ...     "layers": [
    ...         {"name": "score", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
    ...         {"name": "loss", "type": "simplelosslayer", "inputlayer": "score", "lossfunc": "logloss"},
    ...     ],
    ... })
    >>> rows = flow.source(topic("memory://clicks"), stop="latest")
    >>> training = train_network_online(
    ...     rows, network, ParameterServer(), consistency=SSP(staleness=2), batch=50, publish_every=10
    ... )
    >>> training.models.publish_model(topic("memory://models"), model="clicks")
    """
    check_stream(_OWNER, examples, "examples")
    check_server(_OWNER, server, examples.flow)
    check_consistency(_OWNER, consistency)
    batch = count_of(_OWNER, "batch", batch)
    workers = examples.parallelism if workers is None else count_of(_OWNER, "workers", workers)
    seed = whole_number(f"{_OWNER}(seed=)", seed, 0, error=GraphError)
    if publish_every is not None:
        publish_every = count_of(_OWNER, "publish_every", publish_every)
    if network.features is None:
        raise GraphError(
            f"{_OWNER}: expected the number of features, given indexrange -1, which a stream cannot tell; set "
            "indexrange, or take network.with_features(…)"
        )
    if extract is not None:
        check_function(extract, f"{_OWNER}(extract=)", ["records"])
    check_start(start, network)
    learner = NetworkLearner(network=network, consistency=consistency, start=start, seed=seed)
    label = step_names(examples.flow, name)
    mini_batches = examples.batch(batch, parallelism=workers, name=label("mini-batches")).process(
        lambda: _PrepareRows(network, extract, batch * workers),
        name=label("prepare"),
        on_error=on_error,
        dead_letter=dead_letter,
    )
    training = trained(
        mini_batches,
        learner,
        server,
        owner=_OWNER,
        epochs=1,
        publish_every=publish_every,
        worker=NetworkWorker,
        memory_bytes=REPEAT_MEMORY_BYTES,
        label=label,
    )
    return NetworkTraining(training.models, training.losses)


class _PrepareRows(Operator):
    """Makes mini-batches of lists of records; rows that are no examples follow the policy of the step."""

    def __init__(self, network: Network, extract: Extract | None, rows_in_step: int) -> None:
        self._checks = RowChecks(network)
        self._features = self._checks.features
        self._translation = network.configuration.data.trans_label
        self._extract = extract
        self._rows_in_step = rows_in_step

    def process(self, records: Batch, out: Output) -> None:
        data = of_good_rows(lambda rows: blaming_rows(self._rows, rows, self._rows), records, out)
        if data is not None and len(data):
            out.emit(to_record(prepared(data, self._features, self._rows_in_step)))

    def _rows(self, records: Any) -> LabelledRows:
        if self._extract is None:
            examples = labelled(_OWNER, records, self._features)
        else:
            examples = as_examples(f"{_OWNER}(extract=)", self._extract(records))
        data = as_labelled_rows(_OWNER, examples.features, examples.targets, self._features)
        data = LabelledRows(data.rows, translated(data.labels, self._translation))
        self._checks.check(_OWNER, data)
        return data
