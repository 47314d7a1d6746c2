"""`AsyncLLM` on a tiny model: many callers, streams, aborts, errors and updates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from tiny_run import write_model

from paceline import LLM, AsyncLLM, CompletionChunk, CompletionOutput, SamplingParams
from paceline.engine.engine import LocalEngine
from paceline.engine.engine_thread import EngineClosed, EngineError, EngineThread
from paceline.model.weights import hf_state
from paceline.outputs import TextStream, completion_text
from paceline.types import Request
from paceline.verify.table import Table, TableDecoder

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "speculation": {"method": "suffix", "policy": "static", "num_speculative_tokens": 3},
    "engine": {"max_num_seqs": 8, "kv_tokens": 8192},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("async") / "model"
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as llm:
        yield llm


def run(model: str, function: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with AsyncLLM(model, **SETTINGS) as llm:
            await asyncio.wait_for(function(llm), 120)
            assert not llm.llm.engine.has_work
            assert not any(llm.llm.engine.paged.pool.ref_counts), "KV blocks are free"

    asyncio.run(main())
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("paceline")]


def params(i: int, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10 + i % 30, "seed": i, "n": 1 + i % 3, "ignore_eos": i % 2 == 0, **values})


def joined(chunks: list[CompletionChunk], index: int) -> CompletionOutput:
    own = [chunk for chunk in chunks if chunk.index == index]
    columns = {
        name: [item for chunk in own for item in getattr(chunk, name)]
        for name in ("token_ids", "logprobs", "raw_logprobs", "drafted", "versions")
    }
    top = None if own[0].top_logprobs is None else [item for chunk in own for item in chunk.top_logprobs or []]
    assert all(chunk.finish_reason is None for chunk in own[:-1]) and own[-1].finish_reason is not None
    text = "".join(chunk.text for chunk in own)
    last = own[-1]
    return CompletionOutput(
        index, text, **columns, top_logprobs=top, finish_reason=last.finish_reason or "", stop_reason=last.stop_reason
    )


def test_many_callers_get_what_llm_generates(model: str, llm: LLM) -> None:
    prompts = [f"prompt {i % 5}" for i in range(24)]
    expected = llm.generate(prompts, [params(i) for i in range(24)])

    async def check(async_llm: AsyncLLM) -> None:
        found = await asyncio.gather(*(async_llm.generate(prompt, params(i)) for i, prompt in enumerate(prompts)))
        for a, b in zip(found, expected, strict=True):
            assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
            assert [o.text for o in a.outputs] == [o.text for o in b.outputs]

    run(model, check)


def test_a_stream_is_the_whole_completion(model: str, llm: LLM) -> None:
    text = llm.generate("abc", params(3, n=1, max_tokens=60, ignore_eos=True))[0].outputs[0].text
    many = [params(3, n=1, max_tokens=60, ignore_eos=True, stop=(text[20:22], "\x00")), params(4, n=3, logprobs=2)]

    async def check(async_llm: AsyncLLM) -> None:
        async def collect(each: SamplingParams) -> list[CompletionChunk]:
            return [chunk async for chunk in async_llm.stream("abc", each)]

        for each, chunks in zip(many, await asyncio.gather(*map(collect, many)), strict=True):
            (whole,) = llm.generate("abc", each)
            assert len(chunks) > len(whole.outputs), "in several steps"
            for output in whole.outputs:
                found = joined(chunks, output.index)
                assert (found.text, found.token_ids) == (output.text, output.token_ids)
                assert (found.finish_reason, found.stop_reason) == (output.finish_reason, output.stop_reason)
                assert found.raw_logprobs == pytest.approx(output.raw_logprobs, abs=1e-9)
                assert (found.top_logprobs is None) == (output.top_logprobs is None)
                assert len(found.top_logprobs or output.token_ids) == len(found.drafted) == len(output.token_ids)
        assert joined(await collect(many[0]), 0).stop_reason == text[20:22]

    run(model, check)


def test_leaving_a_stream_or_cancelling_aborts_the_request(model: str) -> None:
    async def check(async_llm: AsyncLLM) -> None:
        endless = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
        async with aclosing(async_llm.stream("abc", endless)) as stream:
            async for _ in stream:
                break
        await async_llm.call(lambda engine: None)  # after the aborts
        assert async_llm.thread.num_requests == 0
        task = asyncio.create_task(async_llm.generate("abc", endless))
        while not async_llm.thread.num_requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await async_llm.call(lambda engine: None)  # after the aborts
        assert async_llm.thread.num_requests == 0

    run(model, check)


def test_bad_requests_are_refused_and_disturb_nobody(model: str, llm: LLM) -> None:
    async def check(async_llm: AsyncLLM) -> None:
        good = asyncio.create_task(async_llm.generate("abc", params(1)))
        for prompt, message in (([10**6], "vocabulary"), ("", "prompt ''"), ([1] * 600, "context")):
            with pytest.raises(ValueError, match=message):
                await async_llm.generate(prompt, params(2))
        expected = llm.generate("abc", params(1))[0]
        assert [o.token_ids for o in (await good).outputs] == [o.token_ids for o in expected.outputs]

    run(model, check)


def test_an_error_in_a_step_ends_all_requests_and_the_engine_goes_on(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(async_llm: AsyncLLM) -> None:
        engine = async_llm.llm.engine
        launch = engine.runner.launch

        def broken(*args: Any) -> Any:
            engine.runner.launch = launch  # type: ignore[method-assign]
            raise ValueError("out of memory")

        await async_llm.call(lambda engine: setattr(engine.runner, "launch", broken))
        found = await asyncio.gather(*(async_llm.generate("abc", params(i)) for i in range(3)), return_exceptions=True)
        assert any(isinstance(each, EngineError) and "out of memory" in str(each) for each in found)
        assert len((await async_llm.generate("abc", params(1))).outputs) == 2

    run(model, check)


def test_weights_are_updated_between_two_steps(model: str) -> None:
    async def check(async_llm: AsyncLLM) -> None:
        weights = [(name, tensor.clone()) for name, tensor in hf_state(async_llm.llm.engine.paged.decoder)]
        versions: list[int] = []
        async with aclosing(async_llm.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))) as chunks:
            async for chunk in chunks:
                if not versions:
                    receipt = await async_llm.call(lambda engine: engine.update_weights(weights, 1))
                    assert receipt.version == 1
                versions += chunk.versions
        assert versions[0] == 0 and versions[-1] == 1 and versions == sorted(versions)

    run(model, check)


def test_close_waits_neither_for_prompts_nor_for_a_long_step(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers get EngineClosed soon: the server must answer before it ends."""
    can_go_on, is_blocked = threading.Event(), threading.Event()

    def block(*arguments: Any) -> Any:
        is_blocked.set()
        assert can_go_on.wait(60)
        return step() if not arguments else None, (1, 2)

    async def ended(request: Awaitable[Any]) -> None:
        with pytest.raises(EngineClosed):
            await request

    async def main(name: str) -> None:
        nonlocal step
        can_go_on.clear()
        is_blocked.clear()
        llm = AsyncLLM(model, **SETTINGS)
        step = llm.llm.engine.step
        with monkeypatch.context() as patch:
            patch.setattr(llm.llm if name == "encode" else llm.llm.engine, name, block)
            requests = [asyncio.create_task(ended(llm.generate("abc", SamplingParams()))) for _ in range(3)]
            await asyncio.to_thread(is_blocked.wait, 60)
            closing = asyncio.create_task(llm.close(drain_s=0.2))
            await asyncio.wait_for(asyncio.gather(*requests), 30)
            assert not closing.done()
            with pytest.raises(EngineClosed):
                await llm.encode("abc")
            can_go_on.set()
            await asyncio.wait_for(closing, 30)

    step: Callable[[], object] = object
    for name in ("encode", "step"):
        asyncio.run(main(name))


