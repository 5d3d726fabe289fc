"""Whether the resources of a process are flat: a line through its memory, and counts at the begin and the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from service_soak.stack import Resources

__all__ = ["Trend", "trend"]

_MIB: Final = float(1 << 20)
# Caches and histories of fixed length are full after this share of a life, or after this time.
_WARM_UP: Final = 1 / 3
_WARM_UP_S: Final = 120.0
# Over minutes, an allocator keeps a few MiB more or less; a leak of 100 bytes for each of 100 requests a second is
# 0.6 MiB a minute.
_MIB_PER_MINUTE_MAX: Final = 0.5
_NOISE_MIB: Final = 3.0
# A connection or two more may be open at the end than at the begin.
_MORE_FILES_MAX: Final = 4
_SAMPLES_MIN: Final = 20


@dataclass(frozen=True)
class Trend:
    """The resources of a process after its warm-up."""

    seconds: float
    first_mib: float
    """The mean memory of the first fifth."""
    last_mib: float
    mib_per_minute: float
    """The slope of the line through all samples."""
    error: float
    """Twice the standard error of the slope, of samples that are as independent as a sample for each ten."""
    files: tuple[int, int]
    """The most open files in the first and in the last fifth."""
    threads: tuple[int, int]

    @property
    def faults(self) -> list[str]:
        """What grows."""
        grown_mib = self.last_mib - self.first_mib
        found = []
        if self.mib_per_minute - self.error > _MIB_PER_MINUTE_MAX and grown_mib > _NOISE_MIB:
            found.append(f"memory grows by {self.mib_per_minute:.2f} ± {self.error:.2f} MiB a minute")
        if self.files[1] > self.files[0] + _MORE_FILES_MAX:
            found.append(f"open files grow from {self.files[0]} to {self.files[1]}")
        if self.threads[1] > self.threads[0] + 1:
            found.append(f"threads grow from {self.threads[0]} to {self.threads[1]}")
        return found

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {self.first_mib:.1f} → {self.last_mib:.1f} MiB, "
            f"{self.mib_per_minute:+.2f} ± {self.error:.2f} MiB/min; files {self.files[0]} → {self.files[1]}; "
            f"threads {self.threads[0]} → {self.threads[1]}"
        )


def trend(samples: Sequence[Resources]) -> Trend | None:
    """Return the trend after the warm-up; None for too few samples.

    >>> steady = [Resources(float(second), 100 << 20, 20, 5) for second in range(300)]
    >>> print(trend(steady), trend(steady).faults)
    199 s: 100.0 → 100.0 MiB, +0.00 ± 0.00 MiB/min; files 20 → 20; threads 5 → 5 []
    >>> grown = [Resources(float(second), (100 << 20) + second * 50_000, 20 + second // 30, 5) for second in range(300)]
    >>> trend(grown).faults
    ['memory grows by 2.86 ± 0.00 MiB a minute', 'open files grow from 24 to 29']
    """
    if not samples:
        return None
    began_s, ended_s = samples[0].at_s, samples[-1].at_s
    warm_s = began_s + min(_WARM_UP_S, _WARM_UP * (ended_s - began_s))
    warm = [sample for sample in samples if sample.at_s >= warm_s]
    if len(warm) < _SAMPLES_MIN:
        return None
    minutes = np.array([sample.at_s for sample in warm]) / 60.0
    mib = np.array([sample.rss_bytes for sample in warm]) / _MIB
    minutes -= minutes.mean()
    slope = round(float(minutes @ mib / (minutes @ minutes)), 6) + 0.0  # Without the sign of -0.0.
    rest = mib - mib.mean() - slope * minutes
    error = 2.0 * float(np.sqrt(rest @ rest / max(len(warm) / 10 - 2, 1) / (minutes @ minutes)))
    fifth = len(warm) // 5
    first, last = warm[:fifth], warm[-fifth:]
    return Trend(
        seconds=warm[-1].at_s - warm[0].at_s,
        first_mib=float(mib[:fifth].mean()),
        last_mib=float(mib[-fifth:].mean()),
        mib_per_minute=slope,
        error=error,
        files=(max(each.files for each in first), max(each.files for each in last)),
        threads=(max(each.threads for each in first), max(each.threads for each in last)),
    )
