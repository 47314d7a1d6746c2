"""The order of the data: every problem once per epoch, determined by the seed and the position."""

from __future__ import annotations

import random

from paceline.rl.order import DataOrder, MixedOrder, Shares
from paceline.tasks.task import Problem


def test_every_problem_once_per_epoch() -> None:
    order = DataOrder(7, seed=3)
    epochs = [[order[position] for position in range(7 * e, 7 * e + 7)] for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4, "every epoch has its own shuffle"
    assert [order.epoch(position) for position in (0, 6, 7, 20, 21)] == [0, 0, 1, 2, 3]


def test_the_order_depends_on_seed_and_position_only() -> None:
    order, other = DataOrder(5, 0), DataOrder(5, 0)
    forward = [order[position] for position in range(15)]
    assert [other[position] for position in reversed(range(15))] == forward[::-1]
    assert [DataOrder(5, 1)[position] for position in range(15)] != forward


# ---- several tasks ----


class RandomShares(Shares):
    """Deliberately broken: independent draws, whose counts are right only on average."""

    def __getitem__(self, position: int) -> tuple[int, int]:
        draws = [random.Random(i).choices(range(len(self.weights)), self.weights)[0] for i in range(position + 1)]
        return draws[-1], draws[:-1].count(draws[-1])


def is_exact(shares: Shares, num: int) -> bool:
    """After any number of positions every task has its share, rounded up or down, and turns are counted."""
    total, counts = sum(shares.weights), [0] * len(shares.weights)
    for position in range(num):
        task, turn = shares[position]
        if turn != counts[task]:
            return False
        counts[task] += 1
        if any(abs(c * total - (position + 1) * w) >= total for c, w in zip(counts, shares.weights, strict=True)):
            return False
    return shares.counts(num) == counts


def test_shares_are_exact_after_any_number_of_positions() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        weights = [round(draw.uniform(0.01, 5), draw.randint(1, 3)) or 0.1 for _ in range(draw.randint(1, 8))]
        assert is_exact(Shares(weights), 200), weights
    assert not is_exact(RandomShares([0.7, 0.3]), 200)


def test_decimal_weights_are_exact() -> None:
    assert Shares([0.7, 0.2, 0.1]).weights == [7, 2, 1], "not the nearest binary fractions"
    assert [Shares([0.7, 0.3]).counts(10 * n) for n in (1, 7)] == [[7, 3], [49, 21]]
    assert Shares([2.0, 1e-3]).counts(2001) == [2000, 1]


def problems(**sizes: int) -> list[Problem]:
    return [Problem(f"{label}/{i}", "", task=label) for label, num in sizes.items() for i in range(num)]


def test_each_task_has_its_own_epochs() -> None:
    both = problems(a=5, b=3)
    order = MixedOrder(both, {"a": 3.0, "b": 1.0}, seed=4)
    taken = [both[order[position]] for position in range(40)]
    of_a, of_b = ([p.name for p in taken if p.task == label] for label in ("a", "b"))
    assert len(of_a) == 30 and len(of_b) == 10
    for names, size in ((of_a, 5), (of_b, 3)):
        epochs = [names[i : i + size] for i in range(0, len(names) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert order.epochs(39) == {"a": 5, "b": 3} and order.epoch(39) == 3 and order.epoch(0) == 0
    again = MixedOrder(both, {"a": 3.0, "b": 1.0}, seed=4)
    assert [again[position] for position in reversed(range(40))] == [order[p] for p in reversed(range(40))]
    assert [MixedOrder(both, {"a": 3.0, "b": 1.0}, seed=5)[p] for p in range(40)] != [order[p] for p in range(40)]


def test_the_order_of_a_task_does_not_depend_on_the_others() -> None:
    both, other = problems(a=5, b=3), problems(c=9, a=5)
    first, second = MixedOrder(both, {"a": 1.0, "b": 1.0}, 4), MixedOrder(other, {"c": 5.0, "a": 0.5}, 4)
    of_a = [[p.name for p in (found[order[i]] for i in range(90)) if p.task == "a"]
            for found, order in ((both, first), (other, second))]  # fmt: skip
    assert len(of_a[1]) > 5 and of_a[0][: len(of_a[1])] == of_a[1]
