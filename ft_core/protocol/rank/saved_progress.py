"""The Manager's part of a checkpoint, checked where it is loaded. Pure: the clock is an argument.

A version that nobody can have reached, or the id of a quorum that no lighthouse can have formed, would reach the
lighthouse in this replica's first message and be refused there, in words that do not name the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import ConfigError
from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.quorum_ids import boot_of, too_late
from ft_core.protocol.types import Version
from ft_core.settings import MAX_REPLICAS, MAX_STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDED = frozenset({"step", "batches_committed"})
INT64, UINT64 = 2**63 - 1, 2**64 - 1


def read(saved: Mapping[str, int], lineage: int, clock_s: float) -> tuple[Version, int, int]:
    """Version, lineage and committed batches of a checkpoint.

    Args:
        saved: what `Manager.state_dict` returned, or the reference implementation's, which names no quorum or lineage.
        lineage: of a replica that starts from step 0.
        clock_s: seconds since 1970.

    Raises:
        ConfigError: keys are missing, or a value is none that a Manager saves.
    """
    missing = NEEDED - set(saved)
    if missing:
        raise ConfigError(f"the manager's checkpoint lacks {sorted(missing)}; it has {sorted(saved)}")
    step = _number(saved, "step", 0, -1, MAX_STEP)
    batches = _number(saved, "batches_committed", 0, 0, MAX_STEP * MAX_REPLICAS)
    quorum_id = _number(saved, "quorum_id", 0, -1, INT64)
    why = too_late(quorum_id, boot_of(clock_s))
    if why:
        raise _damaged("quorum_id", quorum_id, f"is not the id of a quorum: {why}")
    # All who load a checkpoint that names no lineage derive the same one.
    return (
        Version(step, quorum_id),
        _number(saved, "lineage", fold_lineage(step, 0, 0, ()) if step else lineage),
        batches,
    )


def _number(saved: Mapping[str, int], key: str, default: int, low: int = 0, high: int = UINT64) -> int:
    given = saved.get(key, default)
    try:
        value = int(given)
    except (TypeError, ValueError):
        raise _damaged(key, given, "is not a number") from None
    if not low <= value <= high:
        raise _damaged(key, given, f"must be between {low} and {high}")
    return value


def _damaged(key: str, given: object, why: str) -> ConfigError:
    return ConfigError(
        f"the manager's checkpoint has {key}={given!r}, which {why}. It is damaged, or was not made by "
        "Manager.state_dict: load another one"
    )
