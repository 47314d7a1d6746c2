"""Advice in plain words: the right setting, what to expect, and when to leave it off."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.replay import advice
from paceline.replay.rounds import Record, Rounds
from paceline.replay.run import Cell, Result
from paceline.replay.tally import Tally


def tally(*seconds: float) -> Tally:
    made = Tally()
    made.grow(len(seconds))
    made.total_s[:] = seconds
    made.counts += 100
    return made


def result(drafter: str, policy: str, batch: int, cold: float, warm: float) -> Result:
    return Result(Cell(drafter, policy, batch), tally(10 / cold, 30 / warm), tally(10.0, 30.0))


def test_the_fastest_is_advised_and_what_it_brings() -> None:
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
        "batch 8: suffix, k = 3. Generation 1.74x (cold epoch 1.25x, warm 2.00x), a whole step 1.27x; "
        "2.00 tokens per draft."
    ]
    assert advised["settings"] == {
        "speculation.method": "suffix", "speculation.policy": "static", "speculation.num_speculative_tokens": 3
    }  # fmt: skip


def test_auto_is_preferred_where_it_is_about_as_good() -> None:
    results = [result("suffix", "static:3", 8, 1.5, 1.5), result("suffix", "auto", 8, 1.49, 1.49)]
    assert advice.best_of(results).cell.policy == "auto"
    assert advice.advise(results, 0.65)["settings"] == {
        "speculation.method": "suffix", "speculation.policy": "auto"
    }  # fmt: skip


def test_when_not_to_speculate() -> None:
    results = [result("suffix", "static:1", 128, 0.8, 1.01), result("suffix", "auto", 128, 0.99, 1.0)]
    advised = advice.advise(results, 0.65)
    assert not advised["batches"][0]["speculate"] and advised["settings"] == {"speculation.method": "none"}
    assert advised["text"][0].startswith('batch 128: leave it off here. The best of all (suffix, policy "auto")')
    assert 'Policy "auto" stops by itself (1.00x)' in advised["text"][0]


def test_little_is_called_little() -> None:
    def of(num_steps: int, num: int, problems: str = "a", **changes: int) -> str | None:
        one, two = np.ones(1, np.int32), np.ones(2, np.int32)
        records = [Record(problems[s % len(problems)], one, two, step=s, **changes)
                   for s in range(num_steps) for _ in range(num)]  # fmt: skip
        return advice.caution(list(Rounds().of(records)))

    assert of(2, 32) is None
    assert of(1, 1) == (
        "Based on 1 completion of one version of the policy, where no problem comes back; "
        "record more before trusting it."
    )
    assert of(3, 21) == "Based on 63 completions; record more before trusting it."
    assert of(2, 64, "ab") == "Based on 128 completions, where no problem comes back; record more before trusting it."
    assert of(2, 64, version=7) == (
        "Based on 128 completions of one version of the policy; record more before trusting it."
    )


def test_one_setting_for_all_batch_sizes() -> None:
    results = [result("suffix", "static:7", 1, 3.0, 3.0), result("suffix", "static:7", 128, 0.5, 0.5),
               result("suffix", "static:1", 1, 1.8, 1.8), result("suffix", "static:1", 128, 1.2, 1.2)]  # fmt: skip
    advised = advice.advise(results, 0.65)
    assert [row["policy"] for row in advised["batches"]] == ["static:7", "static:1"]
    assert advised["settings"]["speculation.num_speculative_tokens"] == 1


def test_generations_share_is_read_from_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert advice.generation_share(path) is None
    lines = [{"stages": {"generation": 3.0, "total": 5.0}}, {"stages": {"generation": 5.0, "total": 5.0}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert advice.generation_share(path) == 0.8
    for odd in ("{", "[1]", '{"stages": 3}', '{"stages": {"generation": "a"}}', ""):
        path.write_text(odd + "\n")
        assert advice.generation_share(path) is None


def test_a_sample_keeps_whole_problems_in_all_epochs() -> None:
    records = [
        Record(problem, np.array([1], np.int32), np.arange(10, dtype=np.int32), step=step)
        for step in range(3)
        for problem in ("a", "a", "b", "b", "c", "c")
    ]
    rounds = list(Rounds().of(records))
    some = advice.sample(rounds, 130)
    assert (some.num_problems, some.num_problems_recorded, some.num_tokens, some.num_tokens_recorded) == (
        2,
        3,
        120,
        180,
    )
    assert [r.problems for r in some.rounds] == [["a", "a", "b", "b"]] * 3
    assert advice.sample(rounds, None).num_problems == 3
    assert advice.sample(rounds, 1).num_problems == 1  # one at least
    assert [len(r) for r in advice.bounded(rounds, 130)[0]] == [6, 6] and not advice.bounded(rounds, 130)[1]
    assert advice.bounded(rounds, None)[1]
