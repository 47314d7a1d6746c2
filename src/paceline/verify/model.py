"""The model that is checked: its engines, its requests, and the completions that several checks use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.build.drafter import build_drafter, build_head, pack_head, recorded_acceptance
from paceline.build.engine import build_runner
from paceline.build.model import build_decoder, build_sampler
from paceline.config import ARCHITECTURES, HEAD_METHODS, Config
from paceline.engine.engine import LocalEngine
from paceline.model import lora
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import hf_state, load
from paceline.rl.alarms import FirstPositions
from paceline.types import Completion, Request, SamplingParams, noise_key
from paceline.verify.cases import SAMPLING_DRAFTERS, make_policy
from paceline.verify.identity import rounding_error
from paceline.verify.known import Case
from paceline.verify.result import Progress
from paceline.verify.ties import ReferenceScorer

HISTORY = ("suffix", "hybrid")  # drafters that draft from finished requests
ALWAYS_DRAFT = ("draft_model", *ARCHITECTURES)  # drafters that need no match in a history


@dataclass(frozen=True, slots=True)
class Size:
    """How much each check runs."""

    num_prompts: int
    max_tokens: int
    num_scored: int  # prompts and tokens of the weight update, logprob parity and the policies other than static
    max_scored_tokens: int
    cases: Sequence[Case]  # of level 1
    num_samplings: int  # of known.SAMPLINGS
    num_table_samples: int
    num_model_samples: int


class CheckedModel:
    def __init__(self, config: Config, prompts: Sequence[Sequence[int]], drafters: Sequence[str], size: Size) -> None:
        self.config, self.drafters, self.size = config, tuple(drafters), size
        self.progress: Progress = lambda detail, share: None  # of the check that runs
        self.directory: Path = resolve(config.model.name)
        self.tokenizer = load_tokenizer(self.directory, config.model.chat_template)
        self.decoder = build_decoder(config, self.directory, with_adapters=True)
        self._randomize_adapters()
        self.sampler = build_sampler(self.decoder)
        context = self.decoder.config.max_positions
        self.prompts = [prompt for prompt in prompts[: size.num_prompts] if len(prompt) + size.max_tokens <= context]
        if not self.prompts:
            raise ValueError(
                f"every prompt plus {size.max_tokens} tokens is longer than this model's context of {context}; give "
                "shorter prompts with --prompts"
            )
        longest = max(map(len, self.prompts)) + size.max_tokens
        self.blocks_per_sequence = -(-longest // BLOCK) + 1
        lengths = config.speculation.num_speculative_tokens
        self.k = lengths if isinstance(lengths, int) else max(lengths.values())
        if not self.k:
            raise ValueError(
                "speculation.num_speculative_tokens = 0: nothing would be drafted, so nothing would be checked"
            )
        self._coupled: dict[str | None, list[Completion]] = {}
        self.coupled_with_history: dict[str, list[Completion]] = {}  # the same requests again, by history drafters
        self._scorer: ReferenceScorer | None = None
        self._rounding: float | None = None
        self._head: DraftHead | None = None

    @property
    def always_drafting(self) -> bool:
        """Whether some drafter drafts in every check, even for short prompts without repetitions."""
        return any(drafter in ALWAYS_DRAFT for drafter in self.drafters)

    @property
    def sampling_drafters(self) -> list[str]:
        return [drafter for drafter in SAMPLING_DRAFTERS if drafter in self.drafters]

    @property
    def learner_rounds_differently(self) -> bool:
        """Whether the engine's logits differ from the learner's by rounding: not with the CPU kernels, and in float64
        too little to matter."""
        return self.is_16_bit or (self.decoder.device.type == "cuda" and self.decoder.dtype != torch.float64)

    @property
    def is_16_bit(self) -> bool:
        return self.decoder.dtype.itemsize == 2

    def engine(
        self,
        drafter: str | None = None,
        rule: str = "coupled",
        max_num_seqs: int = 16,
        num_blocks: int | None = None,
        policy: str = "static",
        max_num_batched_tokens: int = 256,
    ) -> LocalEngine:
        config = self._config(drafter or "none", rule, max_num_seqs)
        paged = PagedDecoder(self.decoder, num_blocks or self.blocks_per_sequence * max_num_seqs)
        return LocalEngine(
            paged,
            sampler=self.sampler,
            runner=build_runner(config, paged, self.sampler),
            drafter=build_drafter(config, self.decoder, self.tokenizer, self._load_head(drafter)),
            policy=make_policy(policy, self.k, drafter or "none"),
            rule=rule,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tokenizer=self.tokenizer,
        )

    def _config(self, method: str, rule: str = "coupled", max_num_seqs: int = 16) -> Config:
        speculation = {"method": method, "rule": rule}
        if method == "draft_model" and self.config.speculation.draft_model is None:
            speculation["draft_model"] = f"layers:{max(1, self.decoder.config.num_layers // 6)}"
        kv_tokens = 4 * self.blocks_per_sequence * max_num_seqs * BLOCK
        engine = {"kv_tokens": kv_tokens, "max_num_seqs": max_num_seqs}
        return self.config.changed(speculation=speculation, engine=engine)

    def _load_head(self, drafter: str | None) -> DraftHead | None:
        """The head, loaded once; None for drafters without one."""
        if drafter not in HEAD_METHODS:
            return None
        if self._head is None:
            self._head = pack_head(build_head(self.config, self.decoder.config), self.decoder)
        return self._head

    def requests(self, sampling: SamplingParams) -> list[Request]:
        sampling = replace(sampling, max_tokens=self.size.max_tokens)
        return [
            Request(i, tuple(prompt), sampling, noise_key("verify", i), f"prompt {i}")
            for i, prompt in enumerate(self.prompts)
        ]

    def scored_requests(self, sampling: SamplingParams) -> list[Request]:
        """Fewer and shorter requests."""
        sampling = replace(sampling, max_tokens=self.size.max_scored_tokens)
        return [replace(r, sampling=sampling) for r in self.requests(sampling)[: self.size.num_scored]]

    def coupled(self, drafter: str | None) -> list[Completion]:
        """Completions of all prompts at T=1, generated once per drafter; None is the reference of levels 3 and 5."""
        if drafter not in self._coupled:
            engine, requests = self.engine(drafter), self.requests(SamplingParams())
            self._coupled[drafter] = engine.generate(requests)
            if drafter in HISTORY:
                self.coupled_with_history[drafter] = engine.generate(requests)
        return self._coupled[drafter]

    def learner(self, dtype: torch.dtype) -> Decoder:
        """The model as a learner has it: plain torch, without packed matrices."""
        learner = load(self.directory, dtype, self.decoder.device, self.config.model.yarn_factor)
        if (section := self.config.learner).lora_rank:
            lora.attach(learner, section.lora_rank, section.lora_alpha, section.lora_targets)
            lora.assign_adapters(learner, lora.adapter_state(self.decoder))
        return learner.requires_grad_(False)

    def merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In float32, for a model that is not ours; nothing without adapters."""
        if self.config.learner.lora_rank:
            yield from hf_state(self.learner(torch.float32))

    def _randomize_adapters(self) -> None:
        """Those of a new run are zero, which would check nothing. An adapter's term is about a tenth of the output."""
        noise = torch.Generator().manual_seed(0)

        def random(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if "lora_A" in name:
                return tensor
            scale = 0.1 / self.config.learner.lora_alpha
            return (scale * torch.randn(tensor.shape, generator=noise)).to(tensor)

        state = [(name, random(name, tensor)) for name, tensor in lora.adapter_state(self.decoder)]
        if state:
            lora.assign_adapters(self.decoder, state)

    def rounding(self) -> float | None:
        """The mean rounding error of a logprob in 16 bits, measured once; None in higher precision."""
        if self.is_16_bit and self._rounding is None:
            some = self.coupled(None)[: self.size.num_scored]
            self._rounding = rounding_error(self.learner(self.decoder.dtype), some)
        return self._rounding

    def tie_scorer(self) -> ReferenceScorer | None:
        """None if there can be no near-ties."""
        if self.learner_rounds_differently and self._scorer is None:
            paged = PagedDecoder(self.decoder, self.blocks_per_sequence)
            self._scorer = ReferenceScorer(self.learner(torch.float32), paged, self.coupled(None))
        return self._scorer

    def own_tie_scorer(self) -> ReferenceScorer | None:
        """For comparisons of the engine with itself. None if all tokens must be equal."""
        return None if self.decoder.ops.is_batch_invariant else self.tie_scorer()

    @property
    def has_gpu_invariance(self) -> bool:
        return self.decoder.ops.is_cuda and self.decoder.ops.is_batch_invariant

    def alarms(self) -> list[str]:
        """Whether far fewer of the head's tokens are accepted than its provenance file records, if level 3 ran it."""
        for architecture in ARCHITECTURES:
            found, config = self._coupled.get(architecture), self._config(architecture)
            recorded = recorded_acceptance(config, 1.0) if found is not None else None
            if found is not None and recorded is not None:
                message = FirstPositions.of(found).shortfall_message(recorded, config.draft.alarm_record, 1.0)
                return [message] if message is not None else []
        return []
