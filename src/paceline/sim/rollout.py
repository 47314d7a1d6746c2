"""Generation time of a batch of requests.

With the `static` policy the schedule does not depend on the drafts (`schedule`), so its time is computed for all
segments at once. `das` and `auto` decide at every step. They run the engine's own policies (speculation/) in the replay
engine, with a drafter that has random acceptance (`simulated_drafter`) and the step model as cost table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.config_io import ConfigError
from paceline.replay.engine import Replay
from paceline.sim.schedule import Schedule, make_schedule
from paceline.sim.simulated_drafter import SimulatedDrafter, make_round
from paceline.sim.speculation import NO_SPECULATION, Speculation
from paceline.sim.step import DRAFTER_NAMES, StepModel
from paceline.sim.workload import Workload, sample_lengths
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.batch import Rows
from paceline.speculation.cost import CostTable
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import StepTrace

# A stream: batches that overlap (lag > 1).
MAX_STREAM_ENGINES = 8  # engines that are simulated in a stream; the others behave alike
MEASURED_SPAN = (0.2, 0.6)  # share of a stream's tokens at which step-by-step measuring starts and ends
STREAM_BATCHES = 3  # batches of a stream, in multiples of lag: warm-up, measured, drained
MAX_REQUESTS = 20_000_000


@dataclass(frozen=True, slots=True)
class Rollout:
    seconds: float  # from the start of the first request to the end of the last; in a stream: time per batch
    num_tokens: float  # emitted by all engines
    num_steps: float  # of the slowest engine
    mean_rows: float  # per step of the slowest engine
    acceptance: float  # mean emitted tokens per row and step

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps


def make_schedules(model: StepModel, workload: Workload, num_engines: int, lag: int) -> list[Schedule]:
    """One schedule per engine. It depends neither on speculation nor on step times."""
    if num_engines < 1:
        raise ConfigError(f"pipeline.gpus: too few for an engine of {model.engine.gpus}")
    streamed = lag > 1
    if streamed and STREAM_BATCHES * lag * workload.batch > MAX_REQUESTS:
        raise ConfigError(
            f"workload.batch = {workload.batch} with pipeline.lag = {lag}: {STREAM_BATCHES * lag} batches are "
            f"simulated, with at most {MAX_REQUESTS} requests; lower one of them"
        )
    lengths, prompts = sample_lengths(workload, STREAM_BATCHES * lag if streamed else 1)
    num = min(num_engines, workload.batch, MAX_STREAM_ENGINES if streamed else num_engines)
    schedules = (
        _engine_schedule(model, lengths[:, i::num_engines], prompts[:, i::num_engines], max(1, lag)) for i in range(num)
    )
    return [replace(schedule, prompts=workload.uncached_share * schedule.prompts) for schedule in schedules]


def rollout(
    model: StepModel, speculation: Speculation, workload: Workload, num_engines: int, lag: int = 0,
    schedules: list[Schedule] | None = None,
) -> Rollout:  # fmt: skip
    """One batch at a time (lag 0 and 1), or `lag` overlapping batches. `schedules`: the result of `make_schedules`, to
    compute it only once."""
    if speculation.policy != "static" and speculation.method != "none":
        return _rollout_by_steps(model, speculation, workload, num_engines, lag)
    schedules = schedules or make_schedules(model, workload, num_engines, lag)
    slowest = _slowest(model, speculation, schedules, lag if lag > 1 else 0)
    return replace(slowest, num_tokens=slowest.num_tokens * max(1.0, min(num_engines, workload.batch) / len(schedules)))


def _engine_schedule(model: StepModel, lengths: np.ndarray, prompts: np.ndarray, lag: int) -> Schedule:
    return make_schedule(list(lengths), list(prompts), model.engine.max_rows, model.kv_tokens, lag)


def _slowest(model: StepModel, speculation: Speculation, schedules: list[Schedule], num_warmup: int) -> Rollout:
    """The slowest engine's rollout. `num_warmup`: batches of a stream that are not measured, at its start and at its
    end; 0: measure the whole schedule."""
    slowest: Rollout | None = None
    num_tokens = sum(schedule.num_emitted / len(schedule.last) for schedule in schedules)
    joined = Schedule.joined(schedules)  # one evaluation for all engines
    times = zip(*(np.split(each, joined.last) for each in segment_times(joined, model, speculation)), strict=True)
    for schedule, (seconds_S, num_steps_S) in zip(schedules, times, strict=False):
        ends, steps, num_batches = np.cumsum(seconds_S), np.cumsum(num_steps_S), 1
        start_s = start_steps = 0.0
        last = -1
        if num_warmup:
            # Both ends of the measured span are ends of batches, with the same number of batches in progress.
            done = np.sort(schedule.last)
            first, last = int(done[num_warmup - 1]), int(done[-1 - num_warmup])
            num_batches = len(done) - 2 * num_warmup
            start_s, start_steps = float(ends[first]), float(steps[first])
        seconds = (float(ends[last]) - start_s) / num_batches
        num_steps = (float(steps[last]) - start_steps) / num_batches
        if slowest is None or seconds > slowest.seconds:
            row_steps = float((schedule.rows * num_steps_S).sum())
            per_row_step = schedule.num_emitted / row_steps
            slowest = Rollout(seconds, num_tokens, num_steps, row_steps / float(num_steps_S.sum()), per_row_step)
    assert slowest is not None
    return slowest


def segment_times(schedule: Schedule, model: StepModel, speculation: Speculation) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and number of steps of each segment: float64 [S]."""
    k = _static_k(schedule.rows, speculation)
    per_step = np.array([speculation.length(each) for each in range(int(k.max(initial=0)) + 1)])[k]  # tokens per row
    num_steps = schedule.tokens / per_step
    seconds = num_steps * model.step_s(schedule.rows, k, schedule.context, per_step) + model.prefill_s(schedule.prompts)
    return seconds, num_steps


