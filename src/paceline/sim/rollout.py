"""What a batch of requests takes on an engine: from finish to finish under a static policy, step by step under others.

Under `static` the schedule is known beforehand (`schedule`), and its time is one evaluation over whole arrays. `das`
and `auto` are the engine's own code (speculation/), which decides step by step: they play in replay's engine, whose
drafts stand by lot (`lottery`) and whose clock is the step model as a cost table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.config import ConfigError
from paceline.replay.engine import Replay
from paceline.sim.lottery import LotteryDrafter, round_of
from paceline.sim.schedule import Schedule, schedule
from paceline.sim.speculation import PLAIN, Speculation
from paceline.sim.step import StepModel
from paceline.sim.workload import Workload, lengths_of
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.batch import Rows
from paceline.speculation.cost import CostTable
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import StepTrace

MOST_STREAMED = 8  # engines that are looked at where batches overlap: all are alike
MIDDLE = (0.2, 0.6)  # of a stream's tokens: what is looked at, where it goes step by step
MOST_REQUESTS = 20_000_000
SETTLING = 3  # batches of a stream, in lags: one to settle, those that are measured, one that drains


@dataclass(frozen=True, slots=True)
class Rollout:
    seconds: float  # from the first request's begin to the last one's end; of a stream: between two batches' ends
    num_tokens: float  # emitted, by all engines
    num_steps: float  # of the engine that takes longest
    mean_rows: float  # in a step of that engine
    acceptance: float  # tokens that a step brings a row, on average over steps

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps


def plans_of(model: StepModel, workload: Workload, num_engines: int, lag: int) -> list[Schedule]:
    """Every engine's schedule. It knows nothing of speculation, nor of what anything takes."""
    if num_engines < 1:
        raise ConfigError(f"pipeline.gpus: too few for an engine of {model.engine.gpus}")
    streamed = lag > 1
    if streamed and SETTLING * lag * workload.batch > MOST_REQUESTS:
        raise ConfigError(
            f"workload.batch = {workload.batch} with pipeline.lag = {lag}: {SETTLING * lag} batches are simulated, and "
            f"at most {MOST_REQUESTS} requests; lower one of them"
        )
    lengths, prompts = lengths_of(workload, SETTLING * lag if streamed else 1)
    most = min(num_engines, workload.batch, MOST_STREAMED if streamed else num_engines)
    each = (_plan(model, lengths[:, i::num_engines], prompts[:, i::num_engines], max(1, lag)) for i in range(most))
    return [replace(plan, prompts=workload.fresh_share * plan.prompts) for plan in each]


def rollout(
    model: StepModel, speculation: Speculation, workload: Workload, num_engines: int, lag: int = 0,
    plans: list[Schedule] | None = None,
) -> Rollout:  # fmt: skip
    """One batch after the other (lag 0 and 1), or `lag` of them under way at a time. `plans`: as `plans_of` makes them,
    where they are at hand."""
    if speculation.policy != "static" and speculation.method != "none":
        return _stepped(model, speculation, workload, num_engines, lag)
    plans = plans or plans_of(model, workload, num_engines, lag)
    found = _slowest(model, speculation, plans, lag if lag > 1 else 0)
    return replace(found, num_tokens=found.num_tokens * max(1.0, min(num_engines, workload.batch) / len(plans)))


def _plan(model: StepModel, lengths: np.ndarray, prompts: np.ndarray, lag: int) -> Schedule:
    return schedule(list(lengths), list(prompts), model.engine.max_rows, model.kv_tokens, lag)


def _slowest(model: StepModel, speculation: Speculation, plans: list[Schedule], measured_from: int) -> Rollout:
    """`measured_from`: the batch whose end a stream is measured from; 0: the whole schedule."""
    found: Rollout | None = None
    num_tokens = sum(plan.num_emitted / len(plan.last) for plan in plans)
    together = Schedule.joined(plans)  # one evaluation for all
    times = zip(*(np.split(each, together.last) for each in seconds_of(together, model, speculation)), strict=True)
    for plan, (seconds, num_steps) in zip(plans, times, strict=False):
        ends, steps, parts = np.cumsum(seconds), np.cumsum(num_steps), 1
        first = 0.0, 0.0
        at = -1
        if measured_from:
            # Up to the last batch at whose end another begins: as much is under way at both ends of what is measured.
            done = np.sort(plan.last)
            begin, at = int(done[measured_from - 1]), int(done[-1 - measured_from])
            parts, first = len(done) - 2 * measured_from, (float(ends[begin]), float(steps[begin]))
        taken, made = (float(ends[at]) - first[0]) / parts, (float(steps[at]) - first[1]) / parts
        if found is None or taken > found.seconds:
            row_steps = float((plan.rows * num_steps).sum())
            per_row = plan.num_emitted / row_steps
            found = Rollout(taken, num_tokens, made, row_steps / float(num_steps.sum()), per_row)
    assert found is not None
    return found


