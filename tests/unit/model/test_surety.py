"""How sure a draw is: by its lead, where the noise is the target's, and else by nothing but its likelihood."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.model.sample import Draws, Sampler, SamplingArrays
from paceline.model.surety import surety
from paceline.types import SamplingParams

NONE = np.zeros(3, np.int32)


def test_it_grows_with_the_lead_and_with_the_likelihood() -> None:
    some = np.full(3, -2.0)
    by_lead = surety(Draws(NONE, some, some, np.array([0.0, 1.0, 50.0])))
    assert 0.2 < by_lead[0] < by_lead[1] < by_lead[2] and by_lead[2] > 1 - 1e-9
    by_likelihood = surety(Draws(NONE, some, np.array([-9.0, -2.0, 0.0]), np.ones(3)))
    assert 0.2 < by_likelihood[0] < by_likelihood[1] < by_likelihood[2] < 0.8


def test_without_leads_it_is_the_likelihood() -> None:
    """Rules that may not look at the noise do not ask for leads."""
    said = surety(Draws(NONE, np.log([0.1, 0.5, 1.0]), np.log([0.2, 0.3, 0.9])))
    assert said.tolist() == pytest.approx([0.1, 0.5, 1.0])


def test_it_means_what_it_says_of_a_drafter_that_errs_in_logits() -> None:
    """The target's logits are the drafter's, each off by a little: what it is sure of stands, and the rest does about
    as often as it says. The likelihood does not tell one from the other as well."""
    dice = torch.Generator().manual_seed(0)
    mine = 3 * torch.randn(4000, 200, dtype=torch.float64, generator=dice)
    theirs = mine + 0.8 * torch.randn(mine.shape, dtype=torch.float64, generator=dice)
    keys, at = np.arange(4000).astype(np.uint64), np.arange(4000)
    params = SamplingArrays.of([SamplingParams()] * 4000)
    drawn = Sampler().draw(mine, keys, at, params, leads=True)
    stood = drawn.tokens == Sampler().draw(theirs, keys, at, params).tokens
    said = surety(drawn)
    order = said.argsort()
    tenths = [(said[part].mean(), stood[part].mean()) for part in np.array_split(order, 10)]
    assert max(abs(a - b) for a, b in tenths) < 0.2 and tenths[-1][1] > 0.9 and tenths[0][1] < 0.5
    by_likelihood = [stood[part].mean() for part in np.array_split(drawn.logprobs.argsort(), 10)]
    assert tenths[-1][1] - tenths[0][1] > 1.3 * (by_likelihood[-1] - by_likelihood[0])
