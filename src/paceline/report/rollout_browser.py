"""The section with the rollouts: only the controls; report.js fills them from the embedded data."""

from __future__ import annotations

from paceline.files import number
from paceline.report.elements import paragraph, section
from paceline.report.run import Run

# Names as in report.js.
FILTERS = {"all": "all samples", "mixed": "groups with mixed rewards", "failed": "failed", "truncated": "truncated"}
ORDERS = {
    "step": "by step",
    "reward-down": "highest reward first",
    "reward-up": "lowest reward first",
    "length-down": "longest first",
    "length-up": "shortest first",
    "drafted-down": "highest drafted share first",
    "drafted-up": "lowest drafted share first",
}
CONTROLS = """<div class="browser" id="browser">
<div class="controls">
<label class="wide">search <input type="search" id="search" placeholder="text in prompts and completions"
autocomplete="off" spellcheck="false"></label>
<label>show <select id="filter">{filters}</select></label>
<label>sort <select id="order">{orders}</select></label>
</div>
<div class="controls">
<label>step <select id="step"></select></label>
<label>group <select id="group"></select></label>
<span class="buttons"><button id="previous" type="button">← previous</button>
<button id="next" type="button">next →</button></span>
<output id="place"></output>
</div>
<p class="keys">Keys: <kbd>←</kbd> <kbd>→</kbd> sample, <kbd>[</kbd> <kbd>]</kbd> group,
<kbd>Shift</kbd> with <kbd>←</kbd> <kbd>→</kbd> step.</p>
<div class="samples" id="samples" role="group" aria-label="samples of this group, with their rewards"></div>
<dl class="facts" id="sample-facts"></dl>
<h3>Prompt</h3><pre class="prompt" id="prompt" tabindex="0"></pre>
<h3>Completion</h3><ul class="legend tokens-legend" id="legend"></ul>
<pre class="tokens" id="tokens" tabindex="0"></pre>
<output class="token-facts" id="token-facts"></output>
</div><noscript><p>Only the rollout browser needs JavaScript.</p></noscript>"""


def rollout_browser(run: Run) -> str:
    num_embedded, total = run.rollouts.num_embedded, run.rollouts.num_total
    recorded = [step for step in run.steps if "num_rollouts_logged" in step]
    num_unlogged = int(sum((number(s, "num_samples") or 0) - (number(s, "num_rollouts_logged") or 0) for s in recorded))
    unlogged = f"{num_unlogged:,} other samples were not logged (train.log_rollouts)." if num_unlogged > 0 else ""
    if not total:
        return section("rollouts", "Rollouts", paragraph(unlogged)) if unlogged else ""
    note = f"All {total:,} samples are in this page."
    if num_embedded < total:
        note = (
            f"This page contains {num_embedded:,} of {total:,} samples: whole groups, spread evenly over the steps, "
            "to keep the file small. rollouts.jsonl has all of them."
        )
    note = f"{note} {unlogged}".strip()
    if not num_embedded:
        return section("rollouts", "Rollouts", paragraph(note))
    filters, orders = (
        "".join(f'<option value="{value}">{name}</option>' for value, name in options.items())
        for options in (FILTERS, ORDERS)
    )
    return section("rollouts", "Rollouts", paragraph(note), CONTROLS.format(filters=filters, orders=orders))
