"""The references of the ready-made learner, with what docs/decisions/073 changed since for numbers.

Both references have the same names for the same numbers, so that the same replacements fit both.
"""

import re
from typing import Final

_JUDGED: Final = """
mixed, least = s[2], 100.0
for e in range(6):
    mixed += np.exp(mix[e]) * z[0, e]
error = min(max(mixed, s[4] - s[6]), s[5] + s[7]) - {y}
s[8] += (error * error - s[8]) * min({h} / min(s[0], 10_000.0), 1.0)
judged = np.sqrt(s[8]) if s[0] - {h} >= 30.0 else sd
for e in range(6):
    if judged > 0.0:
        error = (min(max(z[0, e] + s[2], s[4] - s[6]), s[5] + s[7]) - {y}) / judged
        least = min(least, error * error)
"""

_BEYOND: Final = """
if s[0] - {h} >= 30.0:
    s[6], s[7] = max(s[4] - {y}, 0.9 * s[6]), max({y} - s[5], 0.9 * s[7])
"""


def amended(source: str) -> str:
    """Return the source of a reference with the amendments. Fails where a place to change is not found once."""
    y, h = ("y", "h") if "s[0] += h" in source else ("y[r]", "1.0")

    def before(given: re.Match[str]) -> str:
        return _indented(_BEYOND, given[1], y, h) + given[0]

    def behind(given: re.Match[str]) -> str:
        return given[0] + _indented(_JUDGED, given[1], y, h)

    changes = [
        (r"np\.zeros\(6\)", "np.zeros(9)"),
        (r"\+ s\[2\], s\[4\]\), s\[5\]\)", "+ s[2], s[4] - s[6]), s[5] + s[7])"),
        (r"m\.s\[4\], m\.s\[5\]|(?<=b, )s\[4\], s\[5\]", lambda given: _widened(given[0])),
        (r"( +)s\[4\], s\[5\] = min\(.*\n", before),
        (r"( +)sd = np\.sqrt\(s\[3\] / s\[0\]\)\n", behind),
        (r"if sd > 0\.0:\n( +)error = ", r"if judged > 0.0:\n\1error = "),
        (r"low\), high\) - target\) / sd", "low - s[6]), high + s[7]) - target) / judged"),
        (r"min\(error \* error, 16\.0\)", "min(error * error, 100.0, least + 16.0)"),
    ]
    for pattern, text in changes:
        source, count = re.subn(pattern, text, source)
        assert count == 1, f"expected one place of {pattern}, given {count}"
    return source


def _widened(ends: str) -> str:
    low, high = ends.split(", ")
    return f"{low} - {low.replace('4', '6')}, {high} + {high.replace('5', '7')}"


def _indented(lines: str, indent: str, y: str, h: str) -> str:
    return "".join(f"{indent}{line}\n" for line in lines.format(y=y, h=h).strip().splitlines())
