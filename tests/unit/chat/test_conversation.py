"""From messages to exact ids, with the chat templates of real models."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chat_templates import SMOLLM2_SAMPLED, sampled, tokenizer_of

from paceline.chat.conversation import Conversations, Rendered, canonical, num_repeated, text_after
from paceline.chat.messages import Message, Tool
from paceline.chat.template import encode_rendered, render_chat
from paceline.model.store import load_tokenizer

ADD: Tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL_CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
ASK = [{"role": "user", "content": "add them"}]
TEMPLATES = ("smollm2", "qwen2.5-coder", "qwen3")


class Retokenising(Conversations):
    """Deliberately broken: it tokenizes earlier answers again."""

    def render(self, messages: Any, tools: Any = ()) -> Rendered:
        text = self._text(messages, tools)
        return Rendered(tuple(messages), text, encode_rendered(self._tokenizer, text))


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call(
    conversations: Conversations, tokenizer: Any, messages: list[Message], answer: str | list[int],
    tools: list[Tool] | tuple[()] = (),
) -> tuple[Rendered, list[int]]:  # fmt: skip
    """One call and its answer: what was rendered, and all ids so far."""
    rendered = conversations.render(messages, tools)
    ids = sampled(tokenizer, answer) if isinstance(answer, str) else answer
    conversations.record(messages, tools, rendered, ids, tokenizer.decode(ids, skip_special_tokens=True))
    return rendered, [*rendered.token_ids, *ids]


def assert_extends(tokenizer: Any, rendered: Rendered, earlier: list[int], text: str) -> None:
    """The ids begin with all earlier ids, and say what the template makes of the messages."""
    assert list(rendered.token_ids[: len(earlier)]) == earlier
    assert tokenizer.decode(list(rendered.token_ids)) == text


# ---- the ids that were sampled ----


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_goes_on_with_the_sampled_ids(name: str) -> None:
    tokenizer = tokenizer_of(name)
    conversations, messages, before = Conversations(tokenizer), list(ASK), list[int]()
    for answer in ("this is the name", "add this", "the name is this"):
        rendered, ids = call(conversations, tokenizer, messages, answer)
        assert_extends(tokenizer, rendered, before, render_chat(tokenizer, messages, True))
        messages, before = [*messages, said(answer), {"role": "user", "content": f"the {len(messages)}"}], ids
    anew = encode_rendered(tokenizer, render_chat(tokenizer, messages, True))
    assert conversations.render(messages).token_ids != anew  # the answers would be tokenized with merges


@pytest.mark.parametrize("name", TEMPLATES)
def test_retokenising_is_caught(name: str) -> None:
    tokenizer = tokenizer_of(name)
    conversations = Retokenising(tokenizer)
    _, ids = call(conversations, tokenizer, ASK, "this is the name")
    messages = [*ASK, said("this is the name"), {"role": "user", "content": "?"}]
    with pytest.raises(AssertionError):
        assert_extends(tokenizer, conversations.render(messages), ids, render_chat(tokenizer, messages, True))


def test_a_transcript_of_a_real_model(smollm2: Any) -> None:
    tokenizer = load_tokenizer(smollm2)
    for kind, is_right in ((Conversations, True), (Retokenising, False)):
        conversations = kind(tokenizer)
        _, ids = call(conversations, tokenizer, ASK, SMOLLM2_SAMPLED)
        answer = tokenizer.decode(SMOLLM2_SAMPLED, skip_special_tokens=True)
        found = conversations.render([*ASK, said(answer), {"role": "user", "content": "go on"}]).token_ids
        assert (list(found[: len(ids)]) == ids) is is_right
        assert tokenizer.decode(list(found)) == render_chat(
            tokenizer, [*ASK, said(answer), {"role": "user", "content": "go on"}], True
        )


@pytest.mark.parametrize("name", ["qwen2.5-coder", "qwen3"])
@pytest.mark.parametrize(
    "raw", [CALL, f"this is the add:\n{CALL}", '<tool_call>{"arguments":{"a":1,"b":2},"name":"add"}']
)
def test_tool_calls_keep_the_sampled_ids(name: str, raw: str) -> None:
    """The client gets parsed calls, and sends them back with its own ids and order of arguments."""
    tokenizer = tokenizer_of(name)
    conversations = Conversations(tokenizer)
    _, ids = call(conversations, tokenizer, ASK, raw, [ADD])
    message = {"role": "assistant", "content": raw.partition("\n<tool_call>")[0] if raw[0] == "t" else None}
    answered = [*ASK, {**message, "tool_calls": [TOOL_CALL]}]
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    rendered = conversations.render([*answered, result], [ADD])
    expected = tokenizer.decode(ids) + "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert_extends(tokenizer, rendered, ids, expected + "<|im_start|>assistant\n")
    # and once more
    conversations.record([*answered, result], [ADD], rendered, sampled(tokenizer, "the"), "the")
    again = conversations.render([*answered, result, said("the"), *ASK], [ADD])
    assert again.token_ids[: len(rendered.token_ids) + 3] == (*rendered.token_ids, *sampled(tokenizer, "the", False))
    # Other tools are another prompt.
    other = conversations.render([*answered, result], [{**ADD, "function": {"name": "sub"}}])
    assert other.token_ids[: len(ids)] != tuple(ids)


def test_an_answer_without_end_token() -> None:
    """Cut at its length: the closing tokens are added. With another end token they follow it."""
    tokenizer = tokenizer_of("smollm2")
    im_end, endoftext = tokenizer.encode("<|im_end|><|endoftext|>")
    for end, closing in (([], [im_end]), ([im_end], [im_end]), ([endoftext], [endoftext, im_end])):
        conversations = Conversations(tokenizer)
        rendered, _ = call(conversations, tokenizer, ASK, [*sampled(tokenizer, "this", False), *end])
        found = conversations.render([*ASK, said("this"), *ASK]).token_ids[len(rendered.token_ids) :]
        start = [*sampled(tokenizer, "this", False), *closing, *tokenizer.encode("\n<|im_start|>user\n")]
        assert list(found[: len(start)]) == start


def test_a_stop_string_stays_in_the_ids() -> None:
    """The agent gets the text before it, and the policy has sampled it."""
    tokenizer = tokenizer_of("smollm2")
    conversations = Conversations(tokenizer)
    rendered = conversations.render(ASK)
    ids = sampled(tokenizer, "this STOP", ends=False)
    conversations.record(ASK, (), rendered, ids, "this ")
    found = conversations.render([*ASK, said("this"), *ASK])  # the agent has stripped it
    assert list(found.token_ids[: len(rendered.token_ids) + len(ids)]) == [*rendered.token_ids, *ids]


# ---- branches ----


def is_branch(conversations: Conversations, messages: list[Message], ids: list[int]) -> bool:
    return list(conversations.render(messages).token_ids[: len(ids)]) != ids


def test_an_edited_answer_is_a_branch() -> None:
    tokenizer = tokenizer_of("smollm2")
    conversations = Conversations(tokenizer)
    _, ids = call(conversations, tokenizer, ASK, "this is the name")
    assert not is_branch(conversations, [*ASK, said("this is the name"), *ASK], ids)
    for edited in ("this is the nam", "This is the name", "this is the name!"):
        messages = [*ASK, said(edited), *ASK]
        assert is_branch(conversations, messages, ids)
        assert conversations.render(messages).token_ids == encode_rendered(
            tokenizer, render_chat(tokenizer, messages, True)
        )
    assert is_branch(conversations, [{"role": "user", "content": "add"}, said("this is the name"), *ASK], ids)


def test_a_template_that_removes_thinking_makes_branches() -> None:
    """Qwen3's keeps thinking while tools are called, and removes it after the next question."""
    tokenizer = tokenizer_of("qwen3")
    conversations = Conversations(tokenizer)
    raw = f"<think>\nthis is it\n</think>\n\n{CALL}"
    _, ids = call(conversations, tokenizer, ASK, raw, [ADD])
    message = {"role": "assistant", "content": "<think>\nthis is it\n</think>\n\n", "tool_calls": [TOOL_CALL]}
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    within = conversations.render([*ASK, message, result], [ADD])
    assert list(within.token_ids[: len(ids)]) == ids
    after = conversations.render([*ASK, message, result, said("<think>\nis\n</think>\n\n3"), *ASK], [ADD])
    assert list(after.token_ids[: len(ids)]) != ids
    assert "this is it" in tokenizer.decode(list(within.token_ids))
    assert "this is it" not in tokenizer.decode(list(after.token_ids))


