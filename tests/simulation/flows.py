"""The simulated flows are small, and each uses a part of the engine that has state.

Inputs are equal under every seed, so one undisturbed run of each flow is enough for all seeds.
"""

from __future__ import annotations

from collections.abc import Callable

from simulation.flows_on_parameter_servers import asynchronous_server, bulk_synchronous_server, stale_synchronous_server
from simulation.flows_that_learn import asynchronous_learner, online_learner
from simulation.flows_with_loops import (
    bounded_loop_of_many,
    bounded_loop_with_replay,
    feedback_in_a_topic,
    floats_in_order,
    per_round_operators,
    stale_loop_with_an_idle_subtask,
    unbounded_asynchronous_loop,
    unbounded_synchronous_loop,
)
from simulation.flows_without_loops import (
    another_parallelism,
    calls_of_a_service,
    joined_at_the_end,
    keyed_state_and_timers,
    mini_batches,
    running_totals,
    side_outputs_and_dead_letters,
    wanted_inputs,
)

from streamiter import Flow
from streamiter.testing import Simulation

MakeFlow = Callable[[Simulation], Flow]

FLOWS: tuple[MakeFlow, ...] = (
    keyed_state_and_timers,
    running_totals,
    another_parallelism,
    calls_of_a_service,
    mini_batches,
    side_outputs_and_dead_letters,
    wanted_inputs,
    joined_at_the_end,
    unbounded_synchronous_loop,
    floats_in_order,
    unbounded_asynchronous_loop,
    stale_loop_with_an_idle_subtask,
    feedback_in_a_topic,
    bounded_loop_of_many,
    bounded_loop_with_replay,
    per_round_operators,
    online_learner,
    asynchronous_learner,
    bulk_synchronous_server,
    stale_synchronous_server,
    asynchronous_server,
)

SETTLE_S = {"keyed_state_and_timers": 5.0, "another_parallelism": 5.0}
"""The seconds for which a flow waits for its timers, by flow."""
