"""Samples of several turns from their calls to the loss, token by token: which tokens are trained on, with which
advantage and which weight. All expected values are worked out by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.config import AlgorithmSection
from paceline.rl.algorithms import STD_FLOOR, make_algorithm
from paceline.rl.batch import TokenBatch
from paceline.rl.collect import AgentRewards, Collector
from paceline.tasks.agent import Outcome, Policy
from paceline.tasks.env_agent import EnvAgent
from paceline.tasks.task import Problem, Turn
from paceline.types import Group, Request, SamplingParams

MAX_TOKENS = 8


class Agent:
    def __init__(self, run: Callable[[Policy], Awaitable[Outcome]]) -> None:
        self.run = run


class Env:
    """One character per turn of the policy's; gives these rewards, then ends. The observation is `<`, or longer."""

    def __init__(self, rewards: list[float], observation: str = "<") -> None:
        self.rewards, self.observation = iter(rewards), observation
        self.num_left = len(rewards)

    def reset(self) -> str:
        return "go"

    def step(self, message: Any) -> Turn:
        self.num_left -= 1
        observation = [{"role": "user", "content": self.observation}] if self.num_left else None
        return Turn(observation, next(self.rewards))


def collect(
    made: list[Any], script: Callable[[Request], str] = lambda r: "x", penalties: Any = None, max_model_len: int = 200
) -> Group:
    """One group, with a sample for each agent or environment."""
    if penalties is None:
        penalties = {}
    agents = iter([each if isinstance(each, Agent) else EnvAgent(lambda each=each: each) for each in made])
    engine = ScriptedEngine(script)
    engine.max_model_len = max_model_len
    collector = Collector(
        engine, Bytes(), ScriptedRewarder(lambda s: s.env_reward), sampling=SamplingParams(max_tokens=MAX_TOKENS),
        agent_rewards={None: AgentRewards(penalties)},
    )  # fmt: skip
    problem = Problem("p", "go", {}, lambda: next(agents))
    return collector.collect("step 1", [(0, problem)], len(made), 0).groups[0]


def prepared(group: Group, **settings: Any) -> TokenBatch:
    batch = TokenBatch.of([group])
    make_algorithm(AlgorithmSection(**settings), MAX_TOKENS).prepare(batch)
    return batch


def tokens(batch: TokenBatch) -> str:
    """By sequence: x for tokens that are trained on, `.` for others."""
    marks = [
        "".join("x" if m else "." for m in batch.mask_T[batch.sequence_T == i]) for i in range(batch.num_sequences)
    ]
    return " ".join(marks)


