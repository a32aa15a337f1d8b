"""Training runs of one process, one after the other, in rooms of their own.

How it works. A second run begins at the step at which the one before ended. So a replica that has not made all of that
is behind, and takes over the others' model; it could be the one whose model all take over otherwise.

Pure: values in, values out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lineage import fold_lineage

if TYPE_CHECKING:
    from collections.abc import Mapping


def carried_over(state: Mapping[str, int], group: int) -> dict[str, int]:
    """The state that the Manager of the next run begins with; {} for none.

    Args:
        state: of the last run's Manager, at its end; {} if there was none.
        group: number of this replica group. Each has a lineage of its own, as at the start of a job, so all take the
            state of one: the script may have drawn a new model.
    """
    step = state.get("step", 0)
    return {**state, "lineage": fold_lineage(step, group, 0, ())} if step else {}
