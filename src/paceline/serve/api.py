"""The routes of the OpenAI API, over a backend that generates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, MutableMapping, Sequence
from contextlib import aclosing, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.chat.tool_calls import parser_of
from paceline.engine.engine_thread import EngineClosed, EngineError
from paceline.outputs import CompletionChunk
from paceline.serve.backend import Backend
from paceline.serve.errors import ApiError, handle_api_error
from paceline.serve.event_stream import EventStream, disconnected
from paceline.serve.formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from paceline.serve.json_response import json_response
from paceline.serve.limits import Guard, Limits, Receive, Send
from paceline.serve.metrics import ServerMetrics
from paceline.serve.protocol import ChatBody, CompletionBody, GenerateBody, TextBody, parse_body, template_messages
from paceline.serve.structure import call_structure, with_structure
from paceline.serve.tool_grammar import call_grammar
from paceline.types import SamplingParams

Ids = tuple[int, ...]
Result = TypeVar("Result")
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's


class Api:
    """Answers requests with one model. `drain_s`: how long requests may take to finish when the server stops.
    `for_agent`: it may ask for any model, as it was written for another one; the ids of tool calls depend only on their
    completion, so that runs repeat; and there are no routes about the server."""

    def __init__(
        self, backend: Backend, model_name: str, limits: Limits | None = None, api_key: str | None = None,
        drain_s: float = 30.0, metrics: ServerMetrics | None = None, for_agent: bool = False,
    ) -> None:  # fmt: skip
        self.backend, self.limits, self.model_name, self.drain_s = backend, limits or Limits(), model_name, drain_s
        self.metrics, self.for_agent = metrics or ServerMetrics(), for_agent
        tokenizer = backend.tokenizer
        self._token_text: Callable[[int], str] = lru_cache(1 << 18)(lambda token: tokenizer.decode([token]))
        self.is_draining = False
        self._compiling = asyncio.Semaphore(1)  # structured outputs
        self._started = int(time.time())
        self._longest_token = longest_token(tokenizer)
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/v1/models", self.models, methods=get),
            Route("/v1/completions", _Measured(self, self.completions), methods=post),
            Route("/v1/chat/completions", _Measured(self, self.chat), methods=post),
            Route("/inference/v1/generate", _Measured(self, self.generate), methods=post),
        ]
        if not for_agent:
            routes += [
                Route("/health", self.health, methods=get),
                Route("/metrics", self.show_metrics, methods=get),
            ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, limits=self.limits, api_key=api_key)],
            exception_handlers={ApiError: handle_api_error, 404: _not_found, 405: _not_found, Exception: _crashed},
        )

    async def close(self) -> None:
        """Finish the requests in progress within `drain_s`; the rest gets status 503."""
        self.is_draining = True
        await self.backend.close(self.drain_s)

    # ---- routes ----

    async def health(self, request: Request) -> Response:
        if self.is_draining or not self.backend.is_alive:
            raise ApiError(503, "The server is shutting down")
        return json_response({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        card = {
            "id": self.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": self._context,
        }
        return json_response({"object": "list", "data": [card]})

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await request.body())
        self._check_model(body.model)
        prompts = await self._encode_prompts(body.prompt)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.params(self.limits, max_tokens, len(prompts), body.logprobs or 0)
        await self._compile(params, body.structure_key)
        return await self._answer(request, body, prompts, params, CompletionFormat, body.logprobs is not None)

    async def chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await request.body())
        self._check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs = true", "top_logprobs")
        messages, tools = template_messages(body.messages), body.offered_tools
        if len(tools) > self.limits.max_tools:
            raise ApiError(400, f"tools: {len(tools)} tools; this server allows {self.limits.max_tools}", "tools")
        parser = parser_of(self.backend.tokenizer.chat_template) if tools else None
        if tools and parser is None:
            raise ApiError(400, "tools: the model's chat template has no tools, or in an unknown format", "tools")
        forced, grammar = body.forced_tools, None
        if forced is not None:
            assert parser is not None
            several = body.tool_choice == "required" and body.parallel_tool_calls is not False
            grammar = call_structure(call_grammar(parser, forced, several, self.backend.tokenizer), forced, self.limits)
        for key, part in (("messages", messages), ("tools", tools)):
            self._check_chars(key, len(json.dumps(part, ensure_ascii=False)))
        with _as_api_errors("messages"):
            _, ids = await self.backend.encode(messages, tools)
        given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        left = max(1, min(self._context - len(ids), self.limits.max_tokens or self._context))
        params = body.params(self.limits, left if given is None else given, 1, body.top_logprobs or 0)
        if grammar is not None:
            params = with_structure(params, grammar)
        elif parser is not None and params.structured_outputs is not None:
            reason = 'with tools, set tool_choice to "none", "required" or a function'
            raise ApiError(400, f"{body.structure_key}: {reason}", body.structure_key)
        await self._compile(params, "tools" if grammar is not None else body.structure_key)
        # OpenAI's reason after a call of a named function is that of a text.
        form = partial(ChatFormat, parser, not isinstance(body.tool_choice, dict), repeats=self.for_agent)
        return await self._answer(request, body, [ids], params, form, bool(body.logprobs))

    async def generate(self, request: Request) -> Response:
        body = parse_body(GenerateBody, await request.body())
        if body.model is not None:
            self._check_model(body.model)
        body.check()
        sampling = body.sampling_params
        max_tokens = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        params = sampling.params(self.limits, max_tokens, 1, 0)
        await self._compile(params, "structured_outputs")
        ids = tuple(body.token_ids)
        self._check_length([ids])
        form = GenerateFormat(
            body.request_id, self.model_name, self._token_text, bool(sampling.logprobs), True, [body.token_ids]
        )
        return json_response(await self._whole(request, [ids], params, form))

    # ---- steps of a request ----

    @property
    def _context(self) -> int:
        """Most tokens of prompt and completion."""
        return self.backend.max_model_len

    def _check_length(self, prompts: Sequence[Ids]) -> None:
        """Before requests are made for each sample."""
        longest = max(map(len, prompts))
        if longest >= self._context and not self.backend.refuses_long_prompts:
            raise ApiError(
                400, f"The prompt has {longest} tokens; the context is {self._context} and must hold at least one more"
            )

    def _check_chars(self, key: str, num: int) -> None:
        """Before a text is tokenized: one of many megabytes would delay all others."""
        limit = self._context * self._longest_token
        if num > limit:
            message = f"{key}: {num} characters; the context of {self._context} tokens holds at most {limit}"
            raise ApiError(400, message, key)

    def _check_model(self, name: str) -> None:
        if name != self.model_name and not self.for_agent:
            raise ApiError(
                404, f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}", "model"
            )

    async def _encode_prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[Ids]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompts: list[Any] = [prompt]
        else:
            prompts = list(prompt)
        if not prompts:
            raise ApiError(400, "prompt: must not be empty", "prompt")
        if len(prompts) > self.limits.max_samples:
            raise ApiError(400, f"prompt: this server allows {self.limits.max_samples} in a request", "prompt")
        self._check_chars("prompt", max(len(each) if isinstance(each, str) else 0 for each in prompts))
        with _as_api_errors("prompt"):
            return [(await self.backend.encode(each))[1] for each in prompts]

    async def _compile(self, params: SamplingParams, key: str) -> None:
        """Compile a structured output. `key`: of the body, which an error names. One at a time, so that the time limit
        is for its own compilation."""
        if self.backend.is_compiled(params):  # it must not wait for others
            return
        timeout_s = self.limits.compile_timeout_s
        try:
            await asyncio.wait_for(self._compiling.acquire(), timeout_s)
        except TimeoutError:
            raise ApiError(503, f"{key}: the server is compiling other structured outputs; try again") from None
        compilation = asyncio.ensure_future(self.backend.compile(params))
        compilation.add_done_callback(self._compiled)  # also after a timeout: a thread can't be stopped
        try:
            with _as_api_errors(key):
                await asyncio.wait_for(asyncio.shield(compilation), timeout_s)
        except TimeoutError:
            raise ApiError(400, f"{key}: takes too long to compile", key) from None
        except ApiError as error:
            if error.param == key and not error.message.startswith(key):
                error.message = f"{key}: {error.message}"
            raise

    def _compiled(self, compilation: asyncio.Future[None]) -> None:
        self._compiling.release()
        if not compilation.cancelled():
            compilation.exception()  # if nobody waits for it any more

    async def _answer(
        self, request: Request, body: TextBody, prompts: list[Ids], params: SamplingParams,
        form: Callable[..., Format], logprobs: bool,
    ) -> Response:  # fmt: skip
        if body.skip_special_tokens is False:
            raise ApiError(400, "skip_special_tokens: must be true; use return_token_ids", "skip_special_tokens")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream = true", "stream_options")
        self._check_length(prompts)
        prompt_ids = [list(ids) for ids in prompts]
        made = form(self.model_name, self._token_text, logprobs, bool(body.return_token_ids), prompt_ids)
        if not body.stream:
            return json_response(await self._whole(request, prompts, params, made))
        events = self._events(prompts, params, made, body.includes_usage)
        # The first event before the status line: a request that can't run gets an error with a status.
        first = await _until_disconnect(request, anext(events))
        return EventStream(_chain(first, events), self.limits.send_timeout_s)

    async def _whole(
        self, request: Request, prompts: list[Ids], params: SamplingParams, form: Format
    ) -> dict[str, Any]:
        self.metrics.num_prompt_tokens += sum(map(len, prompts))

        async def run() -> dict[str, Any]:
            with _as_api_errors():
                found = await _gather([self.backend.generate(ids, params) for ids in prompts])
            # In a thread: with many logprobs it takes long.
            return await asyncio.to_thread(form.response, [each.outputs for each in found])

        return await _until_disconnect(request, run())

    async def _events(
        self, prompts: list[Ids], params: SamplingParams, form: Format, usage: bool
    ) -> AsyncGenerator[dict[str, Any]]:
        self.metrics.num_prompt_tokens += sum(map(len, prompts))
        started, begun = time.perf_counter(), set[int]()
        with _as_api_errors():
            async with aclosing(_merge([self.backend.stream(ids, params) for ids in prompts])) as chunks:
                async for prompt, chunk in chunks:
                    if not begun:
                        self.metrics.first_token_s.observe(time.perf_counter() - started)
                    index = prompt * params.n + chunk.index
                    yield form.chunk(index, chunk, prompt, index not in begun)
                    begun.add(index)
        if usage:
            yield form.usage_chunk()


class _Measured:
    """A route that generates, as an ASGI app. It measures requests up to the end of their response."""

    def __init__(self, api: Api, route: Callable[[Request], Awaitable[Response]]) -> None:
        self._api, self._route = api, route

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        api, metrics = self._api, self._api.metrics
        request = Request(scope, receive, send)
        metrics.num_running += 1
        started, status = time.perf_counter(), 500
        try:
            if api.is_draining:
                raise ApiError(503, "The server is shutting down")
            response = await self._route(request)
            status = response.status_code
            await response(scope, receive, send)
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnect:
            status = 499  # nobody reads the response
        finally:
            metrics.num_running -= 1
            metrics.count(scope["path"], status)
            metrics.latency_s.observe(time.perf_counter() - started)


@lru_cache(4)
def longest_token(tokenizer: Any) -> int:
    """In characters, or in bytes."""
    return max(map(len, tokenizer.get_vocab()))


# ---- asyncio ----


async def _until_disconnect(request: Request, result: Awaitable[Result]) -> Result:
    """The result, or ClientDisconnect if the client goes away before; then the result is cancelled."""
    running = asyncio.ensure_future(result)
    leaving = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        for task in (running, leaving):
            task.cancel()
        await asyncio.wait((running, leaving))


async def _gather(each: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in each]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _merge(
    streams: Sequence[AsyncGenerator[CompletionChunk]],
) -> AsyncGenerator[tuple[int, CompletionChunk]]:
    """(index of the stream, chunk), as they come."""
    received: asyncio.Queue[tuple[int, CompletionChunk | Exception | None]] = asyncio.Queue()

    async def forward(i: int) -> None:
        try:
            async with aclosing(streams[i]) as chunks:
                async for chunk in chunks:
                    received.put_nowait((i, chunk))
        except Exception as error:
            received.put_nowait((i, error))
        received.put_nowait((i, None))

    tasks = [asyncio.create_task(forward(i)) for i in range(len(streams))]
    left = len(tasks)
    try:
        while left:
            i, item = await received.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _chain(first: dict[str, Any], events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    """An error after the first event is an event too."""
    async with aclosing(events):
        yield first
        try:
            async for event in events:
                yield event
        except ApiError as error:
            yield error.body()


# ---- errors ----


@contextmanager
def _as_api_errors(param: str | None = None) -> Iterator[None]:
    try:
        yield
    except EngineClosed:
        raise ApiError(503, "The server is shutting down") from None
    except EngineError:
        raise ApiError(500, "The engine failed; its log has the reason") from None
    except ValueError as error:
        raise ApiError(400, str(error), param) from None


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "has no such path" if status == 404 else "does not allow this method"
    body = ApiError(status, f"The server {what}: {request.method} {request.scope['path'][:200]}").body()
    body["error"]["code"] = "not_found" if status == 404 else "method_not_allowed"
    return json_response(body, status)


async def _crashed(request: Request, error: Exception) -> Response:
    return ApiError(500, "Internal error").response()
