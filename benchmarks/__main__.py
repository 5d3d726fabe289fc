"""Run benchmarks: ``python -m benchmarks [NAME ...] [--quick] [--repeat N] [--output DIR]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.calls import calls
from benchmarks.catalogue import catalogue_answers
from benchmarks.checkpoints import checkpoint_cost, recovery
from benchmarks.drift import drift
from benchmarks.embeddings import embeddings_speed
from benchmarks.embeddings_quality import embeddings_quality
from benchmarks.feature_churn import networks_churn
from benchmarks.feedback import feedback_latency, feedback_throughput
from benchmarks.footprint import idle_cpu, import_time, memory, slow_learner
from benchmarks.in_memory import in_memory
from benchmarks.json_lines import json_lines
from benchmarks.k_means import k_means
from benchmarks.kafka_map import kafka_map
from benchmarks.large_state import state_backends
from benchmarks.late_labels import late_labels
from benchmarks.late_labels_from_kafka import late_labels_from_kafka
from benchmarks.latency import latency, latency_of_updates
from benchmarks.link import link
from benchmarks.measuring import Figure
from benchmarks.network_freshness import networks_follower, networks_freshness
from benchmarks.network_versions import networks_versions
from benchmarks.networks import networks_speed
from benchmarks.networks_quality import networks_quality
from benchmarks.offline_learning import offline_logistic_regression
from benchmarks.online_learning import online_learning, online_learning_for_long
from benchmarks.parameter_server import parameter_server, parameter_server_calls, parameter_server_optimizer
from benchmarks.parameter_server_processes import networks_processes, parameter_server_processes
from benchmarks.predicting import predicting
from benchmarks.processes import processes_map, processes_recovery, processes_regression, processes_shuffle
from benchmarks.report import write
from benchmarks.rounds import bounded_rounds
from benchmarks.row_steps import row_steps
from benchmarks.service_http import service_http
from benchmarks.session import PROJECT, Session
from benchmarks.snapshot_pause import snapshot_pause
from benchmarks.sparse_networks import networks_sparse
from benchmarks.windows import interval_join, tumbling_count
from benchmarks.windows_on_kafka import interval_join_on_kafka, tumbling_count_on_kafka

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS: Final[Mapping[str, Callable[[Session], Iterable[Figure]]]] = MappingProxyType(
    {
        "import": import_time,
        "in-memory": in_memory,
        "calls": calls,
        "tumbling-count": tumbling_count,
        "interval-join": interval_join,
        "tumbling-count-on-kafka": tumbling_count_on_kafka,
        "interval-join-on-kafka": interval_join_on_kafka,
        "feedback-throughput": feedback_throughput,
        "feedback-latency": feedback_latency,
        "bounded-rounds": bounded_rounds,
        "k-means": k_means,
        "online-learning": online_learning,
        "online-learning-for-long": online_learning_for_long,
        "row-steps": row_steps,
        "late-labels": late_labels,
        "late-labels-from-kafka": late_labels_from_kafka,
        "json-lines": json_lines,
        "offline-logistic-regression": offline_logistic_regression,
        "drift": drift,
        "predicting": predicting,
        "link": link,
        "processes-map": processes_map,
        "processes-shuffle": processes_shuffle,
        "processes-regression": processes_regression,
        "processes-recovery": processes_recovery,
        "parameter-server": parameter_server,
        "parameter-server-calls": parameter_server_calls,
        "parameter-server-optimizer": parameter_server_optimizer,
        "parameter-server-processes": parameter_server_processes,
        "networks-speed": networks_speed,
        "networks-processes": networks_processes,
        "networks-quality": networks_quality,
        "networks-sparse": networks_sparse,
        "networks-versions": networks_versions,
        "networks-churn": networks_churn,
        "networks-embeddings": embeddings_speed,
        "networks-embeddings-quality": embeddings_quality,
        "networks-catalogue": catalogue_answers,
        "networks-freshness": networks_freshness,
        "networks-follower": networks_follower,
        "kafka-map": kafka_map,
        "latency": latency,
        "latency-of-updates": latency_of_updates,
        "checkpoint-cost": checkpoint_cost,
        "snapshot-pause": snapshot_pause,
        "state-backends": state_backends,
        "service-http": service_http,
        "recovery": recovery,
        "memory": memory,
        "slow-learner": slow_learner,
        "idle-cpu": idle_cpu,
    }
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named benchmarks, or all of them; a missed target is reported and is no failure."""
    options = _parsed(arguments)
    results: dict[str, list[Figure]] = {}
    with Session(quick=options.quick, repeat=options.repeat) as session:
        for name in options.names or BENCHMARKS:
            benchmark = BENCHMARKS[name]
            print(f"{name}: {benchmark.__doc__}", file=sys.stderr, flush=True)
            results[name] = list(benchmark(session))
            # The report is written after each benchmark, so that an interrupted run leaves its results.
            markdown = write(options.output, results)
    print(markdown)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Compare the speed of streamiter with hand-written loops."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="use small sizes, which check that a benchmark works")
    parser.add_argument("--repeat", type=_at_least_one, default=5, metavar="N", help="number of rounds (default 5)")
    parser.add_argument("--output", type=Path, default=PROJECT / "benchmarks" / "results", metavar="DIR")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"expected the name of a benchmark, given {unknown[0]!r}; the names are {', '.join(BENCHMARKS)}")
    return options


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
