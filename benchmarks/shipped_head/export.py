"""Converts a head of train.py to the layout that Paceline and vLLM load, with its provenance.

    python benchmarks/shipped_head/export.py --head head/ --model smollm2-135m --out src/paceline/heads/smollm2-135m

--head is the --out folder of train.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from train import load_tensors

import paceline
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import Eagle3Config, Eagle3Head
from paceline.model.head_files import save_head
from paceline.model.provenance import Provenance
from paceline.model.store import resolve
from paceline.model.weights import checkpoint_checksum

DATA = {"gsm8k": "GSM8K-train", "gym": "reasoning-gym", "sums": "chain_sum", "general": "prompts it made up itself"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--model", required=True, help="the target: a name that `paceline pull` knows, or a directory")
    parser.add_argument("--target-name", help="the target's hub id, for other loaders")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = json.loads((args.head / "head.json").read_text("utf-8"))
    layer = shape.pop("layer")
    layer["eos_token_ids"], shape["layer_ids"] = tuple(layer["eos_token_ids"]), tuple(shape["layer_ids"])
    head = Eagle3Head(Eagle3Config(ModelConfig(**layer), **shape))
    head.load_state_dict(load_tensors(args.head))
    figures = json.loads((args.head / "figures.json").read_text("utf-8"))
    measured = {
        f"{name}, {temperature}, k=3": {
            "temperature": float(temperature.removeprefix("T=")),
            "k": 3,
            **{kind: cell["mean_length"] for kind, cell in cells["k=3"].items()},
        }
        for name, by_temperature in figures["acceptance"].items()
        for temperature, cells in by_temperature.items()
    }
    log, groups = figures["log"], figures["groups"].split(",")
    provenance = Provenance(
        target=args.model,
        target_checksum=checkpoint_checksum(resolve(args.model)),
        data=f"the target's own answers at temperatures 1, 0.5 to 0.8 and 0 to {', '.join(DATA[g] for g in groups)}: "
        f"{figures['num_rollouts']} rollouts",
        seed=int(figures["draft"].get("seed", 0)),
        num_steps=log["num_steps"],
        num_tokens=round(log["tokens_per_s"] * log["seconds"]),
        acceptance=measured,
        versions={"paceline": paceline.__version__, "torch": figures["torch"]},
    )
    save_head(head, args.out, provenance, target_name=args.target_name, max_shard_bytes=15_000_000)


if __name__ == "__main__":
    main()
