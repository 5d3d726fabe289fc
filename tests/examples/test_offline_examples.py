"""The examples of offline learning run as users run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import orjson
from support.processes import forked_run
from support.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed_by(name: str, *arguments: str) -> list[str]:
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py"), *arguments], limit_s=PATIENCE_S, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_grocers_habits_are_found() -> None:
    """The example missed one of the three rules in its generated baskets."""
    lines = printed_by("frequent_item_sets")
    assert re.fullmatch(r"\d+ item sets in 5000 baskets, such as", lines[0])
    rules = {line.strip().split(" (")[0] for line in lines[lines.index("What follows:") + 1 :]}
    assert {"bread, jam → butter", "crisps → beer", "tea → milk"} <= rules
    assert not any("rice" in rule for rule in rules)


def test_baskets_of_a_topic_are_read_to_its_end(tmp_path: Path) -> None:
    """The example ignored the file of baskets or the share that a user gave."""
    baskets = tmp_path / "baskets.jsonl"
    baskets.write_bytes(b"\n".join(map(orjson.dumps, [["a", "b"], ["a", "b"], ["c"], ["c"]])))
    assert printed_by("frequent_item_sets", f"file:{baskets}", "0.5") == [
        "4 item sets in 4 baskets, such as",
        "  b: 2",
        "  c: 2",
        "  a, b: 2",
        "What follows:",
        "  a → b (confidence 1.00, lift 2.00)",
        "  b → a (confidence 1.00, lift 2.00)",
    ]


def test_the_tree_of_the_flowers_is_printed_and_classifies_others() -> None:
    """The printed tree, which is the only view of it, was unreadable or wrong."""
    *tree, verdict = printed_by("decision_tree")
    assert re.fullmatch(r"petal length ≤ 2\.\d+: setosa \(\d+ rows(, 99\.\d%)?\)", tree[0])
    assert sum("virginica" in line for line in tree) >= 1
    known = re.fullmatch(r"Of other flowers it knows (.*)% \(always one kind: 33\.3%\)\.", verdict)
    assert known is not None, verdict
    assert float(known[1]) > 95
