"""JSON for clients. ASCII only: text of a client may hold lone surrogates, which UTF-8 can't encode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def to_json(content: Any) -> bytes:
    return _encode(content).encode("ascii")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")