def seconds_of(plan: Schedule, model: StepModel, speculation: Speculation) -> tuple[np.ndarray, np.ndarray]:
    """What each segment takes, and how many steps are made in it: float64 [S]."""
    k = _static_k(plan.rows, speculation)
    brings = np.array([speculation.length(each) for each in range(int(k.max(initial=0)) + 1)])[k]
    num_steps = plan.tokens / brings
    seconds = num_steps * model.step_s(plan.rows, k, plan.context, brings) + model.prefill_s(plan.prompts)
    return seconds, num_steps


def _static_k(rows: np.ndarray, speculation: Speculation) -> np.ndarray:
    """What the engine's own static policy plans for so many rows: int64 [S]."""
    if speculation.method == "none":
        return np.zeros(len(rows), np.int64)
    policy = StaticPolicy(speculation.k)
    sizes, place = np.unique(rows, return_inverse=True)
    planned = [int(policy.plan(Rows(np.zeros(size, np.int64), [], np.zeros(0), []))[0]) for size in sizes.tolist()]
    return np.array(planned, np.int64)[place]


# ---- step by step ----


def _stepped(model: StepModel, speculation: Speculation, workload: Workload, num_engines: int, lag: int) -> Rollout:
    """The engine that takes longest under a static policy, under this one. Where batches overlap, as many rows run side
    by side as without speculation on average; both are played, and the ratio of their times is taken."""
    if lag > 1:
        steady = rollout(model, PLAIN, workload, num_engines, lag)
        lengths, prompts = (each[:, ::num_engines].ravel() for each in lengths_of(workload, SETTLING))
        most = max(1, round(steady.mean_rows))
        mine, twin = (play(model, each, workload, lengths, prompts, most, True) for each in (speculation, PLAIN))
        return replace(
            steady,
            seconds=steady.seconds * mine.seconds / twin.seconds,
            num_steps=steady.num_steps * mine.num_steps / twin.num_steps,
            acceptance=mine.acceptance,
        )
    static = replace(speculation, policy="static")
    lengths, prompts = (each[0] for each in lengths_of(workload))
    mine_E = [(lengths[i::num_engines], prompts[i::num_engines]) for i in range(min(num_engines, workload.batch))]
    taken = [seconds_of(_plan(model, n[None], p[None], 1), model, static)[0].sum() for n, p in mine_E]
    return replace(play(model, speculation, workload, *mine_E[int(np.argmax(taken))]), num_tokens=float(lengths.sum()))


def play(
    model: StepModel, speculation: Speculation, workload: Workload, lengths: np.ndarray, prompts: np.ndarray,
    max_rows: int | None = None, streamed: bool = False,
) -> Rollout:  # fmt: skip
    """One engine, step by step, from the first request's begin to the last one's end; of a stream only the middle, in
    which there are always more to come. Replay's memory is never short, so as many rows run as it holds on average."""
    held = max(1, int(model.kv_tokens / (prompts + lengths).mean()))
    most = min(max_rows or model.engine.max_rows, len(lengths), held)
    context = float((prompts + lengths / 2).mean())
    costs = model.cost_table(most, max(1, speculation.k), context)
    steps: list[tuple[float, int, int]] = []  # (when it ends, rows, tokens)

    def watch(trace: StepTrace) -> None:
        steps.append((trace.start_s + trace.total_s, trace.num_rows, trace.num_emitted))

    engine = Replay(
        _policy(speculation, costs), costs, LotteryDrafter(speculation, workload.seed), max_num_seqs=most,
        max_num_batched_tokens=1 << 30, prefix_sharing=False, watch=watch,
    )  # fmt: skip
    engine.play(round_of(lengths, prompts, workload.max_tokens, workload.group))
    clock, rows, num_emitted = np.array(steps).T
    emitted = np.cumsum(num_emitted)
    # What the host does for every emitted token, which the table does not have.
    none = np.zeros(1)
    clock += np.cumsum(model.host_s(rows, none, num_emitted / rows) - model.host_s(rows, none, none))
    first, last = np.searchsorted(emitted, np.array(MIDDLE) * emitted[-1]) if streamed else (0, len(steps) - 1)
    begin = clock[first] if streamed else 0.0
    seconds, num_steps = float(clock[last] - begin), float(last - first + (not streamed))
    seconds += float(model.prefill_s(workload.fresh_share * prompts.sum())) * (
        MIDDLE[1] - MIDDLE[0] if streamed else 1.0
    )
    per_row = float(engine.tally.figures()["tokens_per_row_step"])
    mean_rows = float(emitted[-1]) / len(steps) / per_row
    return Rollout(seconds, float(emitted[-1]), num_steps, mean_rows, per_row)


def _policy(speculation: Speculation, costs: CostTable) -> SpeculationPolicy:
    if speculation.policy == "static":
        return StaticPolicy(speculation.k)
    if speculation.policy == "das":
        return DasPolicy(costs, speculation.k)
    return AutoPolicy(costs, speculation.k, "suffix" if speculation.method == "free" else speculation.method)
