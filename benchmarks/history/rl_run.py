"""Records an RL run of several epochs for replay: GRPO with SmolLM2-135M on GSM8K questions, on one GPU.

    python benchmarks/history/rl_run.py --model DIR --gsm8k gsm8k-train.jsonl --temperature 1.0 --out run/

After every epoch it writes `rollouts.jsonl.xz` (one line per sample, ordered by step, group and sample; the keys of
paceline/rl/records.py that replay needs, and `head_accepted`) and `summary.json`. Every step is on-policy: the
learner's float32 weights are copied to the sampler, in bfloat16 on a GPU, before it samples.

`head_accepted` has one digit per token: digit j is the number of accepted tokens if the shipped head drafts 7 tokens
after j emitted ones, under the policy that emitted them.
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

from accepted_lengths import accepted_lengths
from fast import exact_logits
from rollouts import Batch, load

from paceline.chat.template import encode
from paceline.config import AlgorithmSection, LearnerSection
from paceline.draft.head_batch import Example, make_head_batch
from paceline.model import weights
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import load_head, resolve_head
from paceline.model.store import load_tokenizer
from paceline.rl.algorithms import Algorithm, make_algorithm
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner, UpdateReport
from paceline.rl.order import DataOrder
from paceline.rl.stage_timer import StageTimer
from paceline.types import Group, Rollout

HELD_OUT = 500  # the last questions of the file, which the shipped head was not trained on
# A small model follows an example better than an instruction: asked to box the result, it does so once in 16 times.
TEMPLATE = """\
Question: Tom has 3 boxes with 4 pens each. He gives 5 pens away. How many pens are left?
Answer: Tom has 3 * 4 = 12 pens. After giving 5 away, he has 12 - 5 = 7 pens left. The answer is 7.

Question: {}
Answer:"""
CONCLUSION = re.compile(r"answer is:?\s*\$?(-?\d[\d,]*(?:\.\d+)?)[^\d\n]*\Z")  # and nothing after it
DRAFT_LENGTH = 7  # tokens per EAGLE-3 draft; at most 9, because each count is one digit
BATCH_TOKENS = 16384  # including padding, in one forward pass of the head


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    question: str
    answer: float
    prompt_ids: tuple[int, ...]


# ---- the task ----


def easiest(path: Path, num: int, tokenizer: Any) -> list[Problem]:
    """The held-out questions with the fewest steps to the answer, short ones first, so that a small model is sometimes
    right. Each is named by its position counted from the end of the file."""
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
    """`format`: the completion ended, with a conclusion as in the example. `math`: the number in it is the answer."""
    found = CONCLUSION.search(text.rstrip()) if stopped else None
    return {"math": float(found is not None and value(found[1]) == answer), "format": float(found is not None)}


# ---- a step ----


@torch.no_grad()
def sample(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], temperature: float, max_new: int, seed: int
) -> list[np.ndarray]:
    """A completion of each prompt, including its end token if it was emitted. Finished rows stay in the batch: a batch
    this small takes as long without them, and its CUDA graph is captured only once."""
    torch.manual_seed(seed)
    temperatures = np.full(len(prompts), temperature)
    batch = Batch(decoder, [np.array(p) for p in prompts], temperatures, max_new, decoder.config.eos_token_ids[0])
    step = batch.captured_step()
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
        logprobs=np.zeros(num),  # not needed: the updates are on-policy, without importance ratios
        versions=np.full(num, version, np.int32),
        provenance=np.zeros(num, np.uint8),
        sources=np.full(num, 255, np.uint8),
        drafters=(),
        finish_reason="stop" if tokens[-1] == end else "length",
    )


def match_digits(decoder: Decoder, head: Eagle3Head, rollouts: Sequence[Rollout], temperature: float) -> list[str]:
    """The `eagle3` digits of each rollout."""
    assert DRAFT_LENGTH < 10 and decoder.embed.weight is not None
    weight_VD = decoder.embed.weight
    sizes = [len(r.prompt_ids) + len(r.token_ids) for r in rollouts]
    found = [""] * len(rollouts)
    for rows in by_length(sizes, BATCH_TOKENS):
        examples = [
            Example(
                np.concatenate([np.array(rollouts[i].prompt_ids, np.int32), rollouts[i].token_ids]),
                np.arange(sizes[i]) >= len(rollouts[i].prompt_ids),
            )
            for i in rows
        ]
        head_batch = make_head_batch(decoder, examples, head.config.aux_layers)
        head_batch.logits = lambda hidden: exact_logits(hidden, weight_VD)
        seed = int(rollouts[0].versions[0]) * len(rollouts) + rows[0]
        lengths = accepted_lengths(head, decoder.embed, head_batch, DRAFT_LENGTH, temperature, seed)
        for i, of in zip(rows, lengths, strict=True):
            found[i] = "".join(map(str, of.tolist()))
            assert len(found[i]) == len(rollouts[i].token_ids)
    return found


def by_length(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Groups of sequences with similar lengths, each with at most `most` tokens including padding."""
    rows: list[int] = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if rows and (len(rows) + 1) * sizes[i] > most:
            yield rows
            rows = []
        rows.append(i)
    yield rows


