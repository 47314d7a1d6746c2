"""What a failure of a reward function costs: 0, the sample or the run, and no time of other samples."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import reward_functions
from scripted import Bytes, ScriptedEngine

from paceline.config import RewardSection, TaskSection
from paceline.rl.collect import Collector
from paceline.rl.collection import Collected
from paceline.tasks import checks
from paceline.tasks.pool import Pool
from paceline.tasks.rewards import LocalRewarder, Sample, Score
from paceline.tasks.task import Problem
from paceline.types import SamplingParams

SCRIPTED, LENGTH = "reward_functions:scripted", "reward_functions:length"


@pytest.fixture
def open_rewarder() -> Iterator[Any]:
    opened: list[LocalRewarder] = []

    def call(functions: list[str], task: TaskSection | None = None, **settings: Any) -> LocalRewarder:
        opened.append(LocalRewarder(RewardSection(functions=functions, **{"timeout_s": 20.0, **settings}), task))
        return opened[-1]

    yield call
    for rewarder in opened:
        rewarder.close()


def samples(*texts: str, **columns: Any) -> list[Sample]:
    return [Sample(f"sample {i}", "?", text, (1, 2), columns) for i, text in enumerate(texts)]


# ---- reward.on_failure ----

CAUSED_BY_THE_ANSWER = {
    "hang": "did not return within 1 s",
    "exit": "ended its process (exit code 3)",
    "crash": "killed its process (signal 11)",
    "memory": "raised MemoryError",
}


@pytest.mark.parametrize("call_per", ["group", "sample"])
@pytest.mark.parametrize("bad", CAUSED_BY_THE_ANSWER)
def test_an_answer_that_makes_a_function_fail_gets_0_from_it(open_rewarder: Any, bad: str, call_per: str) -> None:
    rewarder = open_rewarder([SCRIPTED, LENGTH], weights=[10.0, 1.0], timeout_s=1.0, call_per=call_per)
    good, failed, other = rewarder.score(samples("good", bad, "good"))
    assert good == other == Score(12.0, {SCRIPTED: 1.0, LENGTH: 2.0})
    assert (failed.reward, failed.parts) == (2.0, {SCRIPTED: 0.0, LENGTH: 2.0}), "other functions count as usual"
    assert (failed.failure or "").startswith(f"sample 1: reward {SCRIPTED} {CAUSED_BY_THE_ANSWER[bad]}")
    assert (failed.failure or "").endswith(": scored 0")


@pytest.mark.parametrize("bad", CAUSED_BY_THE_ANSWER)
def test_exclude(open_rewarder: Any, bad: str) -> None:
    rewarder = open_rewarder([SCRIPTED, LENGTH], timeout_s=1.0, on_failure="exclude")
    good, failed = rewarder.score(samples("good", bad))
    assert good.reward == 3.0 and math.isnan(failed.reward)
    assert CAUSED_BY_THE_ANSWER[bad] in (failed.failure or "") and "scored 0" not in (failed.failure or "")


@pytest.mark.parametrize("bad", CAUSED_BY_THE_ANSWER)
def test_stop(open_rewarder: Any, bad: str) -> None:
    rewarder = open_rewarder([SCRIPTED], timeout_s=1.0, on_failure="stop")
    assert [s.reward for s in rewarder.score(samples("good", "none", "good"))][::2] == [1.0, 1.0]
    with pytest.raises(ValueError, match=r'sample 1: reward .* reward\.on_failure = "stop" ends the run .* "exclude"'):
        rewarder.score(samples("good", bad))


@pytest.mark.parametrize("on_failure", ["zero", "stop"])
@pytest.mark.parametrize("bad", ["raise", "sys.exit", "nan", "text", "none"])
def test_other_failures_exclude_the_sample(open_rewarder: Any, bad: str, on_failure: str) -> None:
    good, failed = open_rewarder([SCRIPTED], on_failure=on_failure).score(samples("good", bad))
    assert good.reward == 1.0 and math.isnan(failed.reward) and failed.failure is not None


def test_a_library_that_raises_on_an_answer_gives_0_and_a_missing_column_excludes(open_rewarder: Any) -> None:
    task = TaskSection(kind="reasoning_gym", name="chain_sum")
    entry = {"question": "2 + 2 =", "metadata": {"source_dataset": "chain_sum"}}  # its scorer reads entry["answer"]
    (raised,) = open_rewarder(["gym"], task).score(samples("4", entry=entry))
    assert raised == Score(0.0, {"gym": 0.0}, "sample 0: reward gym raised KeyError: 'answer': scored 0")
    (missing,) = open_rewarder(["gym"], task).score(samples("4"))
    assert math.isnan(missing.reward) and "has no column 'entry'" in (missing.failure or "")


def test_code_whose_check_fails_excludes(open_rewarder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox limits the program, so the answer is not to blame for a check that crashes."""
    monkeypatch.setattr(checks, "code_check", reward_functions.crashing_check)
    (failed,) = open_rewarder(["code"]).score(samples("pass", tests=["assert True"]))
    assert math.isnan(failed.reward)
    assert failed.failure == "sample 0: reward code ended its process (exit code 3)"


