"""Every checked published result is within the tolerance, with the shipped parameters."""

from __future__ import annotations

import pytest
from scripts import load_script

SCRIPT = load_script("simulator/published_results.py")
FITTED_PARAMETERS, TOLERANCE = SCRIPT.FITTED_PARAMETERS, SCRIPT.TOLERANCE
PUBLISHED, PARAMETERS = SCRIPT.PublishedResults(), SCRIPT.Parameters.shipped()
CHECKED = [row for row in PUBLISHED.rows if row.checked]


def test_number_of_checked_rows():
    by_table = {table: len([row for row in CHECKED if row.table == table]) for table in {row.table for row in CHECKED}}
    assert by_table == {
        "Qwen3-8B on 32 GB200, s": 8,
        "Qwen3-8B on 64 GB200, one update behind, s": 2,
        "Qwen3-235B-A22B on 512 GB200, speed-up": 44,
        "Scale and lag, k = 5, acceptance 4, speed-up": 4 + 16,
    }


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_checked_rows_are_within_the_tolerance(row):
    assert abs(row.error(PARAMETERS)) <= TOLERANCE


def test_wrong_parameters_exceed_the_tolerance():
    for changes in ({"efficiency.bandwidth": 0.3}, {"efficiency.mfu": 0.2}, {"nemo-rl-vllm.wake_s": 1.0}):
        changed = PARAMETERS.with_values(changes)
        assert any(abs(row.error(changed)) > TOLERANCE for row in CHECKED)


def test_only_rows_without_speculation_or_with_three_tokens_are_fitted():
    fitted = [row.name for row in PUBLISHED.rows if row.fitted]
    assert fitted and not [name for name in fitted if any(f"k = {k}" in name for k in (1, 5, 7))]
    assert not [row for row in PUBLISHED.rows if row.fitted and "Scale" in row.table]


def test_every_fitted_parameter_changes_a_fitted_row():
    rows = [row for row in PUBLISHED.rows if row.fitted]
    values = PARAMETERS.values()
    assert len(values) == sum(map(len, FITTED_PARAMETERS.values()))
    before = [row.simulated(PARAMETERS) for row in rows]
    for name, value in values.items():
        changed = PARAMETERS.with_values({name: 2 * value if "us" in name else 0.7 * value})
        assert any(abs(row.simulated(changed) / was - 1) > 1e-5 for row, was in zip(rows, before, strict=True)), name
