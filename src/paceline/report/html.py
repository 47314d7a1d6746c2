"""`paceline report RUN`: one self-contained page that makes no network requests.

Model output is untrusted. It is in the page only as escaped text or in a JSON block without markup. Scripts only insert
it as text, and the page's Content-Security-Policy allows only its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources
from pathlib import Path

from paceline.files import replace_file
from paceline.report import sections
from paceline.report.rollouts import encode
from paceline.report.run import Run, read_run
from paceline.report.table import check_writable, write_bytes


def write_report(run: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, finished or not, to report.html in its folder or to `out`."""
    if out is not None:
        check_writable(out)
    page = render_page(read_run(run)).encode("utf-8", errors="replace")
    if out is not None:
        write_bytes(out, page)
        return out
    replace_file(run / "report.html", page)  # replaces a link, and does not write to its target
    return run / "report.html"


def render_page(run: Run) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "reward": ("Reward", sections.reward(run)),
        "time": ("Time", sections.time(run)),
        "speculation": ("Speculation", sections.speculation(run)),
        "exactness": ("Exactness", sections.exactness(run)),
        "staleness": ("Staleness", sections.staleness(run)),
        "learning": ("Learning", sections.learning(run)),
        "rollouts": ("Rollouts", sections.rollout_browser(run)),
        "engine": ("Engine", sections.engine(run)),
        "engines": ("Engines", sections.engines(run)),
        "steps": ("Steps", sections.every_step(run)),
        "config": ("Configuration", sections.config(run)),
    }
    if not run.steps:
        parts = {"empty": ("", "<section><p>No step has finished yet.</p></section>"), **parts}
        parts.pop("steps")
    links = "".join(f'<a href="#{name}">{title}</a>' for name, (title, text) in parts.items() if title and text)
    data = encode({"rollouts": run.rollouts.records, "prompts": run.rollouts.prompts})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.name)} · Paceline</title><style>{style}</style></head>\n<body>"
        f"{sections.heading(run)}<nav>{links}</nav>\n<main>"
        f"{sections.messages(run)}{sections.key_figures(run)}\n"
        + "\n".join(text for _, text in parts.values())
        + '</main>\n<div id="tip" aria-hidden="true" hidden></div>'
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("paceline.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
