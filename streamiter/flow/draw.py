"""The graph as a picture in words: Mermaid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamiter.runtime.graph import SINGLE_INPUT, Edge, Step
from streamiter.runtime.partitioning import Broadcast, ByFunction, ByKey, Rebalance

__all__ = ["mermaid"]

_SHAPES = {
    "source": ("[(", ")]"),
    "sink": ("[/", "/]"),
    "iteration": ("{{", "}}"),
    "operator": ("[", "]"),
}
_PARTITIONINGS = {Broadcast: "broadcast", Rebalance: "rebalance", ByKey: "by key", ByFunction: "by function"}


def mermaid(title: str, steps: Sequence[Step]) -> str:
    """Steps as nodes, edges with their input and partitioning, a box for each iteration.

    Feedback is dotted.
    """
    ids = {step: f"s{number}" for number, step in enumerate(steps)}
    lines = ["---", f"title: {title}", "---", "flowchart LR"]
    lines += [f"    {_node(step, ids)}" for step in steps if step.loop is None]
    for number, loop in enumerate(dict.fromkeys(step.loop for step in steps if step.loop is not None), 1):
        lines.append(f'    subgraph loop{number}["iteration {number}"]')
        lines += [f"        {_node(step, ids)}" for step in steps if step.loop is loop]
        lines.append("    end")
    for step in steps:
        lines += [f"    {_edge(edge, step, ids)}" for edge in step.inputs]
    return "\n".join(lines) + "\n"


def _node(step: Step, ids: dict[Step, str]) -> str:
    opening, closing = _SHAPES[step.shape]
    times = f" ×{step.parallelism}" if step.parallelism > 1 else ""
    name = step.name.replace('"', "'")
    return f'{ids[step]}{opening}"{name}{times}"{closing}'


def _edge(edge: Edge, step: Step, ids: dict[Step, str]) -> str:
    label = ", ".join(_labels(edge))
    if edge.feedback is not None:
        return f'{ids[edge.upstream]} -. "{label or "feedback"}" .-> {ids[step]}'
    return f"{ids[edge.upstream]} -->{f'|{label}|' if label else ''} {ids[step]}"


def _labels(edge: Edge) -> Iterable[str]:
    if edge.feedback is not None:
        yield "feedback"
    elif edge.input_name != SINGLE_INPUT:
        yield edge.input_name
    if edge.tag is not None:
        yield f"side output {edge.tag.name}"
    if (kind := _PARTITIONINGS.get(type(edge.partitioning))) is not None:
        yield kind
