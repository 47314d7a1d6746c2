"""Where a vLLM request's tokens came from, as far as vLLM tells.

What is seen is how many tokens each step emitted. When a request ends, vLLM tells in order how much each of its drafts
had and how much of it stood, but not which steps drafted. A step that emitted several tokens did. Of those that
emitted one it is known only if all of them drafted, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.types import Provenance


def provenance(chunks: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
    """Of every token: uint8. `chunks` are the tokens of each step, the prompt's first. Where nothing is told of drafts,
    since the request did not come to an end in vLLM, the last token of a step counts as SAMPLED."""
    found = np.full(sum(chunks), Provenance.SAMPLED, np.uint8)
    stood = [(a, d) for a, d in zip(accepted, drafted, strict=True) if a]
    single: list[int] = []
    at = 0
    for i, size in enumerate(chunks):
        last = i == len(chunks) - 1
        if size > 1 or (last and size and len(stood) == 1):  # a stop may have cut the last one
            num_accepted, num_drafted = stood.pop(0) if stood else (size - 1, size - 1)
            found[at : at + min(size, num_accepted)] = Provenance.ACCEPTED
            if size > num_accepted and drafted:
                whole = num_accepted == num_drafted
                found[at + num_accepted] = Provenance.BONUS if whole else Provenance.CORRECTED
        elif size and i:
            single.append(at)
        at += size
    if len(single) == len(drafted) - sum(a > 0 for a in accepted):
        found[single] = Provenance.CORRECTED
    return found
