"""Undisturbed, with snapshots, restored: the runs of one check, and what is compared of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.models.update import ModelSnapshot
from streamiter.testing.restore.child import restored_run
from streamiter.testing.restore.diagnosis import (
    RestoreMismatch,
    lost_attributes,
    state_difference,
    stream_difference,
)
from streamiter.testing.restore.driver import RunOptions
from streamiter.testing.restore.driving import Cut, Run, run_freely, run_in_steps
from streamiter.testing.restore.process import RestoreProcess
from streamiter.testing.restore.references import describe
from streamiter.testing.restore.trial import Build, BuiltFlow, SourceKey

__all__ = ["Comparison"]

_FREE_CUTS: Final = 8
"""Each of them runs the flow twice."""
_SHOWN: Final = 3
"""Attributes in a message."""


@dataclass(frozen=True)
class Comparison:
    """One check of one flow."""

    what: str
    """What errors call it."""
    build: Build
    options: RunOptions
    cuts: int | None
    structs: Sequence[type[msgspec.Struct]]
    process: RestoreProcess | None
    """None: restore in this process."""
    free: bool = False
    """Whether cuts are turns of the event loop, not records."""
    ordered: bool = True
    compare_state: bool = True

    def run(self) -> None:
        """Raise RestoreMismatch where a restored run differs from the one that went on."""
        if self.process is not None:
            self._described()  # What cannot be imported there is told before anything runs.
        undisturbed = self._undisturbed()
        if self.free:
            for turns in self._chosen(range(1, undisturbed.turns), self.cuts or _FREE_CUTS):
                cut_off = asyncio.run(run_freely(self._built(), self.options, cut_after=turns))
                self._check_violations(cut_off)
                for cut in cut_off.cuts:
                    self._check_cut(cut, cut_off, undisturbed)
            return
        interrupted = asyncio.run(run_in_steps(self._built(), self.options, plan=undisturbed.plan, cuts=True))
        self._check_violations(interrupted)
        self._check_unharmed(undisturbed, interrupted)
        undisturbed.last_state = interrupted.last_state
        for cut in self._chosen(interrupted.cuts, self.cuts):
            self._check_cut(cut, interrupted, undisturbed)

    # -- runs ----------------------------------------------------------------------------------------------

    def _built(self) -> BuiltFlow:
        return BuiltFlow(self.build, self.structs, gated=not self.free)

    def _undisturbed(self) -> Run:
        run = run_freely if self.free else run_in_steps
        return asyncio.run(run(self._built(), self.options))

    def restored(self, cut: Cut, plan: list[SourceKey] | None) -> Run:
        """Go on from a cut, by the rest of the plan: elsewhere, or here."""
        options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
        if self.process is None:
            return restored_run(self.build, self.structs, options, cut.snapshot, plan)
        answer = self.process.ask(
            [ModelSnapshot, *self.structs],
            [describe(struct, "structs") for struct in (ModelSnapshot, *self.structs)],
            {
                "build": self._described(),
                "seed": options.seed,
                "interval_s": options.interval_s,
                "start_ms": options.start_ms,
                "snapshot": cut.snapshot,
                "plan": plan,
            },
        )
        if "error" in answer:
            raise self._mismatch(cut, f"the restored run failed: {answer['error']}", answer["trace"])
        return Run(**answer)

    def _described(self) -> tuple[Any, ...]:
        return describe(self.build, self.what)

    def _chosen(self, cuts: Sequence[Any], count: int | None) -> list[Any]:
        if count is None or count >= len(cuts):
            return list(cuts)
        places = random.Random(self.options.seed).sample(range(len(cuts)), count)  # noqa: S311 (no secret)
        return [cuts[place] for place in sorted(places)]

    # -- what is compared ------------------------------------------------------------------------------------

    def _check_violations(self, run: Run) -> None:
        if run.violations:
            raise RestoreMismatch(f"{self.what}: {run.violations[0]}")

    def _check_unharmed(self, undisturbed: Run, interrupted: Run) -> None:
        difference = self._difference(undisturbed, interrupted)
        if difference is None:
            return
        again = self._difference(undisturbed, self._undisturbed())
        if again is not None:
            raise RestoreMismatch(
                f"{self.what}: two runs from the beginning differ: {again}; take time from context.clock, randomness "
                "from a seed in the state, and keep nothing in modules or classes"
            )
        raise RestoreMismatch(
            f"{self.what}: with snapshots it gives other results than without: {difference}; snapshot() must "
            "only look"
        )

    def _check_cut(self, cut: Cut, before: Run, undisturbed: Run) -> None:
        plan = None if self.free else undisturbed.plan[cut.after :]
        restored = self.restored(cut, plan)
        if restored.violations:
            raise self._mismatch(cut, restored.violations[0])
        difference = self._full_difference(undisturbed, _joined(before, cut, restored))
        if difference is not None:
            raise self._mismatch(cut, difference, *self._reasons(cut, before, undisturbed, plan))

    def _full_difference(self, expected: Run, given: Run) -> str | None:
        """In what came out, then in the states at the end."""
        if difference := self._difference(expected, given):
            return difference
        if not self.compare_state:
            return None
        if self.free:
            return _final_difference(expected, given, self._plain)
        return state_difference(expected.last_state, given.last_state, self._plain)

    def _difference(self, expected: Run, given: Run) -> str | None:
        return stream_difference(
            expected.outputs, given.outputs, self._plain, ordered=self.ordered
        ) or stream_difference(expected.results, given.results, self._plain)

    @property
    def _plain(self) -> PlainData:
        return PlainData([ModelSnapshot, *self.structs])

    # -- what is told ----------------------------------------------------------------------------------------

    def _mismatch(self, cut: Cut, difference: str, *reasons: str) -> RestoreMismatch:
        where = "in a fresh process" if self.process is not None else "in the same process"
        return RestoreMismatch(
            "\n".join([f"{self.what}, cut {cut.place}, restored {where}: {difference}", *reasons])
        )

    def _reasons(self, cut: Cut, before: Run, undisturbed: Run, plan: list[SourceKey] | None) -> list[str]:
        """Why it may be: attributes that were lost, or what only a fresh process shows."""
        reasons: list[str] = []
        if plan is not None:
            reasons += self._lost(cut, undisturbed)
        if self.process is not None:
            options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
            here = restored_run(self.build, self.structs, options, cut.snapshot, plan)
            if self._full_difference(undisturbed, _joined(before, cut, here)) is None:
                reasons.append(
                    "Restored in this process it is equal: something depends on the process, such as the order of a "
                    "set, hash(), id(), or what a module or class keeps; sort sets, and keep state in the operator."
                )
        if not reasons:
            reasons.append(
                "All that the operators keep is as it was: look for time that is not from context.clock (monotonic_s "
                "begins anew in each process), and for randomness without a seed in the state."
            )
        return reasons

    def _lost(self, cut: Cut, undisturbed: Run) -> list[str]:
        at_cut = asyncio.run(run_in_steps(self._built(), self.options, plan=undisturbed.plan, only=cut.after))
        options = RunOptions(self.options.seed, self.options.interval_s, cut.now_ms)
        after = asyncio.run(run_in_steps(self._built(), options, snapshot=cut.snapshot, plan=[], only=0))
        lost = lost_attributes(at_cut.attributes, after.attributes)
        if not lost:
            return []
        return [*lost[:_SHOWN], "Give what results depend on in snapshot(), and take it over in restore()."]


def _joined(before: Run, cut: Cut, restored: Run) -> Run:
    """What came out until the cut, then what came after it was restored."""
    outputs = {
        name: [*before.outputs[name][: cut.came_out[name]], *records]
        for name, records in restored.outputs.items()
    }
    return replace(restored, outputs=outputs)


def _final_difference(undisturbed: Run, restored: Run, plain_data: PlainData) -> str | None:
    for who, state in undisturbed.final_states.items():
        # What had ended before the cut is not begun again; it is in the snapshot.
        if who in restored.final_states and restored.final_states[who] != state:
            return f"final state of {who}: {state_difference(state, restored.final_states[who], plain_data)}"
    return None