def test_the_longest_answered_conversation_is_continued() -> None:
    """Two calls with the same messages: the answer decides. Equal answers: the same one in any order of recording."""
    tokenizer = tokenizer_of("smollm2")
    letters, merged = sampled(tokenizer, "the name"), [*tokenizer.encode("the name"), tokenizer.eos_token_id]
    other = sampled(tokenizer, "the other")
    assert letters != merged
    found = []
    for seed in range(6):
        conversations, answers = Conversations(tokenizer), [letters, merged, other]
        random.Random(seed).shuffle(answers)
        for answer in answers:
            call(conversations, tokenizer, ASK, answer)
        assert not is_branch(
            conversations, [*ASK, said("the other"), *ASK], [*conversations.render(ASK).token_ids, *other]
        )
        found.append(conversations.render([*ASK, said("the name"), *ASK]).token_ids)
    assert len(set(found)) == 1
    assert conversations.longest()[0] in ([*ASK, said("the name")], [*ASK, said("the other")])


def test_messages_that_the_policy_did_not_say_are_context() -> None:
    """Examples written by the agent, before and after an answer."""
    tokenizer = tokenizer_of("qwen2.5-coder")
    conversations = Conversations(tokenizer)
    messages = [*ASK, said("this is an example"), *ASK]
    _, ids = call(conversations, tokenizer, messages, "the name")
    assert conversations.longest() == ([*messages, said("the name")], len(messages))  # examples are the prompt's
    after = [*messages, said("the name"), *ASK, said("another example"), *ASK]
    assert_extends(tokenizer, conversations.render(after), ids, render_chat(tokenizer, after, True))


