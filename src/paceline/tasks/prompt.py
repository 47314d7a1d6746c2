"""Prompts on their way to token ids.

Always: what the policy wrote is never tokenised again. A conversation that goes on is the ids so far, the policy's own
as it sampled them, and `continuation`, the ids of what comes between its turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeGuard

from paceline.config import TaskSection
from paceline.tasks.task import Message, Prompt, as_messages

NEEDED = "a non-empty string or a list of messages with `role` and `content`, both strings"
MARK = "paceline-assistant-turn"  # stands for what the assistant said; no template has a reason to change it


def is_prompt(value: Any) -> TypeGuard[Prompt]:
    """Whether this can be asked: see NEEDED."""
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)
    )


def is_unicode(value: Any) -> bool:
    """JSON can hold half a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def identity(prompt: Prompt) -> str:
    """Equal exactly where the same question is asked, be it as a string or as messages."""
    return json.dumps(as_messages(prompt), sort_keys=True, default=str)


def dress(prompt: Prompt, section: TaskSection) -> Prompt:
    """A task's raw prompt with `task.template` around it (strings only) and `task.system` before it, unless it brings
    a system message of its own."""
    if "{prompt}" not in section.template:
        raise ValueError(f'task.template = {section.template!r}: must hold "{{prompt}}", where the prompt is to go')
    if isinstance(prompt, str):
        prompt = section.template.replace("{prompt}", prompt)
    if not section.system:
        return prompt
    if not section.chat:
        raise ValueError(
            f"task.system = {section.system!r}: needs the chat template, but task.chat = false; write it into "
            "task.template"
        )
    if not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt):
        return prompt
    return as_messages(prompt, section.system)


def encode(tokenizer: Any, prompt: Prompt, chat: bool = True) -> tuple[int, ...]:
    """Token ids; through the model's chat template where it has one and `chat` is on, ready for the first answer."""
    if not is_unicode(prompt):
        raise ValueError(f"prompt {ascii(shown(prompt))[:60]}: not valid Unicode text")
    if chat and tokenizer.chat_template:
        return _ids(tokenizer, render_chat(tokenizer, as_messages(prompt), reply=True))
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    why = "this model has no chat template" if chat else "the chat template is turned off"
    raise ValueError(f"a prompt is a list of messages, but {why}; give a string")


def continuation(
    tokenizer: Any, observation: Sequence[Message], chat: bool, completion_ids: Sequence[int]
) -> tuple[int, ...]:
    """What to append to a turn that ended in `completion_ids` so that the next turn can begin: the closing tokens that
    the turn lacks, the observation in the template's form, and the generation prompt. Then

        encode([*prompt, said, *observation]) == encode(prompt) + completion_ids + continuation

    where the template keeps earlier turns as they were said and their text tokenises the way it was sampled. Without a
    chat template: the observation's bare text."""
    if not is_unicode(list(observation)):
        raise ValueError(f"observation {ascii(shown(list(observation)))[:60]}: not valid Unicode text")
    if not (chat and tokenizer.chat_template):
        return _ids(tokenizer, "".join(message["content"] for message in observation))
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    rest = _ids(tokenizer, _after_mark(render_chat(tokenizer, [*said, *observation], reply=True)))
    # What the template puts after every assistant turn, such as <|im_end|> and a newline. The policy may have emitted
    # the first few of these itself (its end token); tokens are compared, so none is emitted twice or re-tokenised.
    closing = _ids(tokenizer, _after_mark(render_chat(tokenizer, said, reply=False)))
    for num_closed in range(min(len(closing), len(completion_ids)), 0, -1):
        if tuple(map(int, completion_ids[-num_closed:])) == closing[:num_closed] == rest[:num_closed]:
            return rest[num_closed:]
    return rest


def shown(prompt: Prompt) -> str:
    """A prompt as one would quote it: the string, or the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def render_chat(tokenizer: Any, messages: Sequence[Message], reply: bool) -> str:
    """The messages as the model's chat template writes them; with `reply`, ready for an answer."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=reply, tokenize=False))
    except Exception as error:  # a template is the model's own program: it may fail in any way
        kind = "" if str(error) else type(error).__name__
        raise ValueError(
            f"{tokenizer.name_or_path}: the model's chat template refuses this prompt: {error}{kind}; go without it: "
            "--raw, or task.chat = false"
        ) from None


def _after_mark(text: str) -> str:
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise ValueError("the model's chat template leaves out what the assistant said; set task.chat = false")
    return after


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
