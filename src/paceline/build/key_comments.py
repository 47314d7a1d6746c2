"""The meaning of every key: the comment above its field in config.py, or the one behind it."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache

from paceline import config as config_module


def meaning(section: type, key: str) -> str:
    """The comment of a field, or of the field that it overrides; empty if there is none."""
    comments = field_comments(inspect.getsource(config_module))
    return next((text for base in section.__mro__ if (text := comments.get((base.__name__, key)))), "")


@cache
def field_comments(source: str) -> dict[tuple[str, str], str]:
    """The comments above and behind every field, by class and field."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    own_lines = {number for number, token in comments.items() if not token.line[: token.start[1]].strip()}
    found: dict[tuple[str, str], str] = {}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in classes:
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            first = field.lineno
            while first - 1 in own_lines:
                first -= 1
            numbers = [*range(first, field.lineno), *([field.end_lineno] if field.end_lineno in comments else [])]
            found[node.name, field.target.id] = " ".join(comments[i].string.lstrip("# ") for i in numbers)
    return found


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return text[:1].upper() + text[1:].removesuffix(".") + "."
