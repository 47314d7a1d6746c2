"""The policy of one sample as a backend of the API.

Temperature and truncation are those of the run, whatever a request says, since the learner needs the distribution that
tokens were sampled from. What changes the distribution otherwise is refused. A completion is sent when all of it is
known, in streams too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from paceline.chat.conversation import Conversations, Rendered
from paceline.chat.messages import Message, Tool, is_unicode
from paceline.outputs import CompletionChunk, CompletionOutput, RequestOutput, completion_output
from paceline.serve.errors import ApiError
from paceline.tasks.agent import BudgetExhausted, ContextOverflow, Policy, PolicyError, SampleEnded
from paceline.types import Completion, SamplingParams

Call = tuple[list[Message], tuple[Tool, ...], Rendered]
OTHER_PARAMETERS = {  # besides those that change logits: (refused unless, why)
    "stop_token_ids": ((), "use stop"),
    "ignore_eos": (False, "a completion ends at the end token"),
    "logprobs": (0, "only the logprobs of the sampled tokens are known"),
}


class PolicyBackend:
    """`loop`: of the agents, in which the policy is called; the API has another one. `tokenizing`: for long prompts,
    which must not block the API."""

    refuses_long_prompts = True  # the policy does, which ends some samples
    is_alive = True

    def __init__(
        self, policy: Policy, loop: asyncio.AbstractEventLoop, tokenizing: Executor, template_kwargs: Mapping[str, Any]
    ) -> None:
        self.tokenizer, self.max_model_len = policy.tokenizer, policy.max_model_len
        self.conversations = Conversations(policy.tokenizer, template_kwargs)
        self.num_answered = 0  # completions
        self.was_refused = False  # a call, for want of context or budget: that may have ended the agent
        self._policy, self._loop, self._tokenizing = policy, loop, tokenizing
        self._calls: dict[tuple[int, ...], Call] = {}  # by prompt ids
        self._texts: dict[tuple[int, ...], str] = {}
        self._running: set[Future[Completion]] = set()
        self._has_ended = False

    def end(self) -> None:
        """The sample has ended: calls in progress and later ones are refused. From any thread."""
        self._has_ended = True
        for running in list(self._running):
            running.cancel()

    # ---- Backend ----

    async def encode(
        self, prompt: str | Sequence[int] | Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            if not prompt or not is_unicode(prompt):
                raise ValueError("prompt: must be Unicode text and not empty")
            ids = await self._in_thread(self.conversations.encode_text, prompt)
            self._texts[ids] = prompt
            return prompt, ids
        items: list[Any] = list(prompt)
        if not items or not isinstance(items[0], Mapping):
            return None, tuple(items)
        if not self.tokenizer.chat_template:
            raise ValueError("the model has no chat template; use /v1/completions")
        if not is_unicode(items) or not is_unicode(list(tools)):
            raise ValueError("the messages are not valid Unicode text")
        rendered: Rendered = await self._in_thread(self.conversations.render, items, tools)
        self._calls[rendered.token_ids] = items, tuple(tools), rendered
        return rendered.text, rendered.token_ids

    def is_compiled(self, params: SamplingParams) -> bool:
        return params.structured_outputs is None

    async def compile(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            raise ValueError("a format or a forced call would change what the policy samples; leave it out in training")

    async def generate(self, prompt: Sequence[int], sampling_params: SamplingParams) -> RequestOutput:
        tasks = self._start(prompt, sampling_params)
        try:
            outputs = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        return RequestOutput(None, list(prompt), outputs)

    async def stream(self, prompt: Sequence[int], sampling_params: SamplingParams) -> AsyncGenerator[CompletionChunk]:
        tasks = self._start(prompt, sampling_params)
        try:
            for finished in asyncio.as_completed(tasks):
                output = await finished
                yield CompletionChunk(**{name: getattr(output, name) for name in CompletionChunk.__slots__})
        finally:
            for task in tasks:
                task.cancel()

    async def close(self, drain_s: float = 0.0) -> None:
        self.end()

    # ---- calls ----

    def _start(self, prompt: Sequence[int], params: SamplingParams) -> list[asyncio.Task[CompletionOutput]]:
        """A call for each sample of the request."""
        check(params)
        return [asyncio.create_task(self._call(tuple(prompt), params, index)) for index in range(params.n)]

    async def _call(self, ids: tuple[int, ...], params: SamplingParams, index: int) -> CompletionOutput:
        if self._has_ended:
            raise ended()
        call = self._policy.generate(ids, params.max_tokens, params.stop)
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._running.add(running)
        try:
            completion = await asyncio.wrap_future(running)
        except ContextOverflow as error:
            self.was_refused = True
            raise ApiError(400, str(error), "messages", "context_length_exceeded") from None
        except BudgetExhausted as error:
            self.was_refused = True
            raise ApiError(400, str(error), None, "budget_exhausted") from None
        except SampleEnded:
            raise ended() from None
        except PolicyError as error:
            raise ApiError(400, str(error)) from None
        except asyncio.CancelledError:
            if self._has_ended:
                raise ended() from None
            raise
        finally:
            self._running.discard(running)
        self.num_answered += 1
        output = completion_output(completion, index, self.tokenizer)
        if ids in self._calls:
            messages, tools, rendered = self._calls[ids]
            self.conversations.record(messages, tools, rendered, output.token_ids, output.text)
        elif ids in self._texts:
            self.conversations.record_text(self._texts[ids], ids, output.token_ids)
        return output

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)


def ended() -> ApiError:
    return ApiError(401, "This sample has ended; its key is no longer valid")


def check(params: SamplingParams) -> None:
    """Raise ApiError for a parameter that training can't honour. `temperature`, `top_p`, `top_k`, `min_p` and `seed`
    are not among them: agents set them often, and the run's values apply."""
    for name in params.logits_parameters:
        reason = "it would change the distribution that the policy samples from; leave it out in training"
        raise ApiError(400, f"{name} = {getattr(params, name)!r}: {reason}", name)
    for name, (neutral, reason) in OTHER_PARAMETERS.items():
        if getattr(params, name) != neutral:
            raise ApiError(400, f"{name} = {getattr(params, name)!r} is not supported in training: {reason}", name)
