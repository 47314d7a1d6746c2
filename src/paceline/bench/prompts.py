"""Prompts from a file or from the small list at the end.

A prompt is a string or a list of chat messages. In a jsonl file it stands under `prompt`, or under `question`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import NEEDED, is_prompt
from paceline.tasks.task import Prompt


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a jsonl file."""
    return parse_prompts(read_lines(Path(path)), str(path))


def parse_prompts(lines: Iterable[tuple[int, str | bytes]], name: str) -> list[Prompt]:
    """`lines`: with their numbers, from 1."""
    prompts: list[Prompt] = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        prompts.append(_prompt(record, f"{name}, line {number}"))
    if not prompts:
        raise ValueError(f'{name}: no prompts in it; it needs lines like {{"prompt": "…"}}')
    return prompts


def _prompt(record: Any, where: str) -> Prompt:
    prompt = record.get("prompt", record.get("question")) if isinstance(record, dict) else None
    if not is_prompt(prompt):
        raise ValueError(f"{where}: needs `prompt` or `question`, {NEEDED}")
    return prompt


BUILTIN: tuple[str, ...] = (
    "Ann has 3 boxes with 4 apples each and eats 2 apples. How many are left? Think step by step.",
    "Write a Python function that reverses a string, then explain it.",
    "Why is the sky blue? Answer for a ten-year-old.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Show your work.",
    "Write a Python function that checks whether a number is prime.",
    "Give me five tips for learning a new language.",
    "What is 17 * 23? Work it out step by step.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "A shirt costs $40 and is reduced by 15%. What does it cost now?",
    "Write a SQL query that lists the five customers with the most orders.",
    "What should I think about before adopting a dog?",
    "The sum of three consecutive integers is 72. Which integers are they?",
    "Explain what a hash table is and when it is slow.",
    "Summarise how the water cycle works in four sentences.",
    "A rectangle is 3 cm longer than it is wide and has an area of 40 square cm. Find its sides.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a polite e-mail asking a colleague to review a document by Friday.",
    "How many seconds are there in 3 hours and 20 minutes?",
    "What is the difference between a list and a tuple in Python? Give examples.",
    "What are the main differences between a comet and an asteroid?",
    "Tom is twice as old as Ben. In 6 years they will be 30 together. How old are they now?",
    "Write a bash command that counts the lines of all .txt files in a folder.",
    "Suggest a three-day plan for a visit to a city by the sea.",
    "A recipe for 4 people needs 300 g of flour. How much is needed for 10 people?",
    "Write a JavaScript function that removes duplicates from an array.",
    "Explain how vaccines work in simple words.",
    "What is the probability of rolling a sum of 7 with two dice? List the cases.",
    "Explain binary search and write it in Python.",
    "Write a poem of eight lines about autumn rain.",
    "Solve for x: 5x - 7 = 2x + 11.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "List the planets of the solar system with one fact about each.",
    "A car uses 6 litres of fuel per 100 km. How much does it use for 250 km?",
    "Write a regular expression that matches a date like 2024-03-15 and explain its parts.",
    "What are the advantages and disadvantages of working from home?",
    "Which is larger, 3/7 or 5/12? Explain.",
    "Write a Python script that reads a CSV file and prints the mean of each column.",
    "How do I make a good cup of coffee? List the steps.",
    "A tank fills in 6 hours by one pipe and in 3 hours by another. How long do both take together?",
    "Explain what a race condition is, with an example.",
    "Explain the difference between weather and climate.",
    "What is compound interest? Compute it for $1000 at 5% over 3 years.",
    "Write a dialogue between a chess teacher and a pupil who just lost.",
    "Describe how a bicycle stays upright.",
    "Give a recipe for a simple vegetable soup.",
    "What happened during the French Revolution? Give a short timeline.",
    "Explain photosynthesis step by step.",
)