def update(learner: Learner, algorithm: Algorithm, groups: Sequence[Group]) -> UpdateReport:
    batch = TokenBatch.of(groups)
    algorithm.prepare(batch)
    report = learner.update(scored(groups), batch, algorithm.loss, algorithm.weights)
    assert all(parameter.isfinite().all() for parameter in learner.decoder.parameters()), "the weights diverged"
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
        "head_accepted": digits,
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
        "head_accepted_mean": float(matches.mean()) if len(matches) else 0.0,
        "entropy": report.entropy,
        "grad_norm": report.grad_norm,
    }


def save(out: Path, lines: Sequence[str], summary: dict[str, Any]) -> None:
    """Append the lines as a new xz stream; readers concatenate the streams of a file."""
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
        activation_checkpointing=on_gpu,  # one layer's attention over padded groups is large enough
    )
    policy = weights.load(args.model, torch.float32, args.device)
    learner = Learner(policy, section, num_steps=num_steps, temperature=args.temperature, seed=args.seed)
    algorithm = make_algorithm(AlgorithmSection(num_generations=args.samples), args.max_new)
    order = DataOrder(len(problems), args.seed)
    end = sampler.config.eos_token_ids[0]
    settings = {key: value for key, value in vars(args).items() if key not in ("model", "gsm8k", "head", "out")}
    summary: dict[str, Any] = {
        "settings": settings | {"template": TEMPLATE, "draft_length": DRAFT_LENGTH, "torch": torch.__version__},
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
            print(f"--seconds {args.seconds:g}: no time for step {step}", flush=True)
            break
        epoch, timer = step // steps_per_epoch, StageTimer()
        places = range(step * args.groups_per_step, (step + 1) * args.groups_per_step)
        asked = [problems[order[place]] for place in places]
        with timer.stage("sampling"):
            prompts = [problem.prompt_ids for problem in asked for _ in range(args.samples)]
            drawn = sample(sampler, prompts, args.temperature, args.max_new, args.seed * 100_003 + step)
        with timer.stage("scoring"):
            groups = []
            for i, (place, problem) in enumerate(zip(places, asked, strict=True)):
                own = drawn[i * args.samples : (i + 1) * args.samples]
                members = [rollout(problem, j, tokens, learner.version, end) for j, tokens in enumerate(own)]
                for member in members:
                    member.text = tokenizer.decode(member.token_ids, skip_special_tokens=True)
                    member.rewards = score(member.text, not member.is_truncated, problem.answer)
                    share = min(1.0, len(member.token_ids) / args.thorough)  # longer reasoning is rewarded more
                    member.reward = member.rewards["math"] + args.format_weight * share * member.rewards["format"]
                groups.append(Group(place, problem.name, problem.question, members))
        with timer.stage("matching"):
            digits = match_digits(sampler, head, scored(groups), args.temperature)
        with timer.stage("training"):
            report = update(learner, algorithm, groups)
            weights.assign(sampler, learner.weights())
        each = iter(digits)
        for group in groups:
            lines += [line(step, epoch, group, member, args.max_new, next(each)) for member in group.rollouts]
        found = figures(step, epoch, groups, digits, report) | {"seconds": dict(timer.seconds)}
        summary["steps"].append(found)
        shown = " ".join(f"{name} {spent:.1f}" for name, spent in timer.seconds.items())
        print(
            f"epoch {epoch} step {step}: reward {found['reward']:.3f} accuracy {found['accuracy']:.3f} format "
            f"{found['format']:.3f} length {found['length']['median']:.0f}/{found['length']['mean']:.0f}/"
            f"{found['length']['p95']:.0f} truncated {found['num_truncated']} eagle3 {found['head_accepted_mean']:.2f} "
            f"entropy {found['entropy']:.2f} | {shown} s",
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
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's training set, or its last 500 lines")
    parser.add_argument("--head", help="directory of an EAGLE-3 head (default: the shipped one)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-new", type=int, default=768)
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps per RL step")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens in one forward pass of the learner")
    parser.add_argument("--format-weight", type=float, default=0.2)
    parser.add_argument("--thorough", type=int, default=256, help="tokens needed for the full format reward")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no step that would end after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