def _static_k(rows: np.ndarray, speculation: Speculation) -> np.ndarray:
    """Draft length that the engine's static policy plans for each number of rows: int64 [S]."""
    if speculation.method == "none":
        return np.zeros(len(rows), np.int64)
    policy = StaticPolicy(speculation.k)
    sizes, index = np.unique(rows, return_inverse=True)
    planned = [int(policy.plan(Rows(np.zeros(size, np.int64), [], np.zeros(0), []))[0]) for size in sizes.tolist()]
    return np.array(planned, np.int64)[index]


# ---- step by step ----


def _rollout_by_steps(
    model: StepModel, speculation: Speculation, workload: Workload, num_engines: int, lag: int
) -> Rollout:
    """The engine that is slowest with a static policy, simulated with this policy. A stream is simulated with its mean
    number of rows, with and without speculation; the ratio scales the stream's time without speculation."""
    if lag > 1:
        steady = rollout(model, NO_SPECULATION, workload, num_engines, lag)
        lengths, prompts = (each[:, ::num_engines].ravel() for each in sample_lengths(workload, STREAM_BATCHES))
        max_rows = max(1, round(steady.mean_rows))
        speculative, baseline = (
            simulate_steps(model, each, workload, lengths, prompts, max_rows, True)
            for each in (speculation, NO_SPECULATION)
        )
        return replace(
            steady,
            seconds=steady.seconds * speculative.seconds / baseline.seconds,
            num_steps=steady.num_steps * speculative.num_steps / baseline.num_steps,
            acceptance=speculative.acceptance,
        )
    static = replace(speculation, policy="static")
    lengths, prompts = (each[0] for each in sample_lengths(workload))
    requests_E = [(lengths[i::num_engines], prompts[i::num_engines]) for i in range(min(num_engines, workload.batch))]
    seconds_E = [
        segment_times(_engine_schedule(model, n[None], p[None], 1), model, static)[0].sum() for n, p in requests_E
    ]
    slowest = simulate_steps(model, speculation, workload, *requests_E[int(np.argmax(seconds_E))])
    return replace(slowest, num_tokens=float(lengths.sum()))


def simulate_steps(
    model: StepModel, speculation: Speculation, workload: Workload, lengths: np.ndarray, prompts: np.ndarray,
    max_rows: int | None = None, streamed: bool = False,
) -> Rollout:  # fmt: skip
    """Simulate one engine step by step, from the start of the first request to the end of the last. Of a stream only
    MEASURED_SPAN is measured, in which requests always wait. The replay engine has no memory limit, so the number of
    rows is limited to what the KV cache holds on average."""
    num_fitting = max(1, int(model.kv_tokens / (prompts + lengths).mean()))
    max_num_seqs = min(max_rows or model.engine.max_rows, len(lengths), num_fitting)
    context = float((prompts + lengths / 2).mean())
    costs = model.cost_table(max_num_seqs, max(1, speculation.k), context)
    steps: list[tuple[float, int, int]] = []  # (end time, rows, emitted tokens)

    def on_step(trace: StepTrace) -> None:
        steps.append((trace.start_s + trace.total_s, trace.num_rows, trace.num_emitted))

    engine = Replay(
        _policy(speculation, costs), costs, SimulatedDrafter(speculation, workload.seed), max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 30, prefix_sharing=False, on_step=on_step,
    )  # fmt: skip
    engine.run_round(make_round(lengths, prompts, workload.max_tokens, workload.group))
    clock, rows, num_emitted = np.array(steps).T
    emitted = np.cumsum(num_emitted)
    # Add the host time per emitted token, which the cost table does not include.
    zero = np.zeros(1)
    clock += np.cumsum(model.host_s(rows, zero, num_emitted / rows) - model.host_s(rows, zero, zero))
    first, last = np.searchsorted(emitted, np.array(MEASURED_SPAN) * emitted[-1]) if streamed else (0, len(steps) - 1)
    start_s = clock[first] if streamed else 0.0
    seconds, num_steps = float(clock[last] - start_s), float(last - first + (not streamed))
    seconds += float(model.prefill_s(workload.uncached_share * prompts.sum())) * (
        MEASURED_SPAN[1] - MEASURED_SPAN[0] if streamed else 1.0
    )
    per_row_step = float(engine.stats.summary()["tokens_per_row_step"])
    mean_rows = float(emitted[-1]) / len(steps) / per_row_step
    return Rollout(seconds, float(emitted[-1]), num_steps, mean_rows, per_row_step)


def _policy(speculation: Speculation, costs: CostTable) -> SpeculationPolicy:
    if speculation.policy == "static":
        return StaticPolicy(speculation.k)
    if speculation.policy == "das":
        return DasPolicy(costs, speculation.k)
    if speculation.method == "free":
        return AutoPolicy(costs, speculation.k)
    model = DRAFTER_NAMES.get(speculation.method, speculation.method)
    return AutoPolicy(costs, speculation.k, speculation.method, model)
