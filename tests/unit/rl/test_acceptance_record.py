"""A head whose acceptance is far below its provenance file raises an alarm. A head with the recorded acceptance, or one
that drafts for another task, raises none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import make, write_head, write_model, write_task

from paceline.bench.prompts import read_prompts
from paceline.build.config import load_config
from paceline.build.drafter import recorded_acceptance
from paceline.build.engine import build_engine
from paceline.chat.template import encode
from paceline.model.head_files import resolve_head
from paceline.model.paged import PagedDecoder
from paceline.model.provenance import Provenance, read_provenance
from paceline.rl.alarms import MIN_DRAFTS, RECORD, Alarms, FirstPositions
from paceline.types import Completion, Request, SamplingParams
from paceline.types import Provenance as Origin

S, A, C, B = (int(origin) for origin in (Origin.SAMPLED, Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS))


def completion(origins: list[int], sources: list[int], drafters: tuple[str, ...] = ("eagle3",)) -> Completion:
    num, zeros = len(origins), np.zeros(len(origins))
    return Completion(
        Request(0, (1,)), np.zeros(num, np.int32), zeros, zeros, np.zeros(num, np.int32), np.array(origins, np.uint8),
        np.array(sources, np.uint8), drafters, "length",
    )  # fmt: skip


def test_first_positions_are_counted() -> None:
    # Drafts: (A A C), (C), (A B), (A A A B), and (A), which the end of the completion cuts.
    origins = [S, A, A, C, C, A, B, A, A, A, B, A]
    once = completion(origins, [255, 0, 0, 0, 0, 0, 255, 0, 0, 0, 255, 0])
    assert FirstPositions.of([once, once]) == FirstPositions(10, 8)
    # Only the head's own drafts count.
    mixed = completion([S, C, C, A, B], [255, 0, 0, 1, 255], ("suffix", "eagle3"))
    assert FirstPositions.of([mixed, completion([S, A, C], [255, 0, 0], ("suffix",))]) == FirstPositions(1, 1)


def test_the_recorded_rate_is_that_of_the_worst_data_at_the_temperature() -> None:
    def entry(temperature: float, length: float) -> dict[str, float]:
        return {"temperature": temperature, "k": 2, "coupled": length}

    record = {"a": entry(1.0, 1.75), "b": entry(1.0, 2.0), "c": entry(0.0, 2.44), "d": {"mean_acceptance_length": 2}}
    provenance = Provenance("x", None, "y", 0, 0, 0, acceptance=record)
    assert provenance.first_position_rate(1.0, "coupled") == pytest.approx(0.5)  # 0.5 + 0.25
    assert provenance.first_position_rate(0.0, "coupled") == pytest.approx(0.8)  # 0.8 + 0.64
    assert provenance.first_position_rate(0.5, "coupled") == pytest.approx(0.65)
    assert provenance.first_position_rate(1.2, "coupled") is None, "outside of the measured temperatures"
    assert provenance.first_position_rate(1.0, "sampled") is None


def test_the_shipped_head_has_a_record() -> None:
    provenance = read_provenance(resolve_head(None, "smollm2-135m"))
    assert provenance is not None
    found = {
        kind: [provenance.first_position_rate(t, kind) for t in (1.0, 0.6, 0.0)]
        for kind in ("coupled", "greedy", "sampled")
    }
    assert all(0.2 < rate < 0.9 for rates in found.values() for rate in rates if rate is not None)
    assert found["coupled"][0] == pytest.approx(0.52, abs=0.02)  # general prompts at T=1
    config = load_config(None, ["speculation.method=eagle3"])
    assert recorded_acceptance(config, 1.0) == found["coupled"][0]
    for other in ("speculation.method=suffix", "speculation.any_target=true"):
        assert recorded_acceptance(load_config(None, ["speculation.method=eagle3", other]), 1.0) is None


def test_the_alarm_is_reported_once_and_its_state_can_be_restored() -> None:
    config = load_config(None, ["speculation.method=eagle3"])
    alarms = Alarms(config, recorded=0.5)
    counts = [(400, 180), (400, 145), (40, 0), (400, 80), (400, 40), (400, 160), (400, 130)]
    found = [alarms.check_record(FirstPositions(*each)) for each in counts]
    assert [flags[RECORD] for flags, _ in found] == [False, False, False, True, True, False, True]
    assert [len(messages) for _, messages in found] == [0, 0, 0, 1, 0, 0, 1]
    message = found[3][1][0]
    assert "20%" in message and "50%" in message and "draft.alarm_record = 0.7" in message
    assert "paceline verify" in message and 'draft.online = "every"' in message and "train-draft" in message
    again = Alarms(config, recorded=0.5)
    again.load_state_dict(alarms.state_dict())
    assert again.check_record(FirstPositions(400, 80)) == ({RECORD: True}, [])
    assert Alarms(config).check_record(FirstPositions(400, 0)) == ({RECORD: False}, []), "no recorded rate"


def test_few_drafts_below_the_record_may_be_chance() -> None:
    assert FirstPositions(60, 20).shortfall_message(0.5, 0.7, 1.0) is None
    assert FirstPositions(600, 200).shortfall_message(0.5, 0.7, 1.0) is not None
    assert FirstPositions(60000, 24000).shortfall_message(0.5, 0.7, 1.0) is None, "above alarm_record: no alarm"


@pytest.mark.parametrize(("recorded", "alarm"), [(3.5, True), (1.1, False)])
def test_a_run_raises_the_alarm(tmp_path: Path, recorded: float, alarm: bool) -> None:
    write_model(tmp_path / "model")
    write_task(tmp_path / "task.jsonl")
    settings = write_head(tmp_path)
    path = tmp_path / "head" / "provenance.json"
    record = {"held-out": {"temperature": 1.0, "k": 3, "coupled": recorded}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"acceptance": record}))
    trainer = make(tmp_path, "run", *settings, "train.num_steps=1", "train.groups_per_step=6")
    trainer.run()
    trainer.close()
    (metrics,) = trainer.callback.metrics
    assert metrics["num_drafts"] > MIN_DRAFTS
    assert metrics["acceptance_record_alarm"] is alarm
    assert any("provenance.json records" in note for note in trainer.callback.notes) == alarm


@pytest.mark.slow
def test_shifted_hidden_states_raise_the_alarm_on_real_weights(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliberately broken: the head reads the previous token's hidden states. Acceptance changes, tokens do not."""

    def generate() -> tuple[FirstPositions, list[list[int]]]:
        engine = build_engine(
            load_config(
                None,
                [
                    f"model.name={str(smollm2)!r}",
                    "speculation.method=eagle3",
                    "speculation.head=smollm2-135m",
                    "speculation.policy=static",
                ],
            )
        )
        sampling = SamplingParams(max_tokens=32, ignore_eos=True)
        prompts = [tuple(encode(engine.tokenizer, text)) for text in read_prompts()[:12]]
        found = engine.generate([Request(i, p, sampling, i, str(i)) for i, p in enumerate(prompts)])
        return FirstPositions.of(found), [c.token_ids.tolist() for c in found]

    recorded = recorded_acceptance(load_config(None, ["speculation.method=eagle3"]), 1.0)
    assert recorded is not None
    alarms = Alarms(load_config(None, ["speculation.method=eagle3"]), recorded)
    healthy, tokens = generate()
    assert alarms.check_record(healthy) == ({RECORD: False}, [])
    aux_hidden_states = PagedDecoder.aux_hidden_states

    def shifted(self: PagedDecoder, spans: Any) -> torch.Tensor:
        return torch.cat([aux_hidden_states(self, [(table, max(0, at - 1), max(0, at - 1) + 1)])
                          for table, start, end in spans for at in range(start, end)])  # fmt: skip

    monkeypatch.setattr(PagedDecoder, "aux_hidden_states", shifted)
    broken, same = generate()
    assert same == tokens
    assert alarms.check_record(broken)[0] == {RECORD: True}, (healthy, broken, recorded)
