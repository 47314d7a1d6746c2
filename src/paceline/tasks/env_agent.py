"""The agent that drives a native environment: one call of the policy per turn.

Emitted tokens are never tokenized again: the prompt of the next turn is the ids so far plus the ids of the observation.
An environment that raises, hangs or answers nonsense costs its sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from paceline.chat.messages import Message, Prompt, Tool, as_messages
from paceline.chat.template import continuation, encode
from paceline.chat.tool_calls import PARSERS, parser_of, to_api
from paceline.tasks.agent import AgentFailed, BudgetExhausted, ContextOverflow, Outcome, Policy
from paceline.tasks.task import Env
from paceline.tasks.threads import run_in_daemon_thread


class EnvAgent:
    def __init__(
        self,
        make_env: Callable[[], Env],
        *,
        chat: bool = True,
        chat_template_kwargs: Mapping[str, Any] = {},
        template: Callable[[Prompt], Prompt] = lambda prompt: prompt,
        step_timeout_s: float = 30.0,
        start_timeout_s: float = 0.0,
    ) -> None:
        """`template` is applied to the environment's prompt. `step_timeout_s`: of opening it, and of each step.
        `start_timeout_s`: of what comes before it is opened, such as starting a process."""
        self.make_env, self.chat, self.chat_template_kwargs = make_env, chat, chat_template_kwargs
        self.template, self.step_timeout_s, self.start_timeout_s = template, step_timeout_s, start_timeout_s
        self.hangs = False  # a method has exceeded its time limit

    async def run(self, policy: Policy) -> Outcome:
        made, loop = Future[Env](), asyncio.get_running_loop()
        try:
            env = await self._call("could not be opened", " to open", lambda: _made(self.make_env, made))
        except BaseException:  # its thread can't be stopped, and may make it later
            made.add_done_callback(lambda made: asyncio.run_coroutine_threadsafe(self._close(made.result()), loop))
            raise
        try:
            prompt = self.template(await self._call("could not be opened", " to open", env.reset))
            return await self._turns(policy, env, prompt)
        finally:
            await self._close(env)

    async def _turns(self, policy: Policy, env: Env, prompt: Prompt) -> Outcome:
        tokenizer = policy.tokenizer
        tools: Sequence[Tool] = getattr(env, "tools", ())
        kwargs = {**self.chat_template_kwargs, **getattr(env, "chat_template_kwargs", {})}
        parser = parser_of(tokenizer.chat_template) if tools else None
        messages, rewards = as_messages(prompt), dict[int, float]()
        try:
            ids = encode(tokenizer, prompt, self.chat, tools, kwargs)
        except Exception as error:
            raise AgentFailed(f"its environment could not be opened: {_described(error)}") from error
        while True:
            try:
                completion = await policy.generate(ids)
            except (ContextOverflow, BudgetExhausted):
                break
            new_ids = completion.token_ids.tolist()
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            messages.append(assistant_message(text, parser, len(messages)))
            turn = await self._call("raised", "", env.step, messages[-1])
            try:
                rewards[completion.request.request_id] = 0.0 + turn.reward
                if turn.observation is None:
                    break
                observed = continuation(tokenizer, turn.observation, self.chat, new_ids, tools, kwargs)
                messages += turn.observation
            except Exception as error:  # the answer is no Turn, or can't be tokenized
                raise AgentFailed(f"its environment's answer can't be used: {_described(error)}") from error
            ids = (*ids, *new_ids, *observed)
        return Outcome(call_rewards=rewards, messages=messages)

    async def _call(self, verb: str, purpose: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a method of the environment. A thread can't be killed: one that hangs keeps running."""
        limit = self.step_timeout_s + (self.start_timeout_s if purpose else 0.0)
        try:
            async with asyncio.timeout(limit) as timeout:
                return await _result_of(function, *args)
        except (asyncio.CancelledError, AgentFailed):
            raise
        except BaseException as error:  # also SystemExit
            if timeout.expired():
                self.hangs = True
                reason = f"took more than train.env_timeout_s = {self.step_timeout_s:g} s{purpose}"
            else:
                reason = f"{verb}{'' if verb == 'raised' else ':'} {_described(error)}"
            raise AgentFailed(f"its environment {reason}") from error

    async def _close(self, env: Env) -> None:
        """Its errors do not matter any more. If the environment hangs, `close` may hang too: it gets a thread, which is
        not waited for."""
        close = getattr(env, "close", None)
        if close is None:
            return
        if self.hangs and not inspect.iscoroutinefunction(close):
            run_in_daemon_thread(close)
            return
        with suppress(Exception):
            async with asyncio.timeout(self.step_timeout_s):
                await _result_of(close)


def _made(make_env: Callable[[], Env], made: Future[Env]) -> Env:
    env = make_env()
    made.set_result(env)
    return env


async def _result_of(function: Callable[..., Any], *args: Any) -> Any:
    """Of an async function, or of another in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result, error = await asyncio.wrap_future(run_in_daemon_thread(_result_or_error, function, *args))
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


def _result_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """A future of asyncio can't hold every exception."""
    try:
        return function(*args), None
    except StopIteration as error:  # a coroutine can't raise it
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def assistant_message(text: str, parser: str | None, index: int) -> Message:
    """The policy's message, with the tool calls in its text. `index`: of the message in the conversation. The ids of
    calls depend only on these, so that runs repeat."""
    if parser is None:
        return {"role": "assistant", "content": text}
    reader = PARSERS[parser]()
    content, calls = reader.add(text)
    rest, more = reader.finish()
    found = to_api([*calls, *more])
    for i, call in enumerate(found):
        call["id"] = hashlib.blake2b(f"{index}.{i}.{text}".encode(), digest_size=8).hexdigest()[:9]
    return {"role": "assistant", "content": content + rest, **({"tool_calls": found} if found else {})}


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
