"""Untrusted text as HTML."""

from __future__ import annotations

import html

from paceline.console import escape_controls


def escape(text: str) -> str:
    """Markup becomes text, and control characters become visible escapes: an override of the text direction could make
    the text after it look like something else."""
    return html.escape(escape_controls(text))
