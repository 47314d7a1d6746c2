"""The confidence of a draw: from its margin if the noise is the target's, otherwise its probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.model.confidence import confidence
from paceline.model.sample import Draws, Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.types import SamplingParams

NONE = np.zeros(3, np.int32)


def test_it_grows_with_the_margin_and_with_the_probability() -> None:
    some = np.full(3, -2.0)
    by_margin = confidence(Draws(NONE, some, some, np.array([0.0, 1.0, 50.0])))
    assert 0.2 < by_margin[0] < by_margin[1] < by_margin[2] and by_margin[2] > 1 - 1e-9
    by_probability = confidence(Draws(NONE, some, np.array([-9.0, -2.0, 0.0]), np.ones(3)))
    assert 0.2 < by_probability[0] < by_probability[1] < by_probability[2] < 0.8


def test_without_margins_it_is_the_probability() -> None:
    """The rejection rules may not use the noise, so they do not request margins."""
    found = confidence(Draws(NONE, np.log([0.1, 0.5, 1.0]), np.log([0.2, 0.3, 0.9])))
    assert found.tolist() == pytest.approx([0.1, 0.5, 1.0])


def test_it_is_calibrated_for_a_drafter_with_errors_in_its_logits() -> None:
    """The target's logits are the drafter's plus small errors. Drafts with a high confidence are accepted, the others
    about as often as their confidence. The probability separates accepted from rejected drafts less well."""
    noise = torch.Generator().manual_seed(0)
    draft_logits = 3 * torch.randn(4000, 200, dtype=torch.float64, generator=noise)
    target_logits = draft_logits + 0.8 * torch.randn(draft_logits.shape, dtype=torch.float64, generator=noise)
    keys, at = np.arange(4000).astype(np.uint64), np.arange(4000)
    params = SamplingArrays.of([SamplingParams()] * 4000)
    drafts = Sampler().draw(draft_logits, keys, at, params, margins=True)
    accepted = drafts.tokens == Sampler().draw(target_logits, keys, at, params).tokens
    found = confidence(drafts)
    order = found.argsort()
    tenths = [(found[part].mean(), accepted[part].mean()) for part in np.array_split(order, 10)]
    assert max(abs(a - b) for a, b in tenths) < 0.2 and tenths[-1][1] > 0.9 and tenths[0][1] < 0.5
    by_probability = [accepted[part].mean() for part in np.array_split(drafts.logprobs.argsort(), 10)]
    assert tenths[-1][1] - tenths[0][1] > 1.3 * (by_probability[-1] - by_probability[0])
