"""An EAGLE-3 head from recorded acceptance, without its weights.

A file can record, for each token, how many tokens of a head's draft would be accepted there. This drafter proposes that
many correct tokens, which it reads from the recording, and then a wrong one. The head's scores are not recorded: all
are the same, and the acceptance model learns the rate of each position.
"""

from __future__ import annotations

import numpy as np

from paceline.replay.round_state import RoundState
from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch

MAX_LENGTH = 9  # of a draft; the recording has one digit per token
SCORE = 0.6  # of every token


class RecordedHead(Drafter):
    name = "eagle3"

    def __init__(self, round_state: RoundState) -> None:
        self.round_state = round_state

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        k = min(int(caps.max(initial=0)), MAX_LENGTH)
        head_accepted = self.round_state.round.head_accepted
        if not k or head_accepted is None:
            return DraftBatch.empty(len(rows), k)
        positions = self.round_state.positions[rows.request_ids - self.round_state.first_id]
        tokens = self.round_state.next_tokens(positions, k)
        wrong = np.arange(k) == head_accepted[positions][:, None]
        tokens[wrong] += 1
        return DraftBatch(tokens, np.minimum(caps, k).astype(np.int32), np.full(tokens.shape, SCORE, np.float32))
