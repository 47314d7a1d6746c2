"""A real RL run over several epochs, recorded for replay: GRPO with SmolLM2-135M on grade-school mathematics.

    python benchmarks/history/rl_run.py --model DIR --gsm8k gsm8k-train.jsonl --temperature 1.0 --out run/

Writes, after every epoch, `rollouts.jsonl.xz` (one line per sample in the order of step, group and sample; keys as in
paceline/rl/records.py, as far as replay needs them, and `eagle3`) and `summary.json`. Every step is on-policy: the
learner's float32 weights go into the sampler, in bfloat16 on a GPU, before it draws.

`eagle3` has a digit per token: digit j says how many of 7 tokens would be right that the shipped head drafts when j
tokens have been emitted, under the policy that emitted them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shipped_head"))

from fast import exact_logits
from rollouts import Batch, load

from paceline.config import AlgorithmSection, LearnerSection
from paceline.draft.acceptance import match_lengths
from paceline.draft.lesson import Example, teach
from paceline.model import weights
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import load_head, resolve_head
from paceline.model.store import load_tokenizer
from paceline.rl.algorithms import Algorithm, make_algorithm
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner, UpdateReport
from paceline.rl.order import DataOrder
from paceline.rl.stopwatch import Stopwatch
from paceline.tasks.prompt import encode
from paceline.types import Group, Rollout

HELD_OUT = 500  # the last questions of the file, which the shipped head was not trained on
# An example says more to a small model than an instruction: asked to reason and to box the result, it boxes one in 16.
TEMPLATE = """\
Question: Tom has 3 boxes with 4 pens each. He gives 5 pens away. How many pens are left?
Answer: Tom has 3 * 4 = 12 pens. After giving 5 away, he has 12 - 5 = 7 pens left. The answer is 7.

Question: {}
Answer:"""
CONCLUSION = re.compile(r"answer is:?\s*\$?(-?\d[\d,]*(?:\.\d+)?)[^\d\n]*\Z")  # and nothing after it
DRAFTED = 7  # tokens per EAGLE-3 draft; a digit holds no more than 9
LESSON_TOKENS = 16384  # padding included, in one forward of the head


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    question: str
    answer: float
    prompt_ids: tuple[int, ...]


# ---- the task ----


def easiest(path: Path, num: int, tokenizer: Any) -> list[Problem]:
    """Of the held-out questions those with the fewest steps to the answer, short ones first: a small model has to be
    right now and then. Named by their place counted from the file's end."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[-HELD_OUT:]]
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["answer"].count("\n"), len(rows[i]["question"]), i))
    return [
        Problem(
            name=f"gsm8k-train/{i - len(rows)}",
            question=rows[i]["question"],
            answer=value(rows[i]["answer"].split("####")[1]),
            prompt_ids=encode(tokenizer, TEMPLATE.format(rows[i]["question"])),
        )
        for i in order[:num]
    ]


def value(number: str) -> float:
    return float(number.replace(",", ""))


def score(text: str, stopped: bool, answer: float) -> dict[str, float]:
    """`format`: the completion came to its end, and that is a conclusion as in the example. `math`: the number there
    is the answer."""
    said = CONCLUSION.search(text.rstrip()) if stopped else None
    return {"math": float(said is not None and value(said[1]) == answer), "format": float(said is not None)}


# ---- a step ----


@torch.no_grad()
def sample(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], temperature: float, max_new: int, seed: int
) -> list[np.ndarray]:
    """A completion of each prompt, its end token included where it was reached. Finished rows stay in the batch: so
    small a one takes as long without them, and its CUDA graph is recorded once."""
    torch.manual_seed(seed)
    heat = np.full(len(prompts), temperature)
    batch = Batch(decoder, [np.array(p) for p in prompts], heat, max_new, decoder.config.eos_token_ids[0])
    step = batch.recorded()
    for at in range(batch.shortest - 1, batch.longest - 1):
        step()
        if at % 32 == 0 and bool(batch.done.all()):
            break
    tokens, ends = batch.tokens.cpu().numpy(), batch.ends.tolist()
    return [tokens[row, len(prompt) : ends[row]].astype(np.int32) for row, prompt in enumerate(prompts)]


def rollout(problem: Problem, number: int, tokens: np.ndarray, version: int, end: int) -> Rollout:
    num = len(tokens)
    return Rollout(
        sample=number,
        prompt_ids=problem.prompt_ids,
        token_ids=tokens,
        mask=np.ones(num, bool),
        logprobs=np.zeros(num),  # not asked for: the updates are on-policy and without a correction
        versions=np.full(num, version, np.int32),
        provenance=np.zeros(num, np.uint8),
        sources=np.full(num, 255, np.uint8),
        drafters=(),
        finish_reason="stop" if tokens[-1] == end else "length",
    )