# ---- the thread ----


def thread_and_requests() -> tuple[EngineThread, list[Request]]:
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    return EngineThread(lambda: LocalEngine(TableDecoder(Table(6, 1), num_blocks=64))), [
        Request(i, (0, 1), sampling) for i in range(3)
    ]


def test_close_finishes_or_aborts() -> None:
    for drain_s, reason in ((60.0, "length"), (0.0, "abort")):
        thread, requests = thread_and_requests()
        done: list[Any] = []
        listeners = [done.append] * 3
        thread.submit(requests, listeners, streams=False).result()
        thread.close(drain_s)
        assert [new.completion.finish_reason for new in done] == [reason] * 3
        with pytest.raises(EngineClosed, match="has ended"):
            thread.submit(requests, listeners, streams=False)
        thread.close()


def test_all_samples_are_submitted_or_none() -> None:
    thread, requests = thread_and_requests()
    wrong = Request(7, (99,), SamplingParams())
    told: list[Any] = []
    with pytest.raises(ValueError, match="vocabulary"):
        thread.submit([*requests, wrong], [told.append] * 4, streams=True).result()
    assert thread.call(lambda engine: engine.has_work).result() is False
    thread.close()
    assert told == []


def test_an_engine_that_can_not_be_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a known name"):
        AsyncLLM("no-such-model", device="cpu")


