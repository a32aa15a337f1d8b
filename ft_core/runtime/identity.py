"""How a replica describes itself to others: when its lease opens, with each ask, and what has to be equal on all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.lighthouse.model_signature import setting_lines
from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.types import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.data.interface import DataListener
    from ft_core.protocol.rank.rank import Rank
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.config import Config


def hello(config: Config, rank: Rank, incarnation: int, heal_address: str, lines: tuple[str, ...]) -> Hello:
    """What this replica presents when its lease is opened."""
    quorum = rank.quorum
    return Hello(
        replica_id=rank.settings.replica_id, name=config.name, generation=0, incarnation=incarnation,
        version=rank.held.version, stable=rank.held.stable, highest_id=rank.highest_id,
        quorum_id=quorum.quorum_id if quorum else 0, members=quorum.ids if quorum else (),
        signature=rank.attempt.signature, signature_lines=lines if rank.attempt.signature else (),
        expected=config.expected, min_replicas=rank.settings.min_replicas,
        group_world_size=config.world_size, join_s=config.budget.join_s, liveness_s=config.budget.liveness_s,
        orphan_s=config.budget.orphan_s, heal_addresses=(heal_address,),
        cast=rank.cast, fenced=rank.entered_by_all, after=rank.after,
    )  # fmt: skip


def ask_template(
    config: Config,
    heal_address: str,
    store_address: str,
    *,
    allow_heal: bool,
    shrink_only: bool,
    heals_first: bool,
    lines: tuple[str, ...],
) -> Ask:
    """The part of an ask that the machine does not know."""
    return Ask(
        replica_id=config.replica_id, seq=0, heal_addresses=(heal_address,), store_address=store_address,
        init_sync=config.init_sync, allow_heal=allow_heal, shrink_only=shrink_only, heals_before_forward=heals_first,
        signature_lines=lines, from_scratch=config.from_scratch,
    )  # fmt: skip


def describe(
    config: Config, rank: Rank, backend: str, reducers: Sequence[GradientReducer], data: DataListener | None,
    *, says_positions: bool,
) -> tuple[int, tuple[str, ...]]:  # fmt: skip
    """What has to be equal on all replicas, as one number and in lines: compared before a quorum is formed (R4).

    The settings among it decide who participates, what a sum is divided by, or which collectives run. All that else
    differs is either told to the others with each ask or fence (init_sync, use_async_quorum, on_exhausted, batch
    weights), or concerns this replica alone (timeouts, retries). Training loops of the first version compared their
    positions in the data by a collective in each new quorum, for which later ones would not come (`says_positions`).
    """
    settings: dict[str, object] = {"world_size_mode": rank.settings.mode.name}
    if config.rank_settings.mode is WorldSizeMode.FIXED_WITH_SPARES:
        settings["min_replica_size"] = (
            config.rank_settings.min_replicas
        )  # so many participate; else it only bounds the quorum
    settings["fence"] = config.fence
    settings["parity_check_every"] = config.parity_check_every
    settings["parity_sample_steps"] = config.parity_sample_steps
    settings["pg"] = backend
    settings["require_all_contributions"] = rank.attempt.whole_steps
    settings["transport of state"] = config.transport
    if says_positions:
        settings["version of ft_core"] = "sends positions with asks"
    settings["number of models in DistributedDataParallel"] = len(reducers)
    told, divided = setting_lines(settings), () if data is None else (data.describe(),)
    parts = [*told, *(str(reducer.plan.digest) for reducer in reducers), *divided]
    models = (line for reducer in reducers for line in reducer.plan.describe())
    return fold_lineage(len(reducers), 0, 0, parts), (*told, *models, *divided)
