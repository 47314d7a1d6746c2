"""`paceline generate`: generate completions and colour their tokens by provenance."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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
    settings,
    split_settings,
)
from paceline.report.table import check_writable, write_json
from paceline.types import Completion, Provenance, Request, noise_key

if TYPE_CHECKING:
    from paceline.tasks.task import Prompt


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
        str | None, typer.Option(help="Drafter: none, ngram, suffix, draft_model, eagle3 or hybrid.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Draft length; the maximum with the policies auto and das.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per completion.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature; 0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; it gives the same tokens with any drafter.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Generate completions, and show which draft tokens were accepted.

    Examples:

    - `paceline generate "Why is the sky blue?"`
    - `paceline generate -n 4 --method suffix --k 6 --temperature 0.8 "Write a haiku."`
    """
    from paceline.speculation.metrics import summarise
    from paceline.tasks.prompt import encode

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
    all_prompts = read_prompt_arguments(prompts, prompts_file)
    from paceline.build.engine import build_engine

    engine = build_engine(cfg)
    params = cfg.sampling.params()
    requests = [
        Request(i * num_samples + j, ids, params, noise_key(cfg.sampling.seed, i, j), f"prompt {i}")
        for i, ids in enumerate(encode(engine.tokenizer, prompt, chat=not raw) for prompt in all_prompts)
        for j in range(num_samples)
    ]
    start = time.perf_counter()
    with err.status("generating") as status:
        completions = engine.generate(
            requests, lambda done, total: status.update(f"generating: {done} of {total} done")
        )
    seconds = time.perf_counter() - start
    metrics = summarise(completions, engine.drain_trace())
    show_completions(engine.tokenizer, all_prompts, completions, num_samples)
    num_tokens = sum(len(c.token_ids) for c in completions)
    shown = {name: value for name, value in metrics.items() if name in SHOWN_METRICS}
    figures = {"completions": len(completions), "tokens": num_tokens, "tokens_per_s": num_tokens / seconds}
    print_figures(figures | shown)
    if json_file is not None:
        write_json(
            json_file,
            {
                "model": cfg.model.name,
                "config": cfg.model_dump(mode="json"),
                "seconds": seconds,
                "tokens_per_s": num_tokens / seconds,
                "metrics": metrics,
                "completions": [
                    completion_record(engine.tokenizer, all_prompts[i // num_samples], i // num_samples, c)
                    for i, c in enumerate(completions)
                ],
            },
        )
    engine.close()


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


def show_completions(
    tokenizer: Any, prompts: Sequence[Prompt], completions: Sequence[Completion], num_samples: int
) -> None:
    from paceline.model.text import Pieces
    from paceline.tasks.prompt import prompt_preview

    styles = {
        Provenance.SAMPLED: "",
        Provenance.ACCEPTED: "bold green",
        Provenance.CORRECTED: "yellow",
        Provenance.BONUS: "cyan",
    }
    pieces = Pieces(tokenizer)
    for i, completion in enumerate(completions):
        if i % num_samples == 0:
            out.print(Text(f"❯ {prompt_preview(prompts[i // num_samples])}", style="bold"), soft_wrap=True)
        text = Text()
        for piece, origin in zip(pieces(completion.token_ids.tolist()), completion.provenance.tolist(), strict=True):
            text.append(piece, styles[Provenance(origin)])
        text.append(f"  [{completion.finish_reason}, {len(completion.token_ids)} tokens]", "dim")
        out.print(text, soft_wrap=True)
        out.print()
    if any(c.num_drafts for c in completions):
        shown = {"accepted draft": Provenance.ACCEPTED, "corrected": Provenance.CORRECTED, "bonus": Provenance.BONUS}
        named = [Text(name, styles[origin]) for name, origin in shown.items()]
        out.print(Text("tokens: ") + Text(" · ").join([*named, Text("sampled without a draft")]))


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