def check(values_T: torch.Tensor | None, expected: list[float]) -> None:
    assert values_T is not None
    torch.testing.assert_close(values_T, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


async def say(policy: Policy, prompt: str) -> str:
    completion = await policy.generate(list(prompt.encode()))
    return prompt + bytes(completion.token_ids.tolist()).decode()


def with_branches(reward: float, num: int) -> Agent:
    """`num` trajectories of two turns."""

    async def run(policy: Policy) -> Outcome:
        for i in range(num):
            await say(policy, f"{await say(policy, f'go{i}:')}<")
        return Outcome(reward)

    return Agent(run)


# ---- whole trajectories, branches ----


def test_a_reward_of_a_whole_trajectory_reaches_every_token_of_the_policy() -> None:
    batch = prepared(collect([Env([0, 0, 1.0]), Env([0.0])]))
    assert tokens(batch) == "x.x.x x"
    a = 0.5 / (0.5**0.5 + STD_FLOOR)  # rewards 1 and 0: mean 1/2, unbiased standard deviation sqrt(1/2)
    check(batch.advantages_T, [a, 0, a, 0, a, -a])
    check(batch.weights_T, [1 / 6, 0, 1 / 6, 0, 1 / 6, 1 / 2])  # a sample's tokens share its weight, 1/2


def test_branches_count_as_one_sample() -> None:
    """Three branches with reward 1, and two samples with reward 0: the mean is 1/3, not 3/5."""
    batch = prepared(collect([with_branches(1.0, 3), with_branches(0.0, 1), with_branches(0.0, 1)]))
    assert tokens(batch) == "x.x x.x x.x x.x x.x"
    assert batch.sample_S is not None and batch.sample_S.tolist() == [0, 0, 0, 1, 2] and batch.num_samples == 3
    std = (((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2) ** 0.5 + STD_FLOOR
    up, down = (2 / 3) / std, (-1 / 3) / std
    check(batch.advantages_T, [up, 0, up] * 3 + [down, 0, down] * 2)
    check(batch.weights_T, [1 / 18, 0, 1 / 18] * 3 + [1 / 6, 0, 1 / 6] * 2)  # 6 tokens, or 2, of each third


@pytest.mark.parametrize(
    ("name", "advantages", "weights"),
    [
        ("dapo", None, [1 / 10] * 5),  # mean over tokens
        ("dr_grpo", [2 / 3] * 3 + [-1 / 3] * 2, [1 / (3 * MAX_TOKENS)] * 5),  # three samples
        ("rloo", [1] * 3 + [-0.5] * 2, [1 / 18] * 3 + [1 / 6] * 2),  # minus the mean of the other samples
    ],
)
def test_branches_in_other_algorithms(name: Any, advantages: list[float] | None, weights: list[float]) -> None:
    batch = prepared(collect([with_branches(1.0, 3), with_branches(0.0, 1), with_branches(0.0, 1)]), name=name)
    check(batch.weights_T, [value for each in weights for value in (each, 0, each)])
    if advantages is not None:
        check(batch.advantages_T, [value for each in advantages for value in (each, 0, each)])


def test_branches_change_nothing_for_samples_without_them() -> None:
    """As if the sample with three branches had one."""
    three = prepared(collect([with_branches(1.0, 3), with_branches(0.0, 1), with_branches(0.5, 1)]))
    one = prepared(collect([with_branches(1.0, 1), with_branches(0.0, 1), with_branches(0.5, 1)]))
    assert three.advantages_T is not None and one.advantages_T is not None
    check(three.advantages_T[6:], one.advantages_T.tolist())
    assert three.weights_T is not None and one.weights_T is not None
    check(three.weights_T[9:], one.weights_T[3:].tolist())
    assert float(three.weights_T[:9].sum()) == pytest.approx(float(one.weights_T[:3].sum()))


def test_a_branch_whose_prompt_has_sampled_tokens_does_not_train_on_them_again() -> None:
    async def edits(policy: Policy) -> Outcome:
        said = await say(policy, "go:")
        await say(policy, f"{said}<1>")
        await say(policy, f"{said}<2>")
        return Outcome(1.0)

    batch = prepared(collect([Agent(edits), with_branches(0.0, 1)], script=lambda r: "yz"))
    assert tokens(batch) == "xx...xx xx xx.xx"
    assert int(batch.length_S[:2].sum()) == 6, "three calls with two tokens each"


# ---- rewards of turns ----


def test_rewards_of_turns_are_summed_by_default() -> None:
    batch = prepared(collect([Env([0.5, 0.25, 0.25]), Env([0.0, 0.0])]), scale_rewards="none")
    assert tokens(batch) == "x.x.x x.x" and batch.reward_S.tolist() == [1.0, 0.0]
    check(batch.advantages_T, [0.5, 0, 0.5, 0, 0.5, -0.5, 0, -0.5])


def test_rewards_to_go_compare_turns_of_the_same_index() -> None:
    """Returns by turn: 4, 3, 1 for rewards 1, 2, 1; and 2, 2 for 0, 2. The third turn has nothing to compare with."""
    settings = {"turn_rewards": "to_go", "scale_rewards": "none"}
    batch = prepared(collect([Env([1.0, 2.0, 1.0]), Env([0.0, 2.0])], script=lambda r: "yz"), **settings)
    assert tokens(batch) == "xx.xx.xx xx.xx"
    check(batch.advantages_T, [1, 1, 0, 0.5, 0.5, 0, 0, 0, -1, -1, 0, -0.5, -0.5])
    scaled = prepared(collect([Env([1.0, 2.0, 1.0]), Env([0.0, 2.0])], script=lambda r: "yz"), turn_rewards="to_go")
    one, two = 1 / (2**0.5 + STD_FLOOR), 0.5 / (0.5**0.5 + STD_FLOOR)
    check(scaled.advantages_T, [one, one, 0, two, two, 0, 0, 0, -one, -one, 0, -two, -two])
    check(scaled.weights_T, [1 / 12, 1 / 12, 0, 1 / 12, 1 / 12, 0, 1 / 12, 1 / 12, 1 / 8, 1 / 8, 0, 1 / 8, 1 / 8])


def test_rewards_to_go_of_branches() -> None:
    """A turn's return is the reward of the sample without the rewards of the turns before it in its own branch. Returns
    of the first sample: 3, 2 in the one branch, 3, 3 in the other; of the second: 1, 1."""

    async def run(policy: Policy) -> Outcome:
        rewards = {}
        for branch, values in enumerate(([1.0, 2.0], [0.0, 0.0])):
            said = f"go{branch}:"
            for value in values:
                completion = await policy.generate(list(said.encode()))
                rewards[completion.request.request_id] = value
                said += bytes(completion.token_ids.tolist()).decode() + "<"
        return Outcome(call_rewards=rewards)

    batch = prepared(collect([Agent(run), Env([0.0, 1.0])]), turn_rewards="to_go", scale_rewards="none")
    assert tokens(batch) == "x.x x.x x.x"
    # First turns: samples 3 and 1, mean 2. Second turns: the first sample's 2 and 3, mean 5/2, and 1: mean 7/4.
    check(batch.advantages_T, [1, 0, 0.25, 1, 0, 1.25, -1, 0, -0.75])


def test_rewards_to_go_without_rewards_of_turns_are_those_of_samples() -> None:
    group = collect([with_branches(1.0, 2), with_branches(0.0, 1)])
    summed, to_go = prepared(group), prepared(group, turn_rewards="to_go")
    assert summed.advantages_T is not None and to_go.advantages_T is not None
    assert torch.equal(summed.advantages_T, to_go.advantages_T)


# ---- limits ----


def test_context_overflow() -> None:
    """go, x, <<<<, x is 8 tokens: the third turn has no room. It is penalised, and trained on."""
    group = collect([Env([0, 0, 1.0], "<<<<"), Env([1.0])], penalties={"context": -0.5}, max_model_len=8)
    assert [r.finish_reason for r in group.rollouts] == ["context", "stop"] and group.rewards == [-0.5, 1.0]
    batch = prepared(group, scale_rewards="none")
    assert tokens(batch) == "x....x x"
    check(batch.advantages_T, [-0.75, 0, 0, 0, 0, -0.75, 0.75])
    masked = prepared(group, scale_rewards="none", mask_truncated_completions=True)
    assert tokens(masked) == "...... x"
    check(masked.advantages_T, [0] * 6 + [0.75])  # its reward still counts in the mean


def test_budget_exhaustion() -> None:
    """Three tokens a turn: the third turn gets two, a fourth none."""
    group = collect([Env([0, 0, 0, 1.0]), Env([1.0])], script=lambda r: "abc", penalties={"budget": -1.0})
    assert [r.finish_reason for r in group.rollouts] == ["budget", "stop"] and group.rewards == [-1.0, 1.0]
    batch = prepared(group, scale_rewards="none")
    assert tokens(batch) == "xxx.xxx.xx xxx"
    check(batch.advantages_T, [-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, 1, 1, 1])
    assert batch.length_S.tolist() == [8, 3] and batch.truncated_S.tolist() == [True, False]


def test_the_overlong_penalty_is_of_the_longest_branch() -> None:
    """Branches of 2 tokens and 8 tokens: the whole sample is overlong."""

    async def run(policy: Policy) -> Outcome:
        await say(policy, "a")
        await say(policy, "long")
        return Outcome(1.0)

    def script(request: Request) -> str:
        return "y" * (8 if bytes(request.prompt_ids) == b"long" else 2)

    batch = TokenBatch.of([collect([Agent(run), Agent(run)], script=script)])
    algorithm = make_algorithm(AlgorithmSection(overlong_buffer=4), MAX_TOKENS)
    assert algorithm.shape_rewards(batch).tolist() == [0.0] * 4


def test_a_failed_sample_is_not_trained_on_unless_it_has_a_penalty() -> None:
    async def crashes(policy: Policy) -> Outcome:
        await say(policy, "go")
        raise RuntimeError

    made = [Agent(crashes), Env([1.0]), Env([0.0])]
    batch = prepared(collect(made), scale_rewards="none")
    assert tokens(batch) == "x x"
    check(batch.advantages_T, [0.5, -0.5])
    made = [Agent(crashes), Env([1.0]), Env([0.0])]
    batch = prepared(collect(made, penalties={"crash": -0.4}), scale_rewards="none")
    assert tokens(batch) == "x x x"
    check(batch.advantages_T, [-0.6, 0.8, -0.2])


# ---- batches ----


def test_minibatches_keep_samples_whole() -> None:
    from paceline.rl.packing import minibatches

    batch = TokenBatch.of([collect([with_branches(1.0, 3), with_branches(0.0, 1), with_branches(0.0, 2)])])
    assert list(minibatches(batch.group_S, 3, batch.sample_S)) == [(0, 3), (3, 4), (4, 6)]
    assert list(minibatches(batch.group_S, 9, batch.sample_S)) == [(0, 3), (3, 4), (4, 6)]
    part = batch.sequences(4, 6)
    assert part.num_samples == 1 and part.sample_S is not None and part.sample_S.tolist() == [0, 0]
    weights_T = make_algorithm(AlgorithmSection(), MAX_TOKENS).weights(part)
    check(weights_T, [1 / 4, 0, 1 / 4] * 2)
    assert batch.sequences(2, 2).num_sequences == 0
