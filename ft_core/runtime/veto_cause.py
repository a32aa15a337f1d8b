"""Which of a few causes a veto's reason belongs to: reasons are sentences for people, causes are counted. Pure.

How it works. A reason is composed where the veto is decided; what it says there stands in constants, which are looked
for here. What is none of them is an error's own text: of this member, or of another rank of its group. (A verdict
carries no cause itself: ranks of a group, also of other releases, send each other reasons.)
"""

from __future__ import annotations

from ft_core.events.schema import VETO_CAUSES
from ft_core.protocol.group.merge import UNEVEN, WEIGHTS
from ft_core.protocol.rank.commit_rule import FAILED, NO_GRADIENT, NO_LEASE, NOT_WHOLE, OUT_OF_DATA, STOPS
from ft_core.runtime.parity_check import DIFFERS

ERROR, ELSEWHERE, DIFFERENT, MISSING, EMPTY, EXHAUSTED, STOP, BATCH_WEIGHTS, LEASE = VETO_CAUSES
WHOLE = {OUT_OF_DATA: EXHAUSTED, NO_GRADIENT: EMPTY, STOPS: STOP, UNEVEN: MISSING}
"""Reasons that say nothing else."""
BEGINS = {NO_LEASE: LEASE, NOT_WHOLE: MISSING}
ENDS = {FAILED: ELSEWHERE, WEIGHTS: BATCH_WEIGHTS, DIFFERS: DIFFERENT}


def cause_of_veto(reason: str) -> str:
    """One of `events.schema.VETO_CAUSES`."""
    if reason in WHOLE:
        return WHOLE[reason]
    begins = (cause for text, cause in BEGINS.items() if reason.startswith(text))
    ends = (cause for text, cause in ENDS.items() if reason.endswith(text))
    return next(begins, None) or next(ends, ERROR)
