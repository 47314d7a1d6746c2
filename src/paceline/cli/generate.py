"""`paceline generate`: generate completions, and compare decoding with drafts and without."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli.app import (
    ConfigFile,
    JsonFile,
    Model,
    Overrides,
    command,
    err,
    out,
    print_figures,
    print_note,
    settings,
    split_settings,
    warn,
)
from paceline.cli.completions import CompletionPrinter
from paceline.report.table import check_writable, render, write_json
from paceline.types import Completion, Provenance, Request, noise_key

if TYPE_CHECKING:
    from paceline.chat.messages import Prompt
    from paceline.config import Config
    from paceline.engine.engine import LocalEngine
    from paceline.engine.interface import SpeculationState
    from paceline.speculation.batch import Drafter


# The policy `auto` measures step times once, which takes longer than most calls.
DEFAULTS = {"speculation": {"method": "none", "policy": "static"}}


@command()
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPTS]… [A.B=C]…", help="Prompts, `-` reads one from stdin; and settings."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Read prompts from a jsonl file; `-` reads stdin."),
    ] = None,
    num_samples: Annotated[int, typer.Option("-n", min=1, help="Samples per prompt.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    model: Model = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    method: Annotated[
        str | None, typer.Option(help="Drafter: none, ngram, suffix, draft_model, eagle3, dspark or hybrid.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Draft length; the maximum with the policies auto and das.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per completion.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature; 0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; it gives the same tokens with any drafter.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also measure the same requests without drafts, and compare the tokens.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Generate completions, and show which draft tokens were accepted.

    On a terminal, a single completion is printed while it is generated, and accepted draft tokens are coloured (not
    with NO_COLOR).

    Examples:

    - `paceline generate "Why is the sky blue?"`
    - `paceline generate -n 4 --method suffix --k 6 --temperature 0.8 "Write a haiku."`
    - `paceline generate --method ngram --compare --max-tokens 256 "Repeat this list three times: red, green, blue"`
    """
    from paceline.chat.template import encode
    from paceline.speculation.metrics import summarise

    prompts, given = split_settings(prompts, overrides)
    cfg = settings(
        config,
        given,
        DEFAULTS,
        model__name=model,
        speculation__method=method,
        speculation__num_speculative_tokens=k,
        sampling__max_tokens=max_tokens,
        sampling__temperature=temperature,
        sampling__seed=seed,
    )
    check_writable(json_file)
    if method is None and cfg.speculation.method == "none" and (k or cfg.speculation.uses_drafter_settings):
        raise ValueError(
            "`generate` drafts only if speculation.method is set; give --method, for example --method suffix"
        )
    if compare:
        check_compare(cfg)
    all_prompts = read_prompt_arguments(prompts, prompts_file)
    from paceline.build.engine import build_engine

    engine = build_engine(cfg)
    params = cfg.sampling.params()
    requests = [
        Request(i * num_samples + j, ids, params, noise_key(cfg.sampling.seed, i, j), f"prompt {i}")
        for i, ids in enumerate(encode(engine.tokenizer, prompt, chat=not raw) for prompt in all_prompts)
        for j in range(num_samples)
    ]
    state = engine.state_dict()
    start = time.perf_counter()
    printer = CompletionPrinter(out, engine.tokenizer)
    if len(requests) == 1 and out.is_terminal:
        completions = stream_completion(engine, all_prompts[0], requests[0], printer)
        seconds = time.perf_counter() - start
    else:
        with err.status("generating") as status:
            completions = engine.generate(
                requests, lambda done, total: status.update(f"generating: {done} of {total} done")
            )
        seconds = time.perf_counter() - start
        for i, completion in enumerate(completions):
            if i % num_samples == 0:
                show_prompt(all_prompts[i // num_samples])
            printer.show(completion)
    printer.show_legend(completions)
    metrics = summarise(completions, engine.drain_trace())
    num_tokens = sum(len(c.token_ids) for c in completions)
    shown = {name: value for name, value in metrics.items() if name in SHOWN_METRICS}
    figures: dict[str, Any] = {"completions": len(completions), "tokens": num_tokens}
    if not compare:  # the comparison measures it better, after a warm-up
        figures["tokens_per_s"] = num_tokens / seconds
    print_figures(figures | shown)
    comparison = show_comparison(cfg, engine, requests, state) if compare else None
    if json_file is not None:
        write_json(
            json_file,
            {
                "model": cfg.model.name,
                "config": cfg.model_dump(mode="json"),
                "seconds": seconds,
                "tokens_per_s": num_tokens / seconds,
                "metrics": metrics,
                "comparison": comparison,
                "completions": [
                    completion_record(engine.tokenizer, all_prompts[i // num_samples], i // num_samples, c)
                    for i, c in enumerate(completions)
                ],
            },
        )
    engine.close()
    if comparison is not None and comparison["must_be_identical"] and not comparison["identical"]:
        raise typer.Exit(1)


MIN_COMPARED_TOKENS = 500
SHOWN_METRICS = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "mean_acceptance_length_per_request",
    "draft_acceptance_rate",
    "acceptance_rate_per_position",
)


def read_prompt_arguments(arguments: Sequence[str], file: Path | None) -> list[Prompt]:
    from paceline.bench.prompts import parse_prompts, read_prompts

    prompts: list[Prompt] = [sys.stdin.read() if argument == "-" else argument for argument in arguments]
    if file is not None:
        prompts += parse_prompts(enumerate(sys.stdin, 1), "stdin") if str(file) == "-" else read_prompts(file)
    if not prompts:
        raise ValueError("no prompt; give one as an argument, `-` for stdin, or --prompts FILE")
    if not all(prompts):
        raise ValueError("a prompt is empty")
    return prompts


def show_prompt(prompt: Prompt) -> None:
    from paceline.chat.messages import prompt_preview

    out.print(Text(f"❯ {prompt_preview(prompt)}", style="bold"), soft_wrap=True)


def stream_completion(
    engine: LocalEngine, prompt: Prompt, request: Request, printer: CompletionPrinter
) -> list[Completion]:
    """Print the completion while it is generated."""
    show_prompt(prompt)
    stream = printer.stream()

    def show(done: int, total: int) -> None:
        for sequence in engine.sequences:
            emitted = slice(sequence.num_prompt, sequence.num_tokens)
            stream.update(sequence.emitted.tolist(), sequence.record.provenance[emitted].tolist())

    completions = engine.generate([request], show)
    stream.finish(completions[0])
    return completions


# ---- --compare ----


def check_compare(config: Config) -> None:
    speculation = config.speculation
    if speculation.method == "none":
        raise ValueError('--compare: speculation.method = "none" drafts nothing; choose a drafter with --method')
    if speculation.rule != "coupled":
        raise ValueError(
            f'--compare: speculation.rule = "{speculation.rule}" samples other tokens with drafts than without, so '
            'they can\'t be compared; use rule = "coupled"'
        )


def show_comparison(
    config: Config, engine: LocalEngine, requests: Sequence[Request], state: SpeculationState
) -> dict[str, Any]:
    from paceline.bench.drafts import compare_drafts
    from paceline.build.drafter import build_drafter, drafting_head

    head = drafting_head(config, engine.drafter)  # while the engine has a drafter: plain decoding has none

    def make_drafter() -> Drafter | None:
        return build_drafter(config, engine.paged.decoder, engine.tokenizer, head)

    with err.status("comparing") as status:
        found = compare_drafts(engine, requests, make_drafter, state, lambda text: status.update(f"comparing: {text}"))
    name = f"{config.speculation.method}, {config.speculation.policy}"
    rows = [
        {"decoding": decoding, "tokens_per_s": found.num_tokens / seconds, "seconds": seconds}
        for decoding, seconds in (("plain", found.plain_s), (name, found.speculative_s))
    ]
    out.print(render(rows, {"decoding": "decoding", "tokens_per_s": "tokens/s", "seconds": "s"}))
    out.print(
        f"{found.speedup:.2f}x with drafts, measured on {found.num_tokens} tokens: median of {found.num_rounds} rounds "
        "in turn, after a warm-up.",
        style="bold",
        soft_wrap=True,
    )
    if found.identical:
        out.print("The tokens are identical with drafts and without.", style="green", soft_wrap=True)
    elif found.must_be_identical:
        err.print("The tokens DIFFER with drafts. This is a bug; run: paceline verify", style="bold red")
    else:
        warn(
            "The tokens differ: these kernels are not batch-invariant, so near-ties may be decided otherwise; "
            "`paceline verify` checks that nothing else differs"
        )
    if found.num_captured:
        print_note(
            f"{found.num_captured} CUDA graphs were captured in the measured rounds. Capturing takes time, so the "
            "ratio is not reliable."
        )
    if found.num_tokens < MIN_COMPARED_TOKENS:
        print_note(f"Less than {MIN_COMPARED_TOKENS} tokens: raise --max-tokens or -n for a reliable ratio.")
    return {**asdict(found), "speedup": found.speedup}


def completion_record(tokenizer: Any, prompt: Prompt, index: int, completion: Completion) -> dict[str, Any]:
    return {
        "prompt_index": index,
        "prompt": prompt,
        "prompt_ids": list(completion.request.prompt_ids),
        "text": tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True),
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "raw_logprobs": completion.raw_logprobs.tolist(),
        "provenance": [Provenance(origin).name.lower() for origin in completion.provenance.tolist()],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_drafts": completion.num_drafts,
        "num_draft_tokens": completion.num_draft_tokens,
        "num_accepted_tokens": completion.num_accepted_tokens,
    }
