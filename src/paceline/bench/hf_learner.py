"""A policy update of transformers, as a baseline for our learner: sdpa attention, torch's AdamW, optionally compiled.

All sequences have one length, so a microbatch needs no padding. Prompts are not shared. The loss is computed in chunks
of positions, forward and backward, so the logits of a microbatch never exist as a whole. This file uses nothing of our
learner but its settings and its batch. Shapes: S sequences of L tokens, P positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.config import LearnerSection
from paceline.model.decoder import Decoder
from paceline.model.weights import LM_HEAD, hf_state
from paceline.rl.batch import TokenBatch
from paceline.types import Rollout

CHUNK = 4096  # positions per chunk of logits
# transformers' sdpa under another name, for which it makes no mask: sdpa is then causal by itself and can use flash
# attention. With the name "sdpa", a compiled model makes a mask (before torch 2.14).
CAUSAL_SDPA = "causal_sdpa"


class HFLearner:
    """Trains a copy of `decoder`, in microbatches of `size` sequences. `masters`: "float32" gives 16-bit weights
    float32 masters and moments, "none" does not."""

    def __init__(
        self,
        decoder: Decoder,
        section: LearnerSection,
        rollouts: Sequence[Rollout],
        batch: TokenBatch,
        size: int,
        masters: str,
        compiled: bool,
    ) -> None:
        self.section, self.size, self.model = section, size, make_model(decoder)
        self.num_prompt_tokens = len(rollouts[0].prompt_ids)
        tokens_SL = np.stack([np.concatenate([r.prompt_ids, r.token_ids]) for r in rollouts]).astype(np.int64)
        self.tokens_SL = torch.from_numpy(tokens_SL).to(decoder.device)
        assert batch.weights_T is not None and batch.advantages_T is not None
        coefficient_T = (batch.weights_T * batch.advantages_T).float().to(decoder.device)
        self.coefficient_SC = coefficient_T.view(len(rollouts), -1)
        if section.activation_checkpointing:
            for layer in self.model.base_model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self.body: Any = self.model.base_model
        self.loss: Any = chunk_loss
        if compiled:  # one compilation per shape: kernels for any shape are slower
            self.body, self.loss = (torch.compile(part, dynamic=False) for part in (self.body, self.loss))
        self.parameters = list(self.model.parameters())
        self.leaves = [_master(p) for p in self.parameters] if masters == "float32" else self.parameters
        self.optimizer = torch.optim.AdamW(
            self.leaves,
            lr=section.learning_rate,
            betas=(section.betas[0], section.betas[1]),
            eps=section.eps,
            weight_decay=section.weight_decay,
            fused=True,
        )

    def update(self) -> tuple[Tensor, float]:
        """Returns the logprobs before the update, and the norm of its gradient."""
        parts = zip(self.tokens_SL.split(self.size), self.coefficient_SC.split(self.size), strict=True)
        logprobs_T = torch.cat([self._backward(tokens, coefficient) for tokens, coefficient in parts])
        norm = nn.utils.clip_grad_norm_(self.leaves, self.section.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, leaf in zip(self.parameters, self.leaves, strict=True):
                if leaf is not parameter:
                    parameter.copy_(leaf)
        return logprobs_T.cpu(), float(norm)

    def _backward(self, tokens_SL: Tensor, coefficient_SC: Tensor) -> Tensor:
        """Accumulate the gradients of a microbatch. Returns the logprobs of the completions."""
        first = self.num_prompt_tokens
        hidden_SLD = self.body(input_ids=tokens_SL, use_cache=False).last_hidden_state
        hidden_PD = hidden_SLD[:, first - 1 : -1].flatten(0, 1)  # the state before a token predicts it
        target_P, coefficient_P = tokens_SL[:, first:].flatten(), coefficient_SC.flatten()
        weight_VD = self.model.get_output_embeddings().weight
        grads, logprobs = [], []
        for part, target, coefficient in zip(
            hidden_PD.split(CHUNK), target_P.split(CHUNK), coefficient_P.split(CHUNK), strict=True
        ):
            chunk = part.detach().requires_grad_()
            loss, logprob = self.loss(chunk, weight_VD, target, coefficient)
            loss.backward()
            assert chunk.grad is not None
            grads.append(chunk.grad)
            logprobs.append(logprob)
        hidden_PD.backward(torch.cat(grads))
        return torch.cat(logprobs)


def chunk_loss(hidden: Tensor, weight: Tensor, target: Tensor, coefficient: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of GRPO on tokens of the current policy, where no ratio is clipped; and the logprobs."""
    logits = F.linear(hidden, weight).float()
    logprobs = logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(1)
    ratio = (logprobs - logprobs.detach()).exp()
    return -(coefficient * ratio).sum(), logprobs.detach()


def make_model(decoder: Decoder) -> Any:
    """The same model in transformers, with a copy of the weights."""
    hf = decoder.config.to_hf()
    config = AutoConfig.for_model(hf.pop("model_type"), **hf)
    AttentionInterface.register(CAUSAL_SDPA, sdpa_attention_forward)
    with torch.device(decoder.device):
        model = AutoModelForCausalLM.from_config(config, dtype=decoder.dtype, attn_implementation=CAUSAL_SDPA)
    missing, unexpected = model.load_state_dict(dict(hf_state(decoder)), strict=False)
    assert not unexpected and set(missing) <= {LM_HEAD}, (missing, unexpected)
    return model.eval().requires_grad_(True)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy that accumulates the gradients of a 16-bit parameter; or the parameter, if it has more bits."""
    if parameter.dtype.itemsize >= 4:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def accumulate(half: Tensor) -> None:
        assert half.grad is not None
        master.grad = half.grad.float() if master.grad is None else master.grad.add_(half.grad)
        half.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
    return master
