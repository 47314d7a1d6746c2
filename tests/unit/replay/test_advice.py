"""Recommended settings, expected speed-ups, and when not to speculate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.replay import advice
from paceline.replay.rounds import Record, RoundSplitter
from paceline.replay.run import Cell, Result
from paceline.replay.stats import ReplayStats


def stats(*seconds: float) -> ReplayStats:
    found = ReplayStats()
    found.grow(len(seconds))
    found.total_s[:] = seconds
    found.counts += 100
    return found


def result(drafter: str, policy: str, batch: int, cold: float, warm: float) -> Result:
    return Result(Cell(drafter, policy, batch), stats(10 / cold, 30 / warm), stats(10.0, 30.0))


def test_recommends_the_fastest_setting() -> None:
    results = [result("suffix", "static:3", 8, 1.25, 2.0), result("ngram", "static:3", 8, 1.1, 1.1),
               result("suffix", "auto", 8, 1.0, 1.2)]  # fmt: skip
    advised = advice.advise(results, 0.5)
    (row,) = advised["batches"]
    assert row["drafter"] == "suffix" and row["policy"] == "static:3" and row["speculate"]
    assert (row["cold"], row["warm"]) == (1.25, 2.0)
    speedup = 40 / (8 + 15)
    assert row["generation_speedup"] == pytest.approx(speedup)
    assert row["step_speedup"] == pytest.approx(1 / (0.5 / speedup + 0.5))
    assert advised["text"] == [
        "batch 8: suffix, k = 3. Generation 1.74x (cold epoch 1.25x, warm 2.00x), whole step 1.27x; "
        "acceptance length 2.00."
    ]
    assert advised["settings"] == {
        "speculation.method": "suffix", "speculation.policy": "static", "speculation.num_speculative_tokens": 3
    }  # fmt: skip


def test_auto_is_preferred_if_it_is_almost_as_fast() -> None:
    results = [result("suffix", "static:3", 8, 1.5, 1.5), result("suffix", "auto", 8, 1.49, 1.49)]
    assert advice.best_of(results).cell.policy == "auto"
    assert advice.advise(results, 0.65)["settings"] == {
        "speculation.method": "suffix", "speculation.policy": "auto"
    }  # fmt: skip


def test_when_not_to_speculate() -> None:
    results = [result("suffix", "static:1", 128, 0.8, 1.01), result("suffix", "auto", 128, 0.99, 1.0)]
    advised = advice.advise(results, 0.65)
    assert not advised["batches"][0]["speculate"] and advised["settings"] == {"speculation.method": "none"}
    assert advised["text"][0].startswith('batch 128: do not speculate. The best setting (suffix, policy "auto")')
    assert 'Policy "auto" stops drafting (1.00x)' in advised["text"][0]


def test_a_drafter_without_draft_times_is_marked() -> None:
    drafters, results = ("suffix", "ngram", "eagle3", "hybrid"), [result("ngram", "static:3", 8, 1.5, 1.5)]
    assert advice.without_draft_times(drafters, {"suffix": []}) == ["ngram", "eagle3", "hybrid"]
    assert advice.without_draft_times(drafters, {"suffix": [], "eagle3": []}) == ["ngram"]
    (line,) = advice.advise(results, 0.5, untimed=["ngram"])["text"]
    assert line.startswith("batch 8: ngram, k = 3 (draft time unknown). ")
    assert "unknown" not in advice.advise(results, 0.5)["text"][0]
    results.append(result("ngram", "static:1", 1, 1.25, 1.25))
    (line,) = advice.untimed_text(results, ["ngram"])
    assert line.startswith("ngram is not recommended: its draft time is unknown")
    assert line.endswith("gives 1.50x at batch 8, 1.25x at batch 1.")


def test_one_epoch_has_an_empty_history_at_the_start() -> None:
    one = Result(Cell("suffix", "static:3", 8), stats(5.0), stats(10.0))
    assert "Generation 2.00x (one epoch; the history was empty at the start), " in advice.advise([one], 1.0)["text"][0]


def test_small_sample_warning() -> None:
    def warning(num_steps: int, num: int, problems: str = "a", **changes: int) -> str | None:
        one, two = np.ones(1, np.int32), np.ones(2, np.int32)
        records = [Record(problems[s % len(problems)], one, two, step=s, **changes)
                   for s in range(num_steps) for _ in range(num)]  # fmt: skip
        return advice.small_sample_warning(list(RoundSplitter().split(records)))

    assert warning(2, 32) is None
    assert warning(1, 1) == (
        "Based on 1 completion of one policy version, each problem in one epoch only; "
        "record more for a reliable result."
    )
    assert warning(3, 21) == "Based on 63 completions; record more for a reliable result."
    assert warning(2, 64, "ab") == (
        "Based on 128 completions, each problem in one epoch only; record more for a reliable result."
    )
    assert warning(2, 64, version=7) == (
        "Based on 128 completions of one policy version; record more for a reliable result."
    )


def test_one_setting_for_all_batch_sizes() -> None:
    results = [result("suffix", "static:7", 1, 3.0, 3.0), result("suffix", "static:7", 128, 0.5, 0.5),
               result("suffix", "static:1", 1, 1.8, 1.8), result("suffix", "static:1", 128, 1.2, 1.2)]  # fmt: skip
    advised = advice.advise(results, 0.65)
    assert [row["policy"] for row in advised["batches"]] == ["static:7", "static:1"]
    assert advised["settings"]["speculation.num_speculative_tokens"] == 1


def test_generation_share_from_a_runs_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert advice.generation_share(path) is None
    stages = [{"generation": 3.0, "total": 5.0}, {"generation": 5.0, "total": 5.0}]
    lines = [json.dumps({"step": step, "stages": each}) for step, each in enumerate(stages)]
    path.write_text("\n".join(lines) + '\n{"step": 2, "sta')
    assert advice.generation_share(path) == 0.8, "a line that is cut off is left out"
    for invalid in ("{", "[1]", '{"step": 0, "stages": 3}', '{"step": 0, "stages": {"generation": "a"}}', ""):
        path.write_text(invalid + "\n")
        assert advice.generation_share(path) is None


def test_a_sample_has_all_rollouts_of_its_problems() -> None:
    records = [
        Record(problem, np.array([1], np.int32), np.arange(10, dtype=np.int32), step=step)
        for step in range(3)
        for problem in ("a", "a", "b", "b", "c", "c")
    ]
    rounds = list(RoundSplitter().split(records))
    found = advice.sample(rounds, 130)
    assert (found.num_problems, found.num_problems_recorded) == (2, 3)
    assert (found.num_tokens, found.num_tokens_recorded) == (120, 180)
    assert [r.problems for r in found.rounds] == [["a", "a", "b", "b"]] * 3
    assert advice.sample(rounds, None).num_problems == 3
    assert advice.sample(rounds, 1).num_problems == 1  # at least one
    assert [len(r) for r in advice.take_rounds(rounds, 130)[0]] == [6, 6] and not advice.take_rounds(rounds, 130)[1]
    assert advice.take_rounds(rounds, None)[1]
