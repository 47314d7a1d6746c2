"""A reward model: any Hugging Face sequence classifier with one or two labels.

The reward is the logit of the only label, or the difference of the two logits. The model is loaded at first use, from
safetensors only and without remote code. Calls from several threads run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paceline.chat.messages import Prompt, as_messages

BATCH_SIZE = 8


class RewardModel:
    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        with self._lock:
            return self._score(prompts, completions)

    def _score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        import torch

        tokenizer, model = self._loaded
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        max_length = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 1 << 20))
        rewards: list[float] = []
        for start in range(0, len(texts), BATCH_SIZE):
            inputs = tokenizer(
                texts[start : start + BATCH_SIZE], return_tensors="pt", padding=True, truncation=True,
                max_length=int(max_length),
            ).to(model.device)  # fmt: skip
            with torch.inference_mode():
                logits = model(**inputs).logits.double()  # [B, labels]
            rewards += (logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]).tolist()
        return rewards

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """Tokenizer and model."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                self.name, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward.model = {self.name!r} can't be loaded as a sequence classifier: {error}"
            ) from None
        if model.config.num_labels not in (1, 2):
            raise ValueError(
                f"reward.model = {self.name!r} has {model.config.num_labels} labels; a reward needs one or two"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.truncation_side = "left"  # the completion is at the end
        return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _text(tokenizer: Any, prompt: Prompt, completion: str) -> str:
    if isinstance(prompt, str):
        return prompt + completion
    messages = [*as_messages(prompt), {"role": "assistant", "content": completion}]
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(str(message["content"]) for message in messages)
