"""FLOPs of a policy update: the same number for every implementation, so that ratios of FLOP/s are ratios of times.

Each prompt counts once for all its completions, and each token once: an implementation that computes a prompt again, or
recomputes activations, needs more FLOPs than are counted. The LM head counts only where it predicts a token of a
completion. Embeddings, norms, activations, LoRA adapters and the optimizer are small and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.model.config import ModelConfig, num_matrix_weights


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts of equal lengths, `per_prompt` for each prompt."""

    num_sequences: int
    per_prompt: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_prompts(self) -> int:
        return self.num_sequences // self.per_prompt

    @property
    def num_completion_tokens(self) -> int:
        return self.num_sequences * self.completion_tokens

    @property
    def num_packed_tokens(self) -> int:
        """Tokens in forward passes. The last token of a completion predicts nothing."""
        return self.num_prompts * self.prompt_tokens + self.num_sequences * (self.completion_tokens - 1)

    @property
    def num_attended(self) -> int:
        """Pairs of a query and a key, with causal attention."""
        prompt, completion = self.prompt_tokens, self.completion_tokens - 1
        in_prompt = prompt * (prompt + 1) // 2
        in_completion = completion * prompt + completion * (completion + 1) // 2
        return self.num_prompts * in_prompt + self.num_sequences * in_completion

    def sequences_per_microbatch(self, max_tokens: int) -> int:
        """Without shared prompts."""
        return max(1, max_tokens // (self.prompt_tokens + self.completion_tokens))


def update_flops(model: ModelConfig, rollouts: Rollouts, lora: bool) -> int:
    """Forward and backward pass of all rollouts. A matrix needs 2 FLOPs per parameter and token for the forward pass, 2
    for the gradient of its input, and 2 for its own gradient, which LoRA does not compute."""
    per_parameter = 4 if lora else 6
    layers = model.num_layers * num_matrix_weights(model) * rollouts.num_packed_tokens
    lm_head = model.hidden_size * model.vocab_size * rollouts.num_completion_tokens
    # Per pair and head dimension: q·k and the sum over v in the forward pass (4), twice as much in the backward pass.
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * rollouts.num_attended
    return per_parameter * (layers + lm_head) + attention
