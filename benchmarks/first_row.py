"""Print when the first row has been learned, and the CPU time until then, of a program that begins with its imports::

python -m benchmarks.first_row "at once"
"""

from __future__ import annotations

import sys
import time
from operator import itemgetter
from typing import Any

from streamiter import Flow
from streamiter.learn import DelayedLabels, train_online

_ROWS = 700
_ANSWERS_AFTER_MS = 1_000 * _ROWS


def main() -> None:
    """Learn 700 rows of a number and a text from memory, with labels at once or later."""
    flow, options = Flow("first row"), dict[str, Any](label="late")
    rows = flow.from_items([{"km": 9.0 * (n % 7), "kind": "abc"[n % 3], "late": n % 7 > 3} for n in range(_ROWS)])
    if sys.argv[1] == "later":
        labels = DelayedLabels(
            key_of=itemgetter("row"),
            is_answer=itemgetter("late"),
            features=["km", "kind"],
            target_of=itemgetter("late"),
            within_s=_ROWS,
            otherwise=False,
        )
        questions = [
            {"row": n, "km": 9.0 * (n % 7), "kind": "abc"[n % 3], "at": 1_000 * n, "late": False} for n in range(_ROWS)
        ]
        answers = [
            row | {"at": row["at"] + _ANSWERS_AFTER_MS // 2, "late": True} for row in questions if row["row"] % 2
        ]
        events = sorted(questions + answers, key=itemgetter("at"))
        rows, options = flow.from_items(events).event_time("at", unit="ms", check_unit=False), {"labels": labels}
    learned: list[tuple[float, float]] = []
    training = train_online(rows, **options)
    training.predictions.map(lambda _: learned.append((time.time(), time.process_time()))).collect()
    flow.run()
    print(*learned[0])


if __name__ == "__main__":
    main()
