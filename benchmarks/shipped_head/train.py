"""Trains a head, EAGLE-3 or DSpark, on recorded rollouts of its target and measures it on held-out ones.

    python benchmarks/shipped_head/train.py --model DIR --rollouts rollouts/ --out head/ --num-steps 4000

The target is frozen in bfloat16; the head's weights are float32 under autocast. The head's LM head is initialised with
rows of the target's; the other weights are random. `--draft` takes settings of `[draft]`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fast import CompiledOps, exact_logits
from records import Record, read
from rollouts import load

from paceline.config import DraftSection
from paceline.draft import learner as learner_module
from paceline.draft import loss as loss_module
from paceline.draft.acceptance import Acceptance, measure
from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.draft.head_init import new_head, new_shape
from paceline.draft.learner import DraftLearner
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead

MEASURED = {"gsm8k": ("gsm8k",), "gym": ("gym", "sums"), "both": ("gsm8k", "gym", "sums"), "general": ("general",)}


def example(record: Record) -> Example:
    return Example(record.tokens.astype(np.int32), np.arange(len(record.tokens)) >= record.num_prompt)


def head_batch_of(target: Decoder, records: list[Record], aux_layers: tuple[int, ...]) -> HeadBatch:
    head_batch = make_head_batch(target, [example(record) for record in records], aux_layers)
    weight = target.embed.weight
    assert weight is not None
    head_batch.logits = lambda hidden: exact_logits(hidden, weight)
    return head_batch


def batches(records: list[Record], num_tokens: int, seed: int) -> Iterator[list[Record]]:
    """Endless batches of sequences with similar lengths, with at most `num_tokens` tokens including padding."""
    rng = np.random.default_rng(seed)
    lengths = np.array([len(record.tokens) for record in records])
    while True:
        cut: list[list[int]] = [[]]
        for i in np.argsort(lengths + rng.uniform(0, 8, len(lengths))):
            longest = max(lengths[i], max((lengths[j] for j in cut[-1][-64:]), default=0))
            if (len(cut[-1]) + 1) * longest > num_tokens:
                cut.append([])
            cut[-1].append(int(i))
        whole = [rows for rows in cut if sum(lengths[rows]) > 0.7 * num_tokens] or cut
        for turn in rng.permutation(len(whole)):
            yield [records[i] for i in whole[turn]]


def vocabulary(records: list[Record], size: int, ends: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """The tokens that the target emits most often, and its end tokens. Tokens of prompts count less."""
    count = np.zeros(vocab_size)
    for part, weight in ((slice(None), 0.1), (None, 0.9)):
        tokens = [r.tokens if part else r.tokens[r.num_prompt :] for r in records]
        count += weight * np.bincount(np.concatenate(tokens), minlength=vocab_size)
    count[[0, 1, 2, *ends]] = np.inf
    return torch.as_tensor(np.sort(np.argsort(-count, kind="stable")[:size]))


def coverage(records: list[Record], draft_ids: torch.Tensor) -> float:
    """Share of the emitted tokens that are in the draft vocabulary."""
    emitted = np.concatenate([np.zeros(0, np.uint16), *(r.tokens[r.num_prompt :] for r in records)])
    return float(np.isin(emitted, draft_ids.cpu().numpy()).mean())


def train(
    target: Decoder,
    records: list[Record],
    draft_ids: torch.Tensor,
    section: DraftSection,
    num_steps: int,
    sharpen: float = 0.0,
    log_every: int = 100,
    intermediate: int | None = None,
    begin_with: str = "head",
    init: Path | None = None,
    seconds: float | None = None,
) -> tuple[DraftHead, dict[str, Any]]:
    """`sharpen` is the share of the steps, at the end, that use the acceptance loss. With `seconds`, the number of
    steps is set again once their speed is known, so that the schedule ends in time."""
    config = replace(new_shape(section, target.config), draft_vocab_size=len(draft_ids))
    if intermediate:
        config = replace(config, layer=replace(config.layer, intermediate_size=intermediate))
    head = new_head(config, draft_ids, section.seed, torch.float32, target.device)
    with torch.no_grad():
        assert head.lm_head.weight is not None and target.embed.weight is not None
        if begin_with in ("norm", "head"):
            head.lm_head.weight.copy_(target.embed.weight[draft_ids.to(target.device)])
        if begin_with == "norm":
            head.norm.copy_(target.norm)
    if init:
        head.load_state_dict(load_tensors(init))
    if target.device.type == "cuda":
        head.ops = CompiledOps()
    learner = DraftLearner(head, section, num_steps=num_steps)
    stream = batches(records, section.tokens_per_batch, section.seed)
    start = begin = time.time()
    step, num_tokens, curve = 0, 0, []
    while step < num_steps:
        if step == num_steps - int(sharpen * num_steps):
            learner.section = section.model_copy(update={"loss": "acceptance"})
        batch = next(stream)
        report = learner.update(head_batch_of(target, batch, config.aux_layers), target.embed)
        num_tokens += sum(len(r.tokens) for r in batch)
        if step == 20:  # after compilation
            begin, num_tokens = time.time(), 0
        if seconds and step in (60, 200, 600, 1500):
            speed = (step - 20) / (time.time() - begin)
            num_steps = max(step + 2, step + int((seconds - (time.time() - start)) * speed))
            learner.optimizer.num_steps = num_steps
            print(f"{num_steps} steps in all")
        if seconds and time.time() - start > 1.05 * seconds:
            num_steps = step + 1
        if step % log_every == 0 or step == num_steps - 1:
            rate = num_tokens / (time.time() - begin + 1e-9)
            overlap = [round(o, 4) for o in report.overlap]
            print(
                f"step {step} loss {report.loss:.4f} overlap {overlap} norm {report.grad_norm:.3f} {rate / 1e3:.0f}k/s"
            )
            curve.append({"step": step, "loss": report.loss, "overlap": overlap, "grad_norm": report.grad_norm})
        step += 1
    return head, {"curve": curve, "tokens_per_s": rate, "seconds": time.time() - start, "num_steps": num_steps}


def rounded(head: DraftHead) -> DraftHead:
    """The head as it is loaded from disk: weights rounded to bfloat16, in float32."""
    copy = type(head)(head.config).to(head.device)  # type: ignore[arg-type]
    copy.load_state_dict(
        {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in head.state_dict().items()}
    )
    copy.ops = head.ops
    return copy.requires_grad_(False)


def evaluate(
    head: DraftHead, target: Decoder, held_out: list[Record], ks: tuple[int, ...], temperatures: tuple[float, ...]
) -> dict[str, Any]:
    """table[set]["T=1.0"]["k=3"][kind] = mean length, per position and counts, on sequences of the same temperature."""
    table: dict[str, Any] = {name: {} for name in MEASURED}
    for temperature in temperatures:
        for k in ks:
            found: dict[str, dict[str, Acceptance]] = {}
            for group in sorted({r.group for r in held_out}):
                some = sorted((r for r in held_out if r.group == group and r.temperature == temperature), key=_length)
                found[group] = {kind: Acceptance.zeros(k) for kind in ("coupled", "greedy", "sampled")}
                for start in range(0, len(some), 64):
                    head_batch = head_batch_of(target, some[start : start + 64], head.config.aux_layers)
                    for kind, part in measure(head, target.embed, head_batch, k, temperature, seed=start).items():
                        found[group][kind].add(part)
            for name, groups in MEASURED.items():
                cell = table[name].setdefault(f"T={temperature}", {}).setdefault(f"k={k}", {})
                for kind in ("coupled", "greedy", "sampled"):
                    total = Acceptance.zeros(k)
                    for group in groups:
                        if group in found:
                            total.add(found[group][kind])
                    cell[kind] = {
                        "mean_length": round(total.mean_length, 4),
                        "per_position": [round(x, 4) for x in total.per_position],
                        "num_drafts": total.num_drafts,
                    }
    return table


def _length(record: Record) -> int:
    return len(record.tokens)


def brief(table: dict[str, Any], k: int = 3) -> str:
    """Acceptance lengths of rule `coupled` at k, by set and temperature."""
    return " | ".join(
        f"{name} " + " ".join(f"{t}: {cells[f'k={k}']['coupled']['mean_length']:.3f}" for t, cells in by.items())
        for name, by in table.items()
    )


def save(head: DraftHead, out: Path, figures: dict[str, Any], max_bytes: int = 15 * 2**20) -> None:
    """Write shards with parameter names in bfloat16, head.json and figures.json. A tensor that is too large for a shard
    is split by rows: name.0, name.1, …"""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    pieces: list[tuple[str, torch.Tensor]] = []
    for name, tensor in head.state_dict().items():
        tensor = tensor.bfloat16() if tensor.is_floating_point() else tensor
        num = -(-tensor.nbytes // (max_bytes - 4096))
        parts = tensor.cpu().chunk(num)
        pieces += [(f"{name}.{i}" if num > 1 else name, part.contiguous()) for i, part in enumerate(parts)]
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in pieces:
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_bytes - 4096:
            shards.append({})
        shards[-1][name] = tensor
    for i, shard in enumerate(shards):
        save_file(shard, out / f"head-{i}.safetensors")
    (out / "head.json").write_text(json.dumps(asdict(head.config), indent=1), "utf-8")
    (out / "figures.json").write_text(json.dumps(figures, indent=1), "utf-8")


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors that `save` wrote, in float32."""
    from safetensors.torch import load_file

    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted(directory.glob("head-*.safetensors")):
        for name, tensor in load_file(path).items():
            found.setdefault(re.sub(r"\.\d+$", "", name), []).append(tensor)
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in whole.items()}