def test_a_function_that_can_not_be_loaded_excludes(open_rewarder: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """It could be loaded at the start, but not by a later worker."""
    module = tmp_path / "vanishing.py"
    module.write_text("import os\ndef f(completions, **columns):\n    os._exit(1)\n")
    monkeypatch.chdir(tmp_path)
    rewarder = open_rewarder(["vanishing:f"], call_per="sample")
    module.write_text("raise RuntimeError('gone')\n")
    (first,) = rewarder.score(samples("a"))  # its worker ends, and the next one can't load the function
    assert math.isnan(first.reward) and "could not be loaded: RuntimeError: gone" in (first.failure or "")


def test_a_worker_that_was_killed_costs_nothing(open_rewarder: Any, tmp_path: Path) -> None:
    """The answer is not to blame for the end of one worker."""
    rewarder = open_rewarder(["reward_functions:dies_once"], call_per="sample")
    assert rewarder.score(samples("a", marker=str(tmp_path / "marker"))) == [
        Score(1.0, {"reward_functions:dies_once": 1.0})
    ]
    assert (tmp_path / "marker").exists()


# ---- scheduling ----


def collect(rewarder: Any, texts: Sequence[Sequence[str]]) -> Collected:
    """Groups whose samples are these texts. The last sample of the last group ends first."""
    remaining = [text for group in texts for text in group]
    collector = Collector(ScriptedEngine(lambda _: remaining.pop()), Bytes(), rewarder, sampling=SamplingParams())
    problems = [(i, Problem(f"p{i}", f"prompt {i}", {"answer": "x"})) for i in range(len(texts))]
    return collector.collect("step 1", problems, len(texts[0]), 0)


@pytest.mark.parametrize("call_per", ["group", "sample"])
def test_a_slow_sample_delays_no_other_group(open_rewarder: Any, call_per: str) -> None:
    rewarder = open_rewarder(["reward_functions:finished_at"], call_per=call_per)
    assert rewarder.by_sample == (call_per == "sample")
    texts = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "slow"]]  # the last group ends first
    rewards = [[r.reward for r in group.rollouts] for group in collect(rewarder, texts).groups]
    slow = rewards[3][1]
    assert all(reward < slow - 1 for group in rewards[:3] for reward in group), "scored meanwhile"
    if call_per == "sample":
        assert rewards[3][0] < slow - 1, "the other sample of its group too"
    else:
        assert rewards[3][0] == pytest.approx(slow, abs=0.5), "the function gets both"


def test_an_answer_on_which_a_verifier_hangs_delays_no_other_sample(open_rewarder: Any) -> None:
    """A regular expression that takes exponential time, until reward.timeout_s."""
    rewarder = open_rewarder(["format"], format_pattern="(a+)+!", timeout_s=3.0)
    ended: dict[str, float] = {}
    score = rewarder.score

    def timed(batch: Sequence[Sample]) -> list[Score]:
        scores = score(batch)
        ended.update({sample.completion: time.monotonic() for sample in batch})
        return scores

    rewarder.score = timed
    slow = "a" * 64 + "?"
    groups = collect(rewarder, [["a!", "b"], ["aa!", "c"], ["aaa!", slow]]).groups
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1, 0], [1, 0], [1, 0]]
    (failure,) = [r.failure for group in groups for r in group.rollouts if r.failure is not None]
    assert failure == "step 1, p2, sample 1: reward format did not return within 3 s: scored 0"
    assert len(ended) == 6 and all(end < ended[slow] - 1 for text, end in ended.items() if text != slow)


@pytest.mark.parametrize("call_per", ["group", "sample"])
def test_results_are_in_order_however_they_finish(open_rewarder: Any, call_per: str) -> None:
    rewarder = open_rewarder(["reward_functions:number_after_a_while"], call_per=call_per, workers=3)
    groups = collect(rewarder, [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]).groups
    assert [[r.reward for r in group.rollouts] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_calls_from_several_threads_share_the_workers() -> None:
    pool = Pool(2)
    calls = [({"completions": ["x"]},)] * 4
    try:
        with ThreadPoolExecutor(6) as threads:
            job = pool.map, checks.user_check, ("reward_functions:process",), calls, 20.0
            replies = [future.result() for future in [threads.submit(*job) for _ in range(6)]]
    finally:
        pool.close()
    processes = {process for reply in replies for (process,) in reply}
    assert [len(reply) for reply in replies] == [4] * 6 and 1 <= len(processes) <= 2


def test_an_interrupted_call_leaves_those_of_other_threads() -> None:
    """Ctrl-C ends only the calls of the thread that gets it, and repeats none."""
    pool = Pool(2)
    before: list[int] = []

    def interrupt() -> None:
        before.extend(worker.process.pid for worker in pool._workers)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    hang = {"prompts": [0], "completions": ["hang"], "completion_ids": [[]]}
    try:
        with ThreadPoolExecutor(1) as threads:
            slow = {"completions": ["slow"]}
            other = threads.submit(
                pool.map, checks.user_check, ("reward_functions:finished_at",), [(slow,)], timeout_s=20.0
            )
            threading.Timer(1.5, interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                pool.map(checks.user_check, (SCRIPTED,), [(hang,)], 60.0)
            ((ended_s,),) = other.result()
        assert ended_s > 0 and len(before) == 2
        assert [worker.process.pid in before for worker in pool._workers] == [True]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("functions", "call_per", "by_sample"),
    [
        (["exact", "format", "env"], "group", True),
        (["exact", SCRIPTED], "group", False),
        (["exact", SCRIPTED], "sample", True),
        (["exact", "model"], "sample", False),
    ],
)
def test_by_sample(open_rewarder: Any, functions: list[str], call_per: str, by_sample: bool) -> None:
    assert open_rewarder(functions, call_per=call_per, model="none").by_sample == by_sample


@pytest.mark.parametrize("call_per", ["group", "sample"])
def test_how_many_samples_a_function_gets(open_rewarder: Any, call_per: str) -> None:
    rewarder = open_rewarder(["reward_functions:relative"], call_per=call_per)
    (group,) = collect(rewarder, [["a", "bb"]]).groups
    assert [r.reward for r in group.rollouts] == ([0, 0.5] if call_per == "group" else [0, 0])
