"""From messages to token ids, by a model's chat template.

Invariant: completions are never tokenized again. The next turn of a conversation gets the ids so far, completions as
they were sampled, and `continuation`, the ids between two completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.chat.messages import Message, Prompt, Tool, as_messages, is_unicode, prompt_preview

PLACEHOLDER = "paceline-assistant-turn"  # the assistant's turn in a template; no template has a reason to change it


def encode_rendered(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text from `render_chat`, which has its special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode(
    tokenizer: Any,
    prompt: Prompt,
    chat: bool = True,
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] = {},
) -> tuple[int, ...]:
    """Token ids of a prompt. Uses the model's chat template, if it has one and `chat` is on, with generation prompt."""
    if not is_unicode(prompt):
        raise ValueError(f"prompt {ascii(prompt_preview(prompt))[:60]}: not valid Unicode text")
    if chat and tokenizer.chat_template:
        return encode_rendered(tokenizer, render_chat(tokenizer, as_messages(prompt), True, tools, template_kwargs))
    if isinstance(prompt, str) and not tools:
        return tuple(tokenizer.encode(prompt))
    what = "a prompt is a list of messages" if not tools else "a prompt has tools"
    reason = "this model has no chat template" if chat else "the chat template is turned off"
    raise ValueError(f"{what}, but {reason}; give a string{' without tools' if tools else ''}")


def continuation(
    tokenizer: Any,
    observation: Sequence[Message],
    chat: bool,
    completion_ids: Sequence[int],
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] = {},
) -> tuple[int, ...]:
    """The ids to append to `completion_ids` so that the next turn can begin: the template's closing tokens that the
    completion lacks, the formatted observation, and the generation prompt. Then

        encode([*prompt, completion, *observation]) == encode(prompt) + completion_ids + continuation

    if the template does not change earlier turns and the completion's text tokenizes the way it was sampled. Without a
    chat template: the tokens of the observation's text."""
    if not is_unicode(list(observation)):
        raise ValueError(f"observation {ascii(prompt_preview(list(observation)))[:60]}: not valid Unicode text")
    if not (chat and tokenizer.chat_template):
        return encode_rendered(tokenizer, "".join(message["content"] for message in observation))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
    following = render_chat(tokenizer, [*turns, *observation], True, tools, template_kwargs)
    following_ids = encode_rendered(tokenizer, _after_placeholder(following))
    # What the template puts after every assistant turn, such as <|im_end|> and a newline. The policy may have emitted
    # the first of these itself (its end token). Ids are compared, so that none is repeated or tokenized again.
    closing = render_chat(tokenizer, turns, False, tools, template_kwargs)
    closing_ids = encode_rendered(tokenizer, _after_placeholder(closing))
    for num_closed in range(min(len(closing_ids), len(completion_ids)), 0, -1):
        if tuple(map(int, completion_ids[-num_closed:])) == closing_ids[:num_closed] == following_ids[:num_closed]:
            return following_ids[num_closed:]
    return following_ids


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] = {},
) -> str:
    """The messages in the format of the model's chat template. `template_kwargs`: further variables of the template,
    such as enable_thinking."""
    options = ({"tools": list(tools)} if tools else {}) | dict(template_kwargs)
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **options
            )
        )
    except Exception as error:  # a template is a program of the model: it may raise any exception
        kind = "" if str(error) else type(error).__name__
        given = f" with task.chat_template_kwargs = {dict(template_kwargs)!r}" if template_kwargs else ""
        raise ValueError(
            f"{tokenizer.name_or_path}: the model's chat template refuses this prompt{given}: {error}{kind}; turn it "
            "off with --raw or task.chat = false"
        ) from None


def _after_placeholder(text: str) -> str:
    _, found, after = text.rpartition(PLACEHOLDER)
    if not found:
        raise ValueError("the model's chat template leaves out the assistant's messages; set task.chat = false")
    return after
