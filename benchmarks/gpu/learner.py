"""Time of a policy update on one GPU, next to transformers: all weights of two small models, LoRA of a larger one.

    python benchmarks/gpu/learner.py --json learner.json [--only qwen3-1.7b] [--profile] [learner.B=C …]

Each preset is `paceline bench learner`: 256 rollouts of 96 + 512 random tokens, 8 per prompt, random weights. With
`--model DIR` it measures the weights of a directory instead of the presets. transformers has no LoRA, so that preset
measures our learner alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench import learner_settings as texts
from paceline.bench.learner import measure
from paceline.build.config import load_config
from paceline.report.table import render

PRESETS: dict[str, tuple[str, ...]] = {
    "qwen3-1.7b": (),
    "qwen2.5-1.5b": (),
    "qwen3-8b": ("learner.lora_rank=16",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PRESETS))
    parser.add_argument("--model", metavar="DIR", help="measure this model instead of the presets")
    parser.add_argument("--variants", default=",".join(texts.VARIANTS))
    parser.add_argument("--masters", default="float32", choices=texts.MASTERS)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="learner.B=C", help="config overrides for all presets")
    args = parser.parse_args()
    presets = {args.model: ()} if args.model else {name: PRESETS[name] for name in args.only.split(",")}
    console, found = Console(width=140), list[dict[str, Any]]()
    for model, overrides in presets.items():
        settings = texts.Settings(
            model, tuple(args.variants.split(",")), args.sequences, updates=args.updates, masters=args.masters,
            profile=args.profile, learner=load_config(None, [*overrides, *args.settings]).learner,
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        for row in measure(settings, console.print):
            rows.append(row)
            if args.json is not None:
                content = [*found, {"settings": texts.describe(settings), "rows": rows}]
                args.json.write_text(json.dumps(content, indent=1))
        found.append({"settings": texts.describe(settings), "rows": rows})
        console.print(render(rows, texts.COLUMNS, texts.title(settings)))
        for row in rows:
            if row["note"]:
                console.print(f"{row['variant']}: not measured: {row['note']}", highlight=False)
            if row["profile"]:
                kernels, title = row["profile"]["kernels"], texts.profile_title(row["profile"])
                console.print(render(kernels, texts.KERNEL_COLUMNS, title))
    for note in texts.notes(settings):
        console.print(f"– {note}", highlight=False)


if __name__ == "__main__":
    main()
