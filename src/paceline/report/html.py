"""`paceline report RUN`: one self-contained page that makes no network requests.

Model output is untrusted. It is in the page only as escaped text or in a JSON block without markup. Scripts only insert
it as text, and the page's Content-Security-Policy allows only its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from paceline.files import replace_file
from paceline.report import sections
from paceline.report.key_figures import key_figures
from paceline.report.markup import escape
from paceline.report.rollout_browser import rollout_browser
from paceline.report.rollouts import encode
from paceline.report.run import Run, read_run
from paceline.report.table import check_writable, write_bytes
from paceline.report.tasks import tasks

SMOOTHING = (
    '<p class="view" id="view"><label><input type="checkbox" id="smooth" checked> '
    "running means, thick, over the curves</label></p>"
)


def write_report(run: Path, out: Path | None = None) -> Path:
    """Writes the page of a run, finished or not, to report.html in its folder or to `out`."""
    if out is not None:
        check_writable(out)
    page = to_bytes(render_page(read_run(run)))
    if out is not None:
        write_bytes(out, page)
        return out
    replace_file(run / "report.html", page)  # replaces a link, and does not write to its target
    return run / "report.html"


def to_bytes(page: str) -> bytes:
    return page.encode("utf-8", errors="replace")


def render_page(run: Run, live: bool = False) -> str:
    """`live`: for `paceline watch`; the page loads itself again when the run has changed."""
    parts = {
        "reward": ("Reward", sections.reward(run)),
        "tasks": ("Tasks", tasks(run)),
        "time": ("Time", sections.time(run)),
        "speculation": ("Speculation", sections.speculation(run)),
        "exactness": ("Exactness", sections.exactness(run)),
        "staleness": ("Staleness", sections.staleness(run)),
        "learning": ("Learning", sections.learning(run)),
        "rollouts": ("Rollouts", rollout_browser(run)),
        "engine": ("Engine", sections.engine(run)),
        "engines": ("Engines", sections.engines(run)),
        "steps": ("Steps", sections.every_step(run)),
        "config": ("Configuration", sections.config(run)),
    }
    if not run.steps:
        parts = {"empty": ("", '<section id="empty"><p>No step has finished yet.</p></section>'), **parts}
        parts.pop("steps")
    data = encode({"rollouts": run.rollouts.records, "prompts": run.rollouts.prompts})
    top = sections.messages(run) + key_figures(run)
    return document(run.name, sections.heading(run), top, parts, data, live=live)


def document(
    title: str, header: str, top: str, parts: Mapping[str, tuple[str, str]], data: str = "", live: bool = False
) -> str:
    """A whole page. `parts`: id -> (name in the navigation, section or ""). `data`: JSON for the scripts."""
    style, script = assets(live)
    links = "".join(f'<a href="#{name}">{text}</a>' for name, (text, content) in parts.items() if text and content)
    content = "\n".join(content for _, content in parts.values())
    switch = SMOOTHING if 'class="mean-note"' in content else ""
    status = '<p class="live" id="live" role="status"></p>' if live else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{page_policy(live)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · Paceline</title><style>{style}</style></head>\n<body>"
        f"{status}{header}<nav>{links}</nav>\n<main>{top}{switch}\n{content}</main>\n"
        '<div id="tip" aria-hidden="true" hidden></div>'
        + (f'<script type="application/json" id="data">{data}</script>\n' if data else "")
        + f"<script>{script}</script></body></html>\n"
    )


def page_policy(live: bool = False) -> str:
    """The Content-Security-Policy: only the page's own script and style."""
    style, script = assets(live)
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


def assets(live: bool) -> tuple[str, str]:
    """The page's style and script."""
    return _asset("report.css"), _asset("report.js") + (_asset("live.js") if live else "")


def _asset(name: str) -> str:
    return resources.files("paceline.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
