"""A reward model: any Hugging Face sequence classifier with one label, or two (its reward is then the logits' margin).

Loaded at first use. Weights come from safetensors alone and no code of the model's own is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.tasks.task import Prompt, as_messages

BATCH = 8


class RewardModel:
    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: tuple[Any, Any] | None = None

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        import torch

        tokenizer, model = self._load()
        texts = [self._text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        rewards: list[float] = []
        for start in range(0, len(texts), BATCH):
            inputs = tokenizer(
                texts[start : start + BATCH], return_tensors="pt", padding=True, truncation=True,
                max_length=self._max_length(tokenizer, model),
            ).to(model.device)  # fmt: skip
            with torch.inference_mode():
                logits = model(**inputs).logits.double()  # [B, labels]
            rewards += (logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]).tolist()
        return rewards

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
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
            tokenizer.truncation_side = "left"  # what is judged is at the end
            model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
            self._loaded = tokenizer, model
        return self._loaded

    @staticmethod
    def _text(tokenizer: Any, prompt: Prompt, completion: str) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        messages = [*as_messages(prompt), {"role": "assistant", "content": completion}]
        if tokenizer.chat_template:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(message["content"]) for message in messages)

    @staticmethod
    def _max_length(tokenizer: Any, model: Any) -> int:
        return int(min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 1 << 20)))
