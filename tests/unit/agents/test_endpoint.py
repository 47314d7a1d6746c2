"""The endpoint with OpenAI's client: exact ids, keys, refused parameters, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from chat_templates import sampled, tokenizer_of
from openai import AsyncOpenAI
from scripted_policy import Answer, ScriptedPolicy

from paceline.agents import endpoint as endpoint_module
from paceline.agents.endpoint import Endpoint, Session
from paceline.chat.template import render_chat
from paceline.tasks.agent import AgentFailed, BudgetExhausted, ContextOverflow, SampleEnded

ASK: list[Any] = [{"role": "user", "content": "add them"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("qwen2.5-coder")


def says(tokenizer: Any, *texts: str) -> Answer:
    """Each call gets the next text, in ids that no tokenizer would choose; the last one again and again."""
    left = list(texts)
    return lambda ids: sampled(tokenizer, left.pop(0) if len(left) > 1 else left[0])


@asynccontextmanager
async def opened(endpoint: Endpoint, policy: ScriptedPolicy) -> AsyncIterator[tuple[Session, AsyncOpenAI]]:
    with endpoint.session(policy) as session:
        async with AsyncOpenAI(**session.client.options, max_retries=0, timeout=20) as client:
            yield session, client


def test_an_agent_with_a_tool_gets_the_sampled_ids(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, CALL, "the name is 3"))

    async def agent() -> None:
        async with opened(endpoint, policy) as (session, client):
            messages = list(ASK)
            first = await client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[TOOL])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
            assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}  # type: ignore[union-attr]
            # As agents do: the client's own object goes back.
            messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
            second = await client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[TOOL])
            assert second.choices[0].message.content == "the name is 3"
            again = await client.chat.completions.create(
                model="gpt-4o-mini", messages=[*messages, second.choices[0].message, *ASK], tools=[TOOL]
            )
            assert again.choices[0].message.content == "the name is 3"
            longest, num_prompt = session.backend.conversations.longest()
            assert num_prompt == 1
            assert [each["role"] for each in longest] == ["user", "assistant", "tool", "assistant", "user", "assistant"]

    asyncio.run(agent())
    for (prompt, answer), (longer, _) in zip(policy.calls, policy.calls[1:], strict=False):
        assert longer[: len(prompt) + len(answer)] == (*prompt, *answer)
    assert tokenizer.decode(policy.calls[0][0]) == render_chat(tokenizer, ASK, True, [TOOL])


def test_ids_of_tool_calls_repeat(endpoint: Endpoint, tokenizer: Any) -> None:
    async def agent() -> tuple[list[str], list[str]]:
        async with opened(endpoint, ScriptedPolicy(tokenizer, says(tokenizer, CALL + CALL))) as (_, client):
            answer = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], n=2)
            return tuple([call.id for call in choice.message.tool_calls or []] for choice in answer.choices)  # type: ignore[return-value]

    first, second = asyncio.run(agent()), asyncio.run(agent())
    assert first == second and len({*first[0], *first[1]}) == 4


def test_streams_and_several_samples(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the name"))

    async def agent() -> None:
        async with opened(endpoint, policy) as (_, client):
            stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the name"
            assert chunks[-1].choices[0].finish_reason == "stop"
            both = await client.chat.completions.create(model="m", messages=ASK, n=2, temperature=0.1, seed=3, stop="?")
            assert [choice.message.content for choice in both.choices] == ["the name", "the name"]
            messages = [*ASK, {"role": "assistant", "content": "the name"}, *ASK]
            await client.chat.completions.create(model="m", messages=messages)

    asyncio.run(agent())
    assert len(policy.calls) == 4
    assert policy.calls[3][0][: len(policy.calls[0][0]) + len(policy.calls[0][1])] == (
        *policy.calls[0][0],
        *policy.calls[0][1],
    )


def test_prompts_without_messages(endpoint: Endpoint, tokenizer: Any) -> None:
    """A text that goes on after a completion has its ids, unless an end token ended it. Ids are taken as they are."""
    answers = [sampled(tokenizer, "the name", ends=False), sampled(tokenizer, "the"), [1, 2], [3]]
    policy = ScriptedPolicy(tokenizer, lambda ids: answers.pop(0))

    async def agent() -> None:
        async with opened(endpoint, policy) as (_, client):
            first = await client.completions.create(model="m", prompt="this", max_tokens=50)
            await client.completions.create(model="m", prompt=f"this{first.choices[0].text} is", max_tokens=50)
            await client.completions.create(model="m", prompt="this is the", max_tokens=50)
            await client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=50)

    asyncio.run(agent())
    (prompt, said), (longer, _), (other, _), (ids, _) = policy.calls
    assert longer == (*prompt, *said, *tokenizer.encode(" is"))
    assert other == tuple(tokenizer.encode("this is the")) and ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("logit_bias", {"logit_bias": {"3": 5}}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("repetition_penalty", {"extra_body": {"repetition_penalty": 1.2}}),
        ("min_tokens", {"extra_body": {"min_tokens": 2}}),
        ("bad_words", {"extra_body": {"bad_words": ["a"]}}),
        ("stop_token_ids", {"extra_body": {"stop_token_ids": [1]}}),
        ("ignore_eos", {"extra_body": {"ignore_eos": True}}),
        ("logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "a"}}}),
        ("tools", {"tools": [TOOL], "tool_choice": "required"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_the_distribution_is_refused(
    endpoint: Endpoint, tokenizer: Any, key: str, options: dict[str, Any], stream: bool
) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"))

    async def agent() -> None:
        async with opened(endpoint, policy) as (_, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=ASK, stream=stream, **options)
            assert key in str(caught.value) and "training" in str(caught.value)
            assert caught.value.param == key
            neutral: Any = {"presence_penalty": 0, "response_format": {"type": "text"}, "logprobs": True}
            await client.chat.completions.create(model="m", messages=ASK, temperature=2, top_p=0.5, **neutral)

    asyncio.run(agent())
    assert len(policy.calls) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextOverflow("too long"), 400, "context_length_exceeded"),
        (BudgetExhausted("no calls left"), 400, "budget_exhausted"),
        (SampleEnded("over"), 401, "invalid_api_key"),
        (RuntimeError("broken"), 500, "internal_error"),
    ],
)
def test_errors_of_the_policy(endpoint: Endpoint, tokenizer: Any, error: Exception, status: int, code: str) -> None:
    async def agent() -> None:
        async with opened(endpoint, ScriptedPolicy(tokenizer, lambda ids: error)) as (_, client):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=ASK)
            assert (caught.value.status_code, caught.value.code) == (status, code)

    asyncio.run(agent())


def test_the_policy_itself_refuses_a_long_prompt(endpoint: Endpoint, tokenizer: Any) -> None:
    """It must know, since this ends some samples."""
    policy = ScriptedPolicy(tokenizer, lambda ids: ContextOverflow(f"{len(ids)} tokens"), max_model_len=20)

    async def agent() -> None:
        async with opened(endpoint, policy) as (_, client):
            with pytest.raises(openai.BadRequestError, match="tokens"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "add " * 50}])

    asyncio.run(agent())


# ---- keys ----


def test_a_key_works_in_the_path_or_as_api_key(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"))

    async def agent() -> None:
        async with opened(endpoint, policy) as (session, _):
            url, key = session.client.base_url, session.client.api_key
            root = url.replace(f"/{key}", "")
            for base_url, api_key in ((url, "none"), (root, key), (url, key)):
                async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                    assert [model.id async for model in client.models.list()] == ["policy"]
                    await client.chat.completions.create(model="m", messages=ASK)
            for base_url, api_key in ((root, "none"), (root, key + "x"), (f"{root[:-3]}/sk-x/v1", key)):
                async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.chat.completions.create(model="m", messages=ASK)

    asyncio.run(agent())
    assert len(policy.calls) == 3


def test_nothing_about_the_server_or_other_samples_is_shown(endpoint: Endpoint, tokenizer: Any) -> None:
    async def agent() -> None:
        async with opened(endpoint, ScriptedPolicy(tokenizer, says(tokenizer, "the"))) as (session, _):
            root = session.client.base_url.removesuffix("/v1")
            async with httpx.AsyncClient() as client:
                for path in ("/metrics", "/health", "/", "/v1", "/v1/../metrics", "/%2e%2e/metrics"):
                    answer = await client.get(root + path)
                    assert answer.status_code in (401, 404), path
                    assert "paceline_" not in answer.text

    asyncio.run(agent())


def test_two_samples_do_not_meet(endpoint: Endpoint, tokenizer: Any) -> None:
    """Equal messages and answers, other ids: each sample goes on with its own."""
    mine = ScriptedPolicy(tokenizer, lambda ids: sampled(tokenizer, "the name"))
    other = ScriptedPolicy(tokenizer, lambda ids: [*tokenizer.encode("the name"), tokenizer.eos_token_id])
    messages = [*ASK, {"role": "assistant", "content": "the name"}, *ASK]

    async def agent() -> None:
        async with opened(endpoint, mine) as (_, first), opened(endpoint, other) as (_, second):
            for said in (ASK, messages):
                await asyncio.gather(*(c.chat.completions.create(model="m", messages=said) for c in (first, second)))

    asyncio.run(agent())
    for policy in (mine, other):
        (prompt, answer), (longer, _) = policy.calls
        assert longer[: len(prompt) + len(answer)] == (*prompt, *answer)
    assert mine.calls[1][0] != other.calls[1][0]


def test_after_its_end_a_key_is_unknown_and_calls_are_aborted(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"), delay_s=30)

    async def agent() -> None:
        with endpoint.session(policy) as session:
            client = AsyncOpenAI(**session.client.options, max_retries=0)
            running = [asyncio.create_task(client.chat.completions.create(model="m", messages=ASK)) for _ in range(3)]
            while policy.num_running < 3:
                await asyncio.sleep(0.01)
        for task in running:
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await task
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=ASK)
        await client.close()

    asyncio.run(agent())
    assert policy.num_cancelled == 3 and policy.calls == []


def test_a_client_that_goes_away_aborts_its_call(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"), delay_s=30)

    async def agent() -> None:
        async with opened(endpoint, policy) as (_, client):
            task = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            while not policy.num_running:
                await asyncio.sleep(0.01)
            task.cancel()
            while not policy.num_cancelled:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(agent(), 20))


# ---- abuse ----


def test_a_flood_costs_its_own_sample(endpoint: Endpoint, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_OTHER_REQUESTS", 40)
    flooding, policy = (ScriptedPolicy(tokenizer, says(tokenizer, "the")) for _ in range(2))

    async def agent() -> None:
        async with opened(endpoint, flooding) as (session, bad), opened(endpoint, policy) as (_, good):
            for _ in range(60):  # completions do not count
                await bad.chat.completions.create(model="m", messages=ASK)
            answers = [bad.models.list() for _ in range(100)]
            found = await asyncio.gather(*answers, return_exceptions=True)
            assert sum(isinstance(each, openai.AuthenticationError) for each in found) >= 50
            with pytest.raises(AgentFailed, match="sent more than 40 requests"):
                await asyncio.wait_for(session.failed, 10)
            assert (await good.chat.completions.create(model="m", messages=ASK)).choices[0].message.content == "the"

    asyncio.run(agent())


def test_limits_of_a_sample(endpoint: Endpoint, tokenizer: Any) -> None:
    """Too many calls at once get 429, too large bodies 413; others are answered meanwhile."""
    slow = ScriptedPolicy(tokenizer, says(tokenizer, "the"), delay_s=1)
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"))

    async def agent() -> None:
        async with opened(endpoint, slow) as (session, bad), opened(endpoint, policy) as (_, good):
            calls = [asyncio.create_task(bad.chat.completions.create(model="m", messages=ASK)) for _ in range(80)]
            await asyncio.wait_for(good.chat.completions.create(model="m", messages=ASK), 60)
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(each, openai.RateLimitError) for each in found) >= 16
            assert slow.most_running <= 64
            large = [{"role": "user", "content": "a" * (5 << 20)}]
            with pytest.raises(openai.APIStatusError) as caught:
                await bad.chat.completions.create(model="m", messages=large)  # type: ignore[arg-type]
            assert caught.value.status_code == 413
            async with httpx.AsyncClient(headers={"Content-Type": "application/json"}) as raw:
                for body in (b"", b"\xff\x00", b"[1]", b'{"model":', b"[" * 100_000, b'{"model": "m", "messages": 3}'):
                    answer = await raw.post(f"{session.client.base_url}/chat/completions", content=body)
                    assert answer.status_code == 400, body

    asyncio.run(agent())


def test_idle_connections_are_limited(endpoint: Endpoint, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes one of the files that the trainer may open."""
    monkeypatch.setattr(endpoint_module, "MAX_CONNECTIONS", 20, raising=False)

    async def agent() -> None:
        async with opened(endpoint, ScriptedPolicy(tokenizer, says(tokenizer, "the name"))) as (session, client):
            address = httpx.URL(session.client.base_url)
            raw = [await asyncio.open_connection(address.host, address.port) for _ in range(60)]
            for _ in range(2):  # its own connection may be closed between two requests
                await client.chat.completions.create(model="m", messages=ASK)
            closed = 0
            for reader, writer in raw:
                with suppress(TimeoutError, ConnectionError):
                    closed += await asyncio.wait_for(reader.read(1), 0.02) == b""
                writer.close()
            assert 41 <= closed < 60

    asyncio.run(agent())


def guesses(key: str) -> Iterator[str]:
    yield from ("sk-", key[:-1], key + "A", key.upper(), "sk-" + "A" * 32, "*", "%", "sk-../" + key, key + "\x00")


def test_a_key_can_not_be_guessed_by_parts(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, says(tokenizer, "the"))

    async def agent() -> None:
        async with opened(endpoint, policy) as (session, _), httpx.AsyncClient() as raw:
            root = session.client.base_url.removesuffix(f"/{session.client.api_key}/v1")
            calls: list[Callable[[str], Any]] = [
                lambda key: raw.get(f"{root}/v1/models", headers={"Authorization": f"Bearer {key}".encode()}),
                lambda key: raw.get(f"{root}/{key}/v1/models".replace("\x00", "%00")),
            ]
            for guess in guesses(session.client.api_key):
                for call in calls:
                    with suppress(httpx.InvalidURL, httpx.LocalProtocolError):
                        assert (await call(guess)).status_code in (400, 401, 404), guess

    asyncio.run(agent())
    assert policy.calls == []
