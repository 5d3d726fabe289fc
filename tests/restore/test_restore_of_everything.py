"""Every class with state resumes from a snapshot with equal results, bit for bit, in one to three processes."""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import Stops
from iteration.iteration_support import run_shuffled
from restore import iteration_cases, learner_cases, model_cases, operator_cases, parameter_server_cases, topic_cases
from restore.case import Case
from restore.counted_calls import asked_of, count_calls
from support.soak import in_soak

import streamiter
import streamiter_files
import streamiter_kafka
import streamiter_sqlite
from streamiter import Flow, Stream
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import EngineOperator, Operator
from streamiter.testing import RestoreProcess, check_flow_restore
from streamiter.testing.restore.driving import _by_name, _plain_form

CASES: list[Case] = [
    *operator_cases.CASES,
    *iteration_cases.CASES,
    *learner_cases.CASES,
    *model_cases.CASES,
    *topic_cases.CASES,
    *parameter_server_cases.CASES,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.options.get('cut_at', 'records')}")
def test_a_restored_run_equals_the_undisturbed_run(
    case: Case, restore_process: RestoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check compares outputs, weights, optimizer state, versions, epochs and callbacks of both runs."""
    # A base class first: a class that declares fields has the method of its base.
    base_first = sorted(case.covers, key=lambda kind: len(kind.__mro__))
    calls = {kind: count_calls(kind, monkeypatch) for kind in base_first}
    check_flow_restore(case.build, process=restore_process, **case.options)
    assert [kind.__name__ for kind, counted in calls.items() if not counted] == []


PACKAGES = (streamiter, streamiter_sqlite, streamiter_files, streamiter_kafka)

ELSEWHERE = {
    "streamiter_files.reader.FilesReader": "test_restore_of_topics",
    "streamiter.engine.tasks.topic_returning.TopicReturnPath": "test_restore_of_topics",
    "streamiter_sqlite.topic.SqliteReader": "test_restore_of_topics",
    "streamiter_kafka.reader.KafkaReader": "tests/kafka/test_kafka_contract.py",
    "streamiter.parameter_server.server.ParameterServer": "tests/parameter_server/test_snapshots.py",
    "streamiter.networks.training._Judge": "tests/networks/test_network_training.py",
    "streamiter.networks.learner.NetworkWorker": "tests/networks/test_network_online.py",
    "streamiter.learn.clusters.clustering.KMeans": "tests/learn/test_saved_objects.py",
    "streamiter.learn.trees.decision_tree.DecisionTree": "tests/learn/test_saved_objects.py",
    "streamiter.parameter_server.storage.feature_block.FeatureBlock": "tests/networks/test_admission.py",
    "streamiter.parameter_server.storage.feature_files.FeatureFiles": "tests/learn/test_feature_files.py",
    "streamiter.learn.online.challengers.CompareChallenger": "tests/learn/test_challengers.py",
    "streamiter.learn.online.challengers.MeanDifference": "tests/learn/test_challengers.py",
    "streamiter.learn.quality.field_watch.WatchedFields": "tests/learn/test_field_watch.py",
    "streamiter.values.field_profiles.FieldProfiles": "tests/learn/test_field_watch.py",
    "streamiter.values.field_profiles.GroupCounts": "tests/learn/test_field_watch.py",
    "streamiter.values.field_profiles.ValueProfile": "tests/learn/test_field_watch.py",
    "streamiter.learn.labels.LabelReader": "tests/learn/test_adaptive_model.py",
    "streamiter.learn.quality.drift.ADWIN": "tests/learn/test_drift.py",
    "streamiter.learn.quality.drift.DriftWatch": "tests/learn/test_drift.py",
    "streamiter.learn.quality.drift.PageHinkley": "tests/learn/test_drift.py",
    "streamiter.learn.online.foreign_models._Learned": "tests/learn/test_foreign_models.py",
    "streamiter.learn.online.foreign_models.ForeignOwner": "tests/learn/test_foreign_models.py",
}
"""Classes whose case needs a file or a server, or no flow; each names the test with that case."""

NO_STATE = {
    "streamiter.operators.operator.Operator": "the base of operators",
    "streamiter.operators.declared_state.DeclaredOperator": "the base of operators that declare their state",
    "streamiter.operators.declared_state.DeclaredState": "the base of other classes that declare their state",
    "streamiter.operators.source.Source": "the base of sources",
    "streamiter.iteration.marked_streams.Replaying": "the base of operators that send records again",
    "streamiter.models.saved_objects.Savable": "the base of objects that are copied and saved",
    "streamiter.learn.gradients.training._MiniBatchModel": "a Protocol of models, which have cases",
    "streamiter.parameter_server.snapshots.HeldShard": "a Protocol of shards, whose class has a case",
    "streamiter.engine.tasks.task_barriers.TaskAtBarriers": "a Protocol of tasks, whose class has cases",
    "streamiter.operators.keyed_state.KeyedStates": "a Protocol of states, whose classes have cases",
    "streamiter.engine.storage.disk_queue.SpillLog": "the base of queues and caches on disk",
    "streamiter.topics.topic.TopicReader": "the base of readers",
    "streamiter.topics.connecting.ReaderBehindLosses": "its positions are those of a reader",
    "streamiter.parameter_server.storage.block.ShardBlock": "the base of blocks",
    "streamiter.learn.online.comparison.SameRows": "the base of comparisons, which have cases",
    "streamiter.learn.ready_made.row_columns.RowColumns": "the base of the ready-made model, which has cases",
    "streamiter.service.http.page._Page": "its state is a document of the page",
    "streamiter.engine.job.job.Job": "collects the states of all tasks",
    "streamiter.engine.job.checkpointer.Checkpointer": "collects the states of all tasks",
    "streamiter.engine.graph.feedback.ReturnPath": "a Protocol of ways through topics, whose class has a case",
    "streamiter.engine.processes.on_ray._SupervisorActor": "its state says whether the run is over",
}
"""Classes that have the method but no state of their own, with the reason."""


def classes_in(package: Any) -> list[type[Any]]:
    """Return all classes of a package except those for tests."""
    classes: list[type[Any]] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.startswith("streamiter.testing") or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        classes += [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == found.name]
    return classes


def test_what_an_operator_tells_the_engine_is_heard() -> None:
    """A flag of a class that is not derived from ``EngineOperator`` has no effect, and nothing said so."""
    flags = {name for name in vars(EngineOperator) if not name.startswith("_")}
    deaf = {
        kind.__qualname__: sorted(flags & vars(kind).keys())
        for package in PACKAGES
        for kind in classes_in(package)
        if issubclass(kind, Operator) and not issubclass(kind, EngineOperator) and flags & vars(kind).keys()
    }
    assert (len(flags) > 5, deaf) == (True, {})


def test_every_class_with_state_has_a_case() -> None:
    """A new operator without a restore test could forget a part of its state."""
    covered = {f"{kind.__module__}.{kind.__qualname__}" for case in CASES for kind in case.covers}
    keeping = {
        f"{kind.__module__}.{kind.__qualname__}"
        for package in PACKAGES
        for kind in classes_in(package)
        if asked_of(kind) is not None
    }
    exempt = ELSEWHERE.keys() | NO_STATE.keys()
    assert sorted(keeping - covered - exempt) == [], "add a case, or a reason in NO_STATE"
    assert sorted(exempt - keeping) == [], "the class no longer exists"
    assert sorted(covered & exempt) == [], "the class has a case, so remove the exception"


PARALLELISM = 3
TURNS = 40
"""Most cases take a little longer, in turns of the event loop."""

SPEED_DECIDES = {
    "keyed_reduce",
    "stateful_map",
    "timers_of_a_step",
    "event_time",
    "event_time_over_channels",
    "timed_windows",
    "timed_joins",
    "awaited_steps",
    "online_training-asynchronous",
    "online_training_from_a_start",
    "online_training_with_delayed_labels",
    "online_training_behind_a_join-asynchronous",
    "online_training_by_rows-asynchronous",
    "online_training_with_embeddings-asynchronous",
    "online_training_by_rows_with_delayed_labels-asynchronous",
    "online_training_with_labels_in_event_time-asynchronous",
    "offline_training-asynchronous",
    "comparison-asynchronous",
    "comparison-synchronous",
    "scaling",
    "negatives",
    "clustering",
    "clustering_from_a_start",
}
"""With several sources, their results depend on the order of arrival or on the clock, in one process too."""
CASES_IN_PROCESSES = {
    case.name: case
    for case in (*operator_cases.CASES, *iteration_cases.CASES, *learner_cases.CASES, *model_cases.CASES)
    if case.name not in SPEED_DECIDES and not case.name.startswith("parameter_server")
}
"""Without parameter servers: their restores are in tests/parameter_server/flows/test_several_processes.py."""


def result(case: Case, parallelisms: list[int], seed: int) -> Any:
    """Return the records of all outputs in any order, of a run that is stopped between these parallelisms."""
    made: list[tuple[Flow, dict[str, Any]]] = []

    def make_flow(parallelism: int) -> Flow:
        flow = Flow("case", parallelism=parallelism)
        flow.register(ModelSnapshot)
        with flow.graph.adapting(lambda step: replace(step, has_lasting_name=True)):
            outputs = _by_name(case.build(flow))
            # The windows of validations follow the order of arrival.
            collected = {
                name: each.collect()
                for name, each in outputs.items()
                if isinstance(each, Stream) and name != "validation"
            }
        made.append((flow, collected))
        return flow

    run_shuffled(Stops(seed).run(make_flow, parallelisms, turns=TURNS), seed)
    flow, collected = made[-1]
    return {
        name: sorted(flow.plain_data.encode(_plain_form(record)) for record in each.items)
        for name, each in collected.items()
    }


@pytest.mark.parametrize("seed", [1, *in_soak(2)], ids=["2, 1 and 3", "3, 2 and 1"])
@pytest.mark.parametrize("name", CASES_IN_PROCESSES)
def test_a_case_that_resumes_in_other_processes_has_the_result_of_one_process(name: str, seed: int) -> None:
    """The state of a step was in a process that the next run did not have, or its records were on their way."""
    case, first = CASES_IN_PROCESSES[name], 6 * list(CASES_IN_PROCESSES).index(name)
    expected = result(case, [PARALLELISM], seed=0)
    assert any(expected.values())
    assert result(case, [PARALLELISM] * 3, first + seed) == expected
