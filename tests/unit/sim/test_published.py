"""Every published row with a bar, within ten per cent, with the shipped cards."""

from __future__ import annotations

import pytest

from paceline.sim.published import BAR, FITTED, Cards, Published

PUBLISHED, CARDS = Published(), Cards.shipped()
BARRED = [row for row in PUBLISHED.rows if row.bar]


def test_all_that_was_promised_has_a_bar():
    by_table = {table: len([row for row in BARRED if row.table == table]) for table in {row.table for row in BARRED}}
    assert by_table == {
        "Qwen3-8B on 32 GB200, s": 8,
        "Qwen3-8B on 64 GB200, one update behind, s": 2,
        "Qwen3-235B-A22B on 512 GB200, speed-up": 44,
        "Scale and lag, k = 5, acceptance 4, speed-up": 4 + 16,
    }


@pytest.mark.parametrize("row", BARRED, ids=lambda row: row.name)
def test_published_rows_are_met(row):
    assert abs(row.error(CARDS)) <= BAR


def test_other_cards_miss_them():
    """The bars are bars: with half of the bandwidth, or a head that costs thrice as much, rows fall."""
    for changes in ({"efficiency.bandwidth": 0.3}, {"efficiency.mfu": 0.2}, {"nemo-rl-vllm.wake_s": 1.0}):
        other = CARDS.with_values(changes)
        assert any(abs(row.error(other)) > BAR for row in BARRED)


def test_only_rows_without_speculation_or_with_three_tokens_are_fitted_on():
    fitted = [row.name for row in PUBLISHED.rows if row.fitted]
    assert fitted and not [name for name in fitted if any(f"k = {k}" in name for k in (1, 5, 7))]
    assert not [row for row in PUBLISHED.rows if row.fitted and "Scale" in row.table]


def test_every_fitted_value_matters_to_a_fitted_row():
    """Or it would be what somebody typed."""
    rows = [row for row in PUBLISHED.rows if row.fitted]
    values = CARDS.values()
    assert len(values) == sum(map(len, FITTED.values()))
    before = [row.simulated(CARDS) for row in rows]
    for name, value in values.items():
        other = CARDS.with_values({name: 2 * value if "us" in name else 0.7 * value})
        assert any(abs(row.simulated(other) / was - 1) > 1e-5 for row, was in zip(rows, before, strict=True)), name
