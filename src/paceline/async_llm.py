"""`AsyncLLM`: generate from asyncio, for many callers at once, while the engine runs in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self, TypeVar

from paceline.chat.messages import Message, Tool
from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.engine.engine_thread import EngineClosed, EngineThread, Listener
from paceline.llm import LLM, Encoded, TextOrIds
from paceline.model.kv import BLOCK
from paceline.outputs import CompletionChunk, RequestOutput, TextStream, completion_chunk, completion_output
from paceline.types import Completion, NewTokens, SamplingParams, StepTrace

Result = TypeVar("Result")
OnStep = Callable[[list[StepTrace]], None]
CLOSING_GRACE_S = 1.0  # after the drain: a step of the engine may take longer
GPU_PREFILL_TOKENS = 256  # in a step: their time is little more than that of reading the weights


class AsyncLLM:
    """The arguments are those of `LLM`. Requests of all callers run in one batch. To cancel the task that waits for a
    request, or to leave its stream, aborts the request.

    `on_step` is called with the traces of every step, on the engine's thread.
    """

    def __init__(self, model: str, *, on_step: OnStep | None = None, **settings: Any) -> None:
        self._start(lambda: LLM(model, **settings), on_step)

    @classmethod
    def from_config(cls, config: Config, on_step: OnStep | None = None) -> Self:
        llm = cls.__new__(cls)
        llm._start(lambda: LLM.from_config(config), on_step)
        return llm

    def _start(self, make: Callable[[], LLM], on_step: OnStep | None) -> None:
        def make_engine() -> LocalEngine:
            self.llm = make()
            engine, config = self.llm.engine, self.llm.config
            if config.engine.max_num_prefill_tokens is None and config.model.device.startswith("cuda"):
                engine.scheduler.max_num_prefill_tokens = GPU_PREFILL_TOKENS
            return engine

        self.thread = EngineThread(make_engine, on_step)
        # Long prompts must block neither the event loop nor the engine. One thread: the engine needs the cores.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="paceline-tokenizer")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="paceline-grammar")  # may take seconds
        self._is_closing, self._is_drained = False, asyncio.Event()
        self._received: set[asyncio.Queue[tuple[int, NewTokens | Exception]]] = set()  # of running requests

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion."""
        engine = self.llm.engine
        return min(engine.model_config.max_positions, engine.paged.pool.num_blocks * BLOCK)

    @property
    def refuses_long_prompts(self) -> bool:
        """False: a caller should check, before requests are made for each sample."""
        return False

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive

    async def generate(
        self, prompt: TextOrIds | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """All samples of one prompt: a string, token ids, or the messages of a conversation."""
        params = sampling_params or SamplingParams()
        text, ids = await self.encode(prompt)
        outputs: dict[int, Completion] = {}
        async with aclosing(self._run(ids, params, streams=False)) as steps:
            async for index, new in steps:
                assert new.completion is not None
                outputs[index] = new.completion
        return RequestOutput(
            text,
            list(ids),
            [completion_output(done, i, self.tokenizer) for i, done in sorted(outputs.items())],
        )

    async def stream(
        self, prompt: TextOrIds | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[CompletionChunk]:
        """What each step adds to a sample of the prompt. The chunks of a sample together are its `CompletionOutput`.
        To leave the loop early, use `contextlib.aclosing`: then the request is aborted at once."""
        params = sampling_params or SamplingParams()
        _, ids = await self.encode(prompt)
        texts = [TextStream(self.tokenizer, params.stop) for _ in range(params.n)]
        async with aclosing(self._run(ids, params, streams=True)) as steps:
            async for index, new in steps:
                yield completion_chunk(new, index, texts[index])

    async def encode(self, prompt: TextOrIds | Sequence[Message], tools: Sequence[Tool] = ()) -> Encoded:
        """A prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, str):
            return await self._in_thread(self._tokenizing, partial(self.llm.encode, prompt))
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return await self._in_thread(self._tokenizing, partial(self.llm.encode_chat, items, tools))
        return self.llm.encode(items)

    def is_compiled(self, params: SamplingParams) -> bool:
        """Or there is nothing to compile."""
        structure = params.structured_outputs
        return structure is None or self.llm.engine.grammars.is_compiled(structure)

    async def compile(self, params: SamplingParams) -> None:
        """Compile a structured output. Raises ValueError."""
        if not self.is_compiled(params):
            await self._in_thread(self._compiling, partial(self.llm.compile, params))

    async def _in_thread(self, thread: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
        """Raises EngineClosed if `close` begins before the call, or can't wait for its end."""

        def call() -> Result:
            self._check_open()
            return function()

        self._check_open()
        running = asyncio.get_running_loop().run_in_executor(thread, call)
        drained = asyncio.create_task(self._is_drained.wait())
        try:
            await asyncio.wait((running, drained), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise EngineClosed("the engine's thread has ended")
            return running.result()
        finally:
            running.cancel()
            drained.cancel()

    def _check_open(self) -> None:
        if self._is_closing:
            raise EngineClosed("the engine's thread is ending")

    async def _run(
        self, ids: tuple[int, ...], params: SamplingParams, streams: bool
    ) -> AsyncGenerator[tuple[int, NewTokens]]:
        """(index of the sample, tokens), until every sample has finished."""
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[tuple[int, NewTokens | Exception]] = asyncio.Queue()

        def listener(index: int) -> Listener:
            def put(new: NewTokens | Exception) -> None:
                with suppress(RuntimeError):  # the event loop is closed: nobody waits
                    loop.call_soon_threadsafe(received.put_nowait, (index, new))

            return put

        def refused(submitted: Future[None]) -> None:
            if isinstance(error := submitted.exception(), Exception):
                listener(0)(error)

        if params.bad_words:
            params = await self._in_thread(self._tokenizing, partial(self.llm.with_bad_word_ids, params))
        await self.compile(params)
        requests = self.llm.requests(ids, params)
        left = len(requests)
        self._received.add(received)
        try:
            self.thread.submit(requests, [listener(i) for i in range(left)], streams).add_done_callback(refused)
            while left:
                index, new = await received.get()
                if isinstance(new, Exception):
                    raise new
                left -= new.completion is not None
                yield index, new
        finally:
            self._received.discard(received)
            if left:
                with suppress(EngineClosed):
                    self.thread.abort([request.request_id for request in requests])

    async def call(self, function: Callable[[LocalEngine], Result]) -> Result:
        """Call a function with the engine between two steps, for example to update weights."""
        return await asyncio.wrap_future(self.thread.call(function))

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish running requests within `drain_s` seconds and abort the rest. Those that the engine does not have yet
        get EngineClosed, and so do all if a step takes too long."""
        self._is_closing = True
        closing = asyncio.create_task(asyncio.to_thread(self.thread.close, drain_s))
        await asyncio.wait((closing,), timeout=drain_s + CLOSING_GRACE_S)
        self._is_drained.set()
        for received in self._received:
            received.put_nowait((0, EngineClosed("the engine's thread is ending")))
        await closing
        for thread in (self._tokenizing, self._compiling):
            await asyncio.to_thread(thread.shutdown)
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
