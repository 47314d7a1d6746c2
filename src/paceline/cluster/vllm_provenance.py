"""The provenance of a vLLM request's tokens, as far as vLLM reports it.

Each step shows how many tokens it emitted. When a request ends, vLLM reports its drafts in order, with the number of
drafted and accepted tokens, but not the steps that they belong to. A step that emitted several tokens verified a draft.
For steps that emitted one token this is known only if all of them verified a draft, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.types import Provenance


def provenance(tokens_per_step: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
    """uint8, one per token. The first step is the prefill. `accepted` and `drafted` are empty if the request did not
    end in vLLM; then the last token of a step counts as SAMPLED."""
    found = np.full(sum(tokens_per_step), Provenance.SAMPLED, np.uint8)
    drafts = [(a, d) for a, d in zip(accepted, drafted, strict=True) if a]  # with at least one accepted token
    single: list[int] = []  # positions of tokens that a step emitted alone
    start = 0
    for i, size in enumerate(tokens_per_step):
        is_last = i == len(tokens_per_step) - 1
        if size > 1 or (is_last and size and len(drafts) == 1):  # a stop may have truncated the last step
            num_accepted, num_drafted = drafts.pop(0) if drafts else (size - 1, size - 1)
            found[start : start + min(size, num_accepted)] = Provenance.ACCEPTED
            if size > num_accepted and drafted:
                all_accepted = num_accepted == num_drafted
                found[start + num_accepted] = Provenance.BONUS if all_accepted else Provenance.CORRECTED
        elif size and i:
            single.append(start)
        start += size
    if len(single) == len(drafted) - sum(a > 0 for a in accepted):
        found[single] = Provenance.CORRECTED
    return found
