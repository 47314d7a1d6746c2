"""Small engines over table targets: every rule with every drafter, for levels 1 and 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.config import ModelConfig
from paceline.model.draft_head import Head
from paceline.model.dspark import DSparkConfig, init_dspark
from paceline.model.eagle3 import Eagle3Config, init_head
from paceline.model.layer import Linear
from paceline.model.sample import Sampler
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.batch import Drafter
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Request, SamplingParams
from paceline.verify.chi_square import Sample
from paceline.verify.drafters import AdversarialDrafter
from paceline.verify.table import Table, TableDecoder

SIZE = 8  # hidden size of a head
RULES = ("coupled", "rejection", "block")
POLICIES = {"coupled": ("static", "das", "auto"), "rejection": ("static", "das"), "block": ("static", "das")}  # by rule
DRAFTERS = ("adversarial", "ngram", "suffix", "draft_model", "eagle3", "dspark", "hybrid")
MODELS = {"draft_model": "draft_model", "eagle3": "eagle3", "dspark": "dspark", "hybrid": "eagle3"}  # by drafter
SAMPLING_DRAFTERS = tuple(MODELS)  # under `coupled` the enumeration branches at their draws too


def make_policy(name: str, k: int, drafter: str) -> SpeculationPolicy:
    """A policy with an invented, frozen cost table, under which some drafts pay and some do not. Measured times would
    make the policy's choices random."""
    if name == "static":
        return StaticPolicy(k)
    points = [Point(rows, rows + extra, 9 * rows + extra, 1 + 0.02 * extra) for rows in (1, 64) for extra in (0, 1, 64)]
    costs = CostTable("case", points, frozen=True)
    return DasPolicy(costs, k) if name == "das" else AutoPolicy(costs, k, drafter, MODELS.get(drafter))


class TableCase:
    """A target table, a draft table that resembles it, and engines over them. The last token of the vocabulary ends a
    sequence."""

    def __init__(self, vocab_size: int, num_speculative_tokens: int, seed: int = 1) -> None:
        self.vocab_size, self.k = vocab_size, num_speculative_tokens
        self.target, self.draft = Table(vocab_size, seed), Table(vocab_size, seed + 1)

    def decoder(self, num_blocks: int = 64) -> TableDecoder:
        return TableDecoder(self.target, num_blocks, eos_token_ids=(self.vocab_size - 1,))

    def engine(
        self,
        rule: str,
        drafter: str | None,
        sampler: Sampler,
        max_num_seqs: int = 32,
        policy: str = "static",
        tokenizer: Any = None,
    ) -> LocalEngine:
        num_blocks = 2 * max_num_seqs + 2
        return LocalEngine(
            self.decoder(num_blocks),
            sampler=sampler,
            drafter=self._drafter(drafter, rule, sampler, num_blocks) if drafter else None,
            policy=make_policy(policy, self.k, drafter or "none"),
            rule=rule,
            max_num_seqs=max_num_seqs,
            tokenizer=tokenizer,
        )

    def _drafter(self, name: str, rule: str, sampler: Sampler, num_blocks: int) -> Drafter:
        if name == "adversarial":
            return AdversarialDrafter(self.vocab_size)
        if name == "ngram":
            return NgramDrafter(1, 2)
        if name == "suffix":
            return SuffixDrafter()
        coupled = rule == "coupled"
        if name == "draft_model":
            return DraftModelDrafter(TableDecoder(self.draft, num_blocks), sampler, coupled)
        if name == "dspark":
            return self._dspark(sampler, num_blocks, coupled)
        eagle3 = self._eagle3(sampler, num_blocks, coupled)
        return eagle3 if name == "eagle3" else HybridDrafter(SuffixDrafter(), eagle3, head_cost=0.1)

    def _eagle3(self, sampler: Sampler, num_blocks: int, coupled: bool) -> Eagle3Drafter:
        config = Eagle3Config(self._layer(1), self.vocab_size - 1, layer_ids=(1,), target_hidden_size=self.vocab_size)
        head = init_head(config, self._draft_ids(), seed=5, dtype=torch.float64)
        return Eagle3Drafter(*self._randomized(head), sampler, num_blocks, coupled)

    def _dspark(self, sampler: Sampler, num_blocks: int, coupled: bool) -> DSparkDrafter:
        config = DSparkConfig(self._layer(2), self.vocab_size - 1, (1,), self.vocab_size, markov_rank=3)
        head = init_dspark(config, self._draft_ids(), seed=5, dtype=torch.float64)
        return DSparkDrafter(*self._randomized(head), sampler, num_blocks, coupled)

    def _layer(self, num_layers: int) -> ModelConfig:
        return ModelConfig("llama", self.vocab_size, SIZE, SIZE, num_layers, 2, 1, 4, 1e-6, 10_000.0, 512)

    def _draft_ids(self) -> Tensor:
        """A head's vocabulary lacks the first token."""
        return torch.arange(1, self.vocab_size)

    def _randomized(self, head: Head) -> tuple[Head, Linear]:
        """A random head and embedding. Its auxiliary hidden states are the table's logits."""
        head.requires_grad_(False)
        embed = Linear(SIZE, self.vocab_size).double().requires_grad_(False)
        noise = torch.Generator().manual_seed(6)
        for linear in (embed, *(module for module in head.modules() if isinstance(module, Linear))):
            assert linear.weight is not None
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=noise))
        return head, embed

    def sample(self, engine: LocalEngine, sampling: SamplingParams, num: int, first_key: int) -> Sample:
        """`num` independent completions of one prompt, with noise keys first_key, first_key + 1, …"""
        requests = [Request(i, (0, 1, 0), sampling, first_key + i, "case") for i in range(num)]
        return [tuple(c.token_ids.tolist()) for c in engine.generate(requests)]