def compile_learning() -> None:
    """Compile the learner's two elementwise passes over the vocabulary into one kernel each."""
    loss_module.compare = torch.compile(loss_module.compare)
    learner_module.probabilities = torch.compile(learner_module.probabilities)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rollouts", type=Path, nargs="+", required=True)
    parser.add_argument("--groups", default="gsm8k,gym,sums,general")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, help="instead of --num-steps: the time of the training")
    parser.add_argument("--sharpen", type=float, default=0.0, help="share of steps with the acceptance loss")
    parser.add_argument("--draft", type=json.loads, default={}, help="settings of [draft], as JSON")
    parser.add_argument("--init", type=Path, help="start from a head of this script, with the same vocabulary")
    parser.add_argument("--temperatures", type=json.loads, default=[1.0, 0.6, 0.0])
    parser.add_argument("--held-out", type=Path, help="rollouts to measure on (default: those in --rollouts)")
    parser.add_argument("--ks", type=json.loads, default=[1, 3, 5, 7])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        compile_learning()
    section = DraftSection(**args.draft)
    target = load(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    everything = [record for path in args.rollouts for record in read(path / "train.npz")]
    records = [r for r in everything if r.group in args.groups.split(",")]
    c = target.config
    draft_ids = vocabulary(records, section.draft_vocab_size, c.eos_token_ids, c.vocab_size)
    if args.init:
        draft_ids = load_tensors(args.init)["draft_ids"]
    head, log = train(
        target, records, draft_ids, section, args.num_steps, args.sharpen, init=args.init, seconds=args.seconds
    )
    held_out = read(args.held_out or args.rollouts[0] / "held_out.npz")
    figures = {
        "groups": args.groups,
        "num_rollouts": len(records),
        "sharpen": args.sharpen,
        "torch": torch.__version__,
        "draft": args.draft,
        "coverage": {
            name: coverage([r for r in held_out if r.group in of], draft_ids) for name, of in MEASURED.items()
        },
        "log": log,
    }
    save(head, args.out, figures)
    exact = load(args.model, torch.float32, args.device)
    figures["acceptance"] = evaluate(rounded(head), exact, held_out, tuple(args.ks), tuple(args.temperatures))
    print(brief(figures["acceptance"]))
    save(head, args.out, figures)


if __name__ == "__main__":
    main()