def match_digits(decoder: Decoder, head: Eagle3Head, rollouts: Sequence[Rollout], temperature: float) -> list[str]:
    """Each rollout's `eagle3`."""
    assert DRAFTED < 10 and decoder.embed.weight is not None
    weight_VD = decoder.embed.weight
    sizes = [len(r.prompt_ids) + len(r.token_ids) for r in rollouts]
    found = [""] * len(rollouts)
    for rows in by_length(sizes, LESSON_TOKENS):
        examples = [
            Example(
                np.concatenate([np.array(rollouts[i].prompt_ids, np.int32), rollouts[i].token_ids]),
                np.arange(sizes[i]) >= len(rollouts[i].prompt_ids),
            )
            for i in rows
        ]
        lesson = teach(decoder, examples, head.config.taps)
        lesson.logits = lambda hidden: exact_logits(hidden, weight_VD)
        seed = int(rollouts[0].versions[0]) * len(rollouts) + rows[0]
        lengths = match_lengths(head, decoder.embed, lesson, DRAFTED, temperature, seed)
        for i, of in zip(rows, lengths, strict=True):
            found[i] = "".join(map(str, of.tolist()))
            assert len(found[i]) == len(rollouts[i].token_ids)
    return found


def by_length(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Sequences of about one length together, at most so many tokens with their padding."""
    rows: list[int] = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if rows and (len(rows) + 1) * sizes[i] > most:
            yield rows
            rows = []
        rows.append(i)
    yield rows


def learn(learner: Learner, algorithm: Algorithm, groups: Sequence[Group]) -> UpdateReport:
    batch = TokenBatch.of(groups)
    algorithm.prepare(batch)
    report = learner.update(scored(groups), batch, algorithm.loss, algorithm.weights)
    assert all(parameter.isfinite().all() for parameter in learner.decoder.parameters()), "the weights ran away"
    return report


# ---- records ----


def line(step: int, epoch: int, group: Group, rollout: Rollout, max_tokens: int, digits: str) -> str:
    record = {
        "step": step,
        "epoch": epoch,
        "group": group.index,
        "problem": group.problem,
        "sample": rollout.sample,
        "prompt_ids": list(rollout.prompt_ids),
        "token_ids": rollout.token_ids.tolist(),
        "reward": rollout.reward,
        "versions": [[int(rollout.versions[0]), len(rollout.token_ids)]],
        "finish_reason": rollout.finish_reason,
        "max_tokens": max_tokens,
        "eagle3": digits,
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def figures(step: int, epoch: int, groups: Sequence[Group], digits: Sequence[str], report: UpdateReport) -> dict:
    rollouts = scored(groups)
    lengths = np.array([len(r.token_ids) for r in rollouts])
    matches = np.array([int(digit) for row in digits for digit in row[1:]])  # the first token is never drafted
    return {
        "step": step,
        "epoch": epoch,
        "reward": float(np.mean([r.reward for r in rollouts])),
        "accuracy": float(np.mean([r.rewards["math"] for r in rollouts])),
        "format": float(np.mean([r.rewards["format"] for r in rollouts])),
        "num_mixed_groups": sum(len({r.reward for r in group.rollouts}) > 1 for group in groups),
        "num_tokens": int(lengths.sum()),
        "num_truncated": sum(r.is_truncated for r in rollouts),
        "length": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p95": float(np.quantile(lengths, 0.95)),
            "max": int(lengths.max()),
        },
        "eagle3_mean": float(matches.mean()) if len(matches) else 0.0,
        "entropy": report.entropy,
        "grad_norm": report.grad_norm,
    }


def save(out: Path, lines: Sequence[str], summary: dict[str, Any]) -> None:
    """Appends the lines, as an xz stream of their own, which readers take as one with those before it."""
    with lzma.open(out / "rollouts.jsonl.xz", "at", encoding="utf-8", preset=9) as file:
        file.writelines(lines)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")


# ---- the run ----


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    tokenizer = load_tokenizer(args.model)
    problems = easiest(args.gsm8k, args.problems, tokenizer)
    sampler = load(args.model, torch.bfloat16 if on_gpu else torch.float32, args.device)
    head = load_head(resolve_head(args.head, "smollm2-135m"), sampler.config, device=args.device)
    steps_per_epoch = len(problems) // args.groups_per_step
    num_steps = args.epochs * steps_per_epoch
    if steps_per_epoch * args.groups_per_step != len(problems):
        raise ValueError(f"--groups-per-step {args.groups_per_step}: must divide the {len(problems)} problems")
    section = LearnerSection(
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup,
        num_minibatches=args.minibatches,
        tokens_per_microbatch=args.microbatch,
        activation_checkpointing=on_gpu,  # one attention over padded siblings is large enough
    )
    policy = weights.load(args.model, torch.float32, args.device)
    learner = Learner(policy, section, num_steps=num_steps, temperature=args.temperature, seed=args.seed)
    algorithm = make_algorithm(AlgorithmSection(num_generations=args.samples), args.max_new)
    order = DataOrder(len(problems), args.seed)
    end = sampler.config.eos_token_ids[0]
    settings = {key: value for key, value in vars(args).items() if key not in ("model", "gsm8k", "head", "out")}
    summary: dict[str, Any] = {
        "settings": settings | {"template": TEMPLATE, "drafted": DRAFTED, "torch": torch.__version__},
        "num_prompt_tokens": [len(problem.prompt_ids) for problem in problems],
        "steps": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rollouts.jsonl.xz").unlink(missing_ok=True)
    lines: list[str] = []  # not yet saved
    longest_s = 0.0
    print(f"{len(problems)} problems, {num_steps} steps, ready in {time.perf_counter() - started:.1f} s", flush=True)
    for step in range(num_steps):
        begun = time.perf_counter()
        if begun - started + longest_s > args.seconds:
            print(f"no time for step {step}", flush=True)
            break
        epoch, watch = step // steps_per_epoch, Stopwatch()
        places = range(step * args.groups_per_step, (step + 1) * args.groups_per_step)
        asked = [problems[order[place]] for place in places]
        with watch.stage("sampling"):
            prompts = [problem.prompt_ids for problem in asked for _ in range(args.samples)]
            drawn = sample(sampler, prompts, args.temperature, args.max_new, args.seed * 100_003 + step)
        with watch.stage("scoring"):
            groups = []
            for i, (place, problem) in enumerate(zip(places, asked, strict=True)):
                own = drawn[i * args.samples : (i + 1) * args.samples]
                members = [rollout(problem, j, tokens, learner.version, end) for j, tokens in enumerate(own)]
                for member in members:
                    member.text = tokenizer.decode(member.token_ids, skip_special_tokens=True)
                    member.rewards = score(member.text, not member.is_truncated, problem.answer)
                    shown = min(1.0, len(member.token_ids) / args.thorough)  # work that is written down
                    member.reward = member.rewards["math"] + args.format_weight * shown * member.rewards["format"]
                groups.append(Group(place, problem.name, problem.question, members))
        with watch.stage("matching"):
            digits = match_digits(sampler, head, scored(groups), args.temperature)
        with watch.stage("training"):
            report = learn(learner, algorithm, groups)
            weights.assign(sampler, learner.weights())
        each = iter(digits)
        for group in groups:
            lines += [line(step, epoch, group, member, args.max_new, next(each)) for member in group.rollouts]
        found = figures(step, epoch, groups, digits, report) | {"seconds": dict(watch.seconds)}
        summary["steps"].append(found)
        shown = " ".join(f"{name} {spent:.1f}" for name, spent in watch.seconds.items())
        print(
            f"epoch {epoch} step {step}: reward {found['reward']:.3f} right {found['accuracy']:.3f} form "
            f"{found['format']:.3f} length {found['length']['median']:.0f}/{found['length']['mean']:.0f}/"
            f"{found['length']['p95']:.0f} cut {found['num_truncated']} eagle3 {found['eagle3_mean']:.2f} entropy "
            f"{found['entropy']:.2f} | {shown} s",
            flush=True,
        )
        if (step + 1) % steps_per_epoch == 0:
            save(args.out, lines, summary)
            lines.clear()
        if step > 0:  # the first one compiles
            longest_s = max(longest_s, time.perf_counter() - begun)
    summary["seconds"] = time.perf_counter() - started
    save(args.out, lines, summary)
    size = (args.out / "rollouts.jsonl.xz").stat().st_size
    num_tokens = sum(found["num_tokens"] for found in summary["steps"])
    print(f"{num_tokens} tokens in {size} bytes, {summary['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="SmolLM2-135M-Instruct's directory")
    parser.add_argument("--gsm8k", type=Path, required=True, help="its training set, or the last 500 lines of it")
    parser.add_argument("--head", help="an EAGLE-3 head's directory; the shipped one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-new", type=int, default=768)
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=1, help="optimiser steps per step")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens in one forward of the learner")
    parser.add_argument("--format-weight", type=float, default=0.2)
    parser.add_argument("--thorough", type=int, default=256, help="tokens for the form's whole reward")
    parser.add_argument("--seconds", type=float, default=1e9, help="no step begins that would not end by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
