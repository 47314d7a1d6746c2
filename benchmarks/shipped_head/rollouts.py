"""Generates the target's completions of the prompts, and of prompts that it generates itself, on one GPU.

    python benchmarks/shipped_head/rollouts.py --model DIR --prompts prompts/ --out rollouts/

All rows of a static batch are at the same position, so that attention needs no mask and no paging. Rows with longer
prompts get them token by token, and finished rows are removed from time to time. The model's own prompts are made as in
Magpie (arXiv 2406.08464): it completes the beginning of a user's turn.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fast import CompiledOps, exact_logits
from records import Record, read, write
from torch import Tensor

from paceline.model import weights
from paceline.model.attention import PaddedAttention
from paceline.model.decoder import Decoder

TEMPERATURES = ((0.58, 1.0), (0.30, 0.0), (0.12, 0.0))  # shares of: 1; 0.5 … 0.8; greedy
SAMPLES = {"gsm8k": 4, "gym": 2, "sums": 3, "general": 2}  # rollouts per prompt


class StaticAttention:
    """Keys and values of rows that are all at position `at`. It is a tensor, so that one CUDA graph fits all steps."""

    def __init__(self, decoder: Decoder, num_rows: int, length: int) -> None:
        c = decoder.config
        shape = num_rows, length, c.num_kv_heads, c.head_dim
        like = {"dtype": decoder.dtype, "device": decoder.device}
        self.k = [torch.zeros(shape, **like) for _ in range(c.num_layers)]
        self.v = [torch.zeros(shape, **like) for _ in range(c.num_layers)]
        self.at = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self.num_rows, self.length = num_rows, length
        self.prefilling = True

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        k, v = (x.unflatten(0, (self.num_rows, -1)) for x in (k_TGE, v_TGE))
        if self.prefilling:
            self.k[layer][:, : k.shape[1]] = k
            self.v[layer][:, : v.shape[1]] = v
            return PaddedAttention(self.num_rows)(layer, q_THE, k_TGE, v_TGE)
        k = self.k[layer].index_copy_(1, self.at, k)
        v = self.v[layer].index_copy_(1, self.at, v)
        if q_THE.is_cuda and q_THE.dtype == torch.bfloat16:
            rows = torch.arange(self.num_rows + 1, dtype=torch.int32, device=q_THE.device)
            used = (self.at + 1).int().repeat(self.num_rows)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            out = torch.ops.aten._flash_attention_forward(
                q_THE.contiguous(), k, v, rows, rows * self.length, 1, self.length, 0.0, False, False, seqused_k=used
            )
            return out[0].flatten(1)
        hidden = torch.arange(self.length, device=q_THE.device) > self.at
        q = q_THE.unflatten(1, (k.shape[2], -1)) / math.sqrt(k.shape[3])  # [B, G, H / G, E]
        scores = torch.einsum("bgre,blge->bgrl", q, k).masked_fill(hidden, -torch.inf)
        return torch.einsum("bgrl,blge->bgre", scores.softmax(-1), v).flatten(1)

    def keep(self, rows: Tensor) -> None:
        for cache in (self.k, self.v):
            for layer in range(len(cache)):
                cache[layer] = cache[layer][rows]
        self.num_rows = len(rows)


class Batch:
    """Rows that are all at the same position. `fed` has the rows' tokens at position `at`."""

    def __init__(
        self, decoder: Decoder, prompts: list[np.ndarray], temperatures: np.ndarray, max_new: int, end: int
    ) -> None:
        device = decoder.device
        self.decoder, self.end = decoder, end
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        self.ends = self.lengths + max_new
        self.shortest, self.longest = int(self.lengths.min()), int(self.ends.max())
        tokens = np.zeros((len(prompts), self.longest), np.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.tokens = torch.as_tensor(tokens, device=device)
        inverse = 1 / np.maximum(temperatures, 1e-4)
        self.inverse_temperature = torch.as_tensor(inverse, dtype=torch.float32, device=device).unsqueeze(1)
        self.done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.rows = torch.arange(len(prompts), device=device)  # the rows' original indices
        self.attention = StaticAttention(decoder, len(prompts), self.longest)
        self.attention.at.fill_(self.shortest - 1)
        known = self.shortest - 1  # tokens before the first one fed
        positions = torch.arange(known, device=device).repeat(len(prompts))
        decoder(self.tokens[:, :known].flatten(), positions, self.attention)
        self.attention.prefilling = False
        self.fed = self.tokens[:, known].clone()

    def step(self) -> None:
        at = self.attention.at
        hidden = self.decoder(self.fed, at.repeat(len(self.fed)), self.attention).hidden
        assert self.decoder.embed.weight is not None
        logits = exact_logits(hidden, self.decoder.embed.weight) * self.inverse_temperature
        drawn = (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)
        following = at + 1
        given = following < self.lengths
        there = self.tokens.index_select(1, following).squeeze(1)
        token = torch.where(given, there, drawn)
        self.tokens.index_copy_(1, following, torch.where(self.done, there, token).unsqueeze(1))
        finished = ~given & ~self.done & ((token == self.end) | (following + 1 >= self.ends))
        self.ends.copy_(torch.where(finished, following + 1, self.ends))
        self.done |= finished
        self.fed.copy_(token)
        at += 1

    def keep(self, rows: Tensor) -> None:
        for name in ("lengths", "ends", "tokens", "inverse_temperature", "done", "rows", "fed"):
            setattr(self, name, getattr(self, name)[rows])
        self.attention.keep(rows)

    def captured_step(self) -> Callable[[], None]:
        """The step; on CUDA as one graph."""
        if self.fed.device.type != "cuda":
            return self.step
        kept = [x.clone() for x in (self.ends, self.tokens, self.done, self.fed, self.attention.at)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()  # compiles kernels and allocates memory
        torch.cuda.current_stream().wait_stream(side)
        for x, old in zip((self.ends, self.tokens, self.done, self.fed, self.attention.at), kept, strict=True):
            x.copy_(old)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


@torch.no_grad()
def sample(
    decoder: Decoder, prompts: list[np.ndarray], temperatures: np.ndarray, max_new: int, end: int, seed: int
) -> list[np.ndarray]:
    """Prompt and completion of every row, including the end token if it was emitted."""
    torch.manual_seed(seed)
    batch = Batch(decoder, prompts, temperatures, max_new, end)
    tokens, ends = batch.tokens.clone(), batch.ends.clone()
    step = batch.captured_step()
    for at in range(batch.shortest - 1, batch.longest - 1):
        step()
        if at % 16 == 0 or at == batch.longest - 2:
            tokens[batch.rows], ends[batch.rows] = batch.tokens, batch.ends
            left = (~batch.done).nonzero().flatten()
            if len(left) == 0:
                break
            if len(left) < 0.8 * len(batch.rows):
                step = batch.step  # frees the graph and its memory
                batch.keep(left)
                step = batch.captured_step()
    out = tokens.cpu().numpy()
    return [out[row, :stop].astype(np.uint16) for row, stop in enumerate(ends.tolist())]


def rollouts(
    decoder: Decoder, jobs: list[Record], max_new: int, batch: int, end: int, seed: int, seconds: float = 1e9
) -> list[Record]:
    """Completions of the jobs: prompts, each with its temperature. Stops after `seconds` with the results so far."""
    by_length = sorted(range(len(jobs)), key=lambda i: len(jobs[i].tokens))
    groups = [by_length[start : start + batch] for start in range(0, len(jobs), batch)]
    order = np.random.default_rng(seed).permutation(len(groups))
    out: list[Record] = []
    begin = time.time()
    for turn in order:
        part = [jobs[i] for i in groups[turn]]
        temperatures = np.array([job.temperature for job in part])
        found = sample(decoder, [job.tokens for job in part], temperatures, max_new, end, seed + int(turn))
        out += [Record(j.group, t, j.num_prompt, j.temperature) for j, t in zip(part, found, strict=True)]
        num_new = sum(len(r.tokens) - r.num_prompt for r in out)
        past = time.time() - begin
        print(f"{len(out)}/{len(jobs)} rollouts, {num_new / 1e6:.2f}M new tokens, {num_new / past / 1e3:.0f}k/s")
        if past > seconds:
            break
    return out


def magpie(decoder: Decoder, path: Path, number: int, batch: int, end: int, seed: int) -> list[Record]:
    """Prompts that the model generated itself, without duplicates."""
    frame = json.loads(path.read_text("utf-8"))
    before, after = np.array(frame["before"], np.uint16), np.array(frame["after"], np.uint16)
    jobs = [Record("general", before, len(before))] * number
    seen: dict[bytes, Record] = {}
    for record in rollouts(decoder, jobs, 128, batch, end, seed):
        asked = record.tokens[len(before) :]
        if asked[-1] == end and 6 <= len(asked) <= 120:
            prompt = np.concatenate([before, asked[:-1], after])
            seen[prompt.tobytes()] = Record("general", prompt, len(prompt))
    return list(seen.values())


def draw_temperatures(number: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(3, number, p=[share for share, _ in TEMPERATURES])
    return np.choose(kinds, [np.ones(number), rng.uniform(0.5, 0.8, number), np.zeros(number)])


def load(path: str, dtype: torch.dtype, device: str) -> Decoder:
    decoder = weights.load(path, dtype=dtype, device=device).requires_grad_(False)
    if device == "cuda":
        decoder.ops = CompiledOps()
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new", type=int, default=320)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--magpie", type=int, default=24576)
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit for the training rollouts")
    parser.add_argument("--limit", type=int, default=10**9, help="use at most N prompts, for a quick test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-train", action="store_true", help="no held-out rollouts")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    decoder = load(args.model, half, args.device)
    end = decoder.config.eos_token_ids[0]
    asked = magpie(decoder, args.prompts / "magpie.json", min(args.magpie, args.limit), args.batch, end, args.seed + 7)
    num_held = min(200, len(asked) // 4)
    train = read(args.prompts / "train.npz")
    rng = np.random.default_rng(args.seed + 3)
    jobs = [p for p in [*train, *asked[num_held:]] for _ in range(SAMPLES[p.group])]
    jobs = [jobs[i] for i in rng.permutation(len(jobs))[: args.limit]]
    temperatures = draw_temperatures(len(jobs), args.seed + 5)
    jobs = [Record(j.group, j.tokens, j.num_prompt, float(t)) for j, t in zip(jobs, temperatures, strict=True)]
    write(args.out / "train.npz", rollouts(decoder, jobs, args.max_new, args.batch, end, args.seed + 11, args.seconds))
    if args.only_train:
        return
    # Held-out rollouts come from a target in float32, as in the engine.
    decoder = load(args.model, torch.float32, args.device)
    held = [*read(args.prompts / "held_out.npz"), *asked[:num_held]]
    held = [held[i] for i in rng.permutation(len(held))[: args.limit]]
    jobs = [Record(p.group, p.tokens, p.num_prompt, t) for t in (1.0, 0.6, 0.0) for p in held]
    write(args.out / "held_out.npz", rollouts(decoder, jobs, min(256, args.max_new), 1024, end, args.seed + 13))


if __name__ == "__main__":
    main()