def test_an_idle_thread_runs_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[None] = []
    monkeypatch.setattr(LocalEngine, "step", lambda self: steps.append(None))
    thread, _ = thread_and_requests()
    time.sleep(0.1)
    thread.close()
    assert not steps


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_outside_of_a_step_leaves_nobody_waiting() -> None:
    """Broken on purpose: a listener that raises ends the thread."""
    thread, requests = thread_and_requests()
    told: list[Any] = []

    def broken(new: Any) -> None:
        raise RuntimeError("listener")

    thread.submit(requests[:2], [told.append, broken], streams=True).result()
    thread._thread.join(60)
    assert isinstance(told[-1], EngineClosed)
    with pytest.raises(EngineClosed):
        thread.call(lambda engine: None)
    thread.close()


# ---- text ----


def test_text_pieces_are_the_text(llm: LLM) -> None:
    """Bytes of several scripts and broken characters, cut into random steps; with stop strings and without."""
    dice = torch.Generator().manual_seed(1)
    text, num_pieces = "naïve 日本語 😀 ok\n" * 2, list[int]()
    for trial in range(60):
        ids = llm.tokenizer.encode(text)
        if trial % 3 == 0:  # random bytes
            ids = torch.randint(0, 259, (40,), generator=dice).tolist()
        stop = ("語 ", "zzzz") if trial % 2 else ()
        stream, at, pieces = TextStream(llm.tokenizer, stop), 0, []
        end = len(ids)
        reason = None
        if stop and trial % 3:  # up to the token that completes the stop string
            end = next(n for n in range(len(ids)) if stop[0] in llm.tokenizer.decode(ids[:n]))
            reason = stop[0]
        columns = {"token_ids": torch.tensor(ids[:end]), "finish_reason": "stop", "stop_reason": reason}
        completion: Any = type("C", (), columns)
        while at < end:
            step = min(int(torch.randint(1, 5, (), generator=dice)), end - at)
            pieces.append(stream.add(ids[at : at + step], completion if at + step == end else None))
            at += step
        assert "".join(pieces) == completion_text(completion, llm.tokenizer)
        num_pieces.append(len([piece for piece in pieces if piece]))
    assert sum(num_pieces) / 60 > 4, "in pieces"


def test_on_a_gpu_prompts_are_limited_while_others_decode(model: str) -> None:
    for given, device, limit in ((None, "cpu", None), (64, "cpu", 64), (None, "cuda", 256), (64, "cuda", 64)):
        llm = LLM(model, **SETTINGS | {"engine": SETTINGS["engine"] | {"max_num_prefill_tokens": given}})
        assert llm.engine.scheduler.max_num_prefill_tokens == given, "not for throughput"
        llm.config = llm.config.changed(model={"device": device})
        running = AsyncLLM.__new__(AsyncLLM)
        running._start(lambda llm=llm: llm, None)
        assert llm.engine.scheduler.max_num_prefill_tokens == limit
        asyncio.run(running.close())
