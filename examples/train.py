"""The whole loop from Python: a task and a reward of one's own.

python examples/train.py [a.b=c …]
"""

import sys

from paceline.build.config import load_config
from paceline.build.run import build_trainer


def short_and_right(prompts, completions, completion_ids, answer, **columns):
    """TRL's signature: the more tokens it takes, the less the right answer is worth."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [
        (right in text) * (1 - len(ids) / 100) for text, ids, right in zip(texts, completion_ids, answer, strict=True)
    ]


class Lines:
    """Who looks on: one line per step."""

    def progress(self, stage: str, done: int, total: int) -> None: ...
    def note(self, text: str) -> None:
        print(text)

    def step(self, metrics) -> None:
        print(
            f"step {metrics['step'] + 1}: reward {metrics['reward_mean']:.3f}, {metrics['tokens_per_s']:.0f} tokens/s"
        )


if __name__ == "__main__":
    config = load_config(
        "configs/quickstart.toml",
        [
            'reward.functions=["examples.train:short_and_right"]',
            "train.num_steps=2",
            "train.eval_every=0",
            *sys.argv[1:],
        ],
    )
    trainer = build_trainer(config, Lines())
    print(trainer.run())
    trainer.close()
