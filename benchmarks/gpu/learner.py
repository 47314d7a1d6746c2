"""Time of a policy update on one GPU, next to transformers: all weights of two small models, LoRA of a larger one.

    python benchmarks/gpu/learner.py FOLDER [--only qwen3-1.7b] [options of `paceline bench learner`]

Each preset is `paceline bench learner`: 256 rollouts of 96 + 512 random tokens, 8 per prompt, random weights. Its
result is written to FOLDER/PRESET.json. transformers has no LoRA, so the last preset measures our learner alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PRESETS = {"qwen3-1.7b": [], "qwen2.5-1.5b": [], "qwen3-8b": ["--lora-rank", "16"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(PRESETS))
    args, options = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        command = [sys.executable, "-m", "paceline", "bench", "learner", "--model", name, *PRESETS[name]]
        subprocess.run([*command, "--json", str(args.folder / f"{name}.json"), *options], check=True)


if __name__ == "__main__":
    main()
