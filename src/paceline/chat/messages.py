"""The types of a conversation, in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]  # {"role": …, "content": …}
Prompt = str | list[Message]
Tool = dict[str, Any]  # {"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}


def as_messages(prompt: Prompt, system: str | None = None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *messages] if system else messages


def is_unicode(value: Any) -> bool:
    """False for a lone surrogate, which JSON allows and tokenizers reject."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_preview(prompt: Prompt) -> str:
    """A prompt for display: the string, or the content of the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