def test_a_template_that_refuses_the_text_of_a_call_makes_a_branch() -> None:
    tokenizer = tokenizer_of("qwen2.5-coder")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- if add_generation_prompt %}",
        "{%- if messages|length > 2 and not messages[1].tool_calls %}{{ raise_exception('no call') }}{%- endif %}"
        "{%- if add_generation_prompt %}",
    )
    conversations = Conversations(tokenizer)
    _, ids = call(conversations, tokenizer, ASK, CALL, [ADD])
    answered = [*ASK, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}, {"role": "tool", "content": "3"}]
    rendered = conversations.render(answered, [ADD])
    assert list(rendered.token_ids[: len(ids)]) != ids
    with pytest.raises(ValueError, match="refuses this prompt: no call"):
        conversations.render([*ASK, said("the"), *ASK])


# ---- parts ----


@pytest.mark.parametrize(
    ("text", "prompt", "answer", "after"),
    [
        ("Pabc|", "P", "abc", "|"),
        ("Pa b\nc |", "P", " ab\n\nc", " |"),
        ("Pabc\n\nQ", "P", "abc\n", "\nQ"),  # one newline was sampled
        ("Pabc\nQ", "P", "abc\n\n", "Q"),
        ("P|", "P", "", "|"),
        ("Pab|", "P", "abc", None),
        ("Qabc|", "P", "abc", None),
        ("Pab", "P", "abc", None),
    ],
)
def test_text_after(text: str, prompt: str, answer: str, after: str | None) -> None:
    assert text_after(text, prompt, answer) == after


def test_num_repeated() -> None:
    assert num_repeated([1, 2, 3], [3, 4]) == 1
    assert num_repeated([1, 3, 4], [3, 4, 5]) == 2
    assert num_repeated([1, 2], [3]) == num_repeated([], [3]) == num_repeated([1], []) == 0


def test_canonical_messages() -> None:
    function = {"name": "add", "arguments": '{"b": 2, "a": 1}'}
    sent = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{"id": "1", "function": function}]}
    assert canonical(sent) == canonical({"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]})
    assert canonical(said(" a ")) == canonical(said("a")) != canonical(said("b"))
    assert canonical({"role": "user", "content": " a"}) != canonical({"role": "user", "content": "a"})
    assert canonical({"role": "tool", "tool_call_id": "1", "content": "a"}) == canonical(
        {"role": "tool", "content": "a"}
    )
