"""Makes the prompts for training the shipped head, as token ids: GSM8K questions, reasoning-gym problems, templates.

    python benchmarks/shipped_head/prompts.py --gsm8k gsm8k-train.jsonl --out prompts/

Writes train.npz, held_out.npz and magpie.json (the chat template around a user's turn, with which the model generates
its own prompts). Held out are GSM8K's last 500 questions, reasoning-gym problems of other seeds, and a fifth of the
one-digit sums of the quickstart. No held-out prompt is used for training.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import reasoning_gym
from records import Record, write
from topics import TEMPLATES, TOPICS

from paceline.chat.messages import Prompt, as_messages
from paceline.chat.template import encode
from paceline.model import store

TASKS = [
    "aiw",
    "base_conversion",
    "basic_arithmetic",
    "calendar_arithmetic",
    "caesar_cipher",
    "coin_flip",
    "count_primes",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "knights_knaves",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_filtering",
    "number_sequence",
    "number_sorting",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "syllogism",
    "time_intervals",
    "word_sorting",
]
QUICKSTART = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SYSTEM = "Answer with a number."
STEPS = ("Think step by step.", "Let's think step by step.", "Give the final answer after ####.")
LONGEST = 320  # tokens of a prompt


def gym(task: str, size: int, seed: int, **params: int) -> list[str]:
    return [str(entry["question"]) for entry in reasoning_gym.create_dataset(task, size=size, seed=seed, **params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(0)
    tokenizer = store.load_tokenizer(store.resolve(args.model))
    questions = [json.loads(line)["question"] for line in args.gsm8k.read_text("utf-8").splitlines()]
    train: list[tuple[str, Prompt]] = []
    for question in questions[:-500]:
        train.append(("gsm8k", question))
        draw = rng.random()
        if draw < 0.25:  # common variants of the prompt
            train.append(("gsm8k", f"{question}\n{rng.choice(STEPS)}"))
        elif draw < 0.35:
            train.append(("gsm8k", as_messages(question, SYSTEM)))
    held_out: list[tuple[str, Prompt]] = [("gsm8k", question) for question in rng.sample(questions[-500:], 200)]
    for task in TASKS:
        train += [("gym", question) for question in gym(task, args.per_task, seed=1)]
        held_out += [("gym", question) for question in gym(task, 6, seed=1_000_003)]
    for params in ({}, QUICKSTART):
        for i, question in enumerate(sorted(set(gym("chain_sum", 1000, seed=1, **params)))):
            part = held_out if i % 5 == 0 and params else train
            part.append(("sums", as_messages(question, SYSTEM)))
            if part is train:
                part.append(("sums", question))
    held_out += [("sums", as_messages(question, SYSTEM)) for question in gym("chain_sum", 24, seed=1_000_003)]
    train += [("general", template.format(topic)) for template in TEMPLATES for topic in TOPICS]
    args.out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    for name, asked in (("held_out", held_out), ("train", train)):
        records = []
        for group, prompt in asked:
            ids = np.array(encode(tokenizer, prompt), np.uint16)
            if len(ids) <= LONGEST and ids.tobytes() not in seen:
                seen.add(ids.tobytes())
                records.append(Record(group, ids, len(ids)))
        write(args.out / f"{name}.npz", records)
        groups = [record.group for record in records]
        print(name, {group: groups.count(group) for group in sorted(set(groups))})
    before, after = tokenizer.apply_chat_template(as_messages("@@"), add_generation_prompt=True, tokenize=False).split(
        "@@"
    )
    ends = {part: tokenizer.encode(text, add_special_tokens=False) for part, text in (("b", before), ("a", after))}
    (args.out / "magpie.json").write_text(json.dumps({"before": ends["b"], "after": ends["a"]}), "utf-8")


if __name__ == "__main__":
    main()
