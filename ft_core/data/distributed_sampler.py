"""A fixed division of a dataset: the part that one rank of one replica group reads."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import Dataset
from torch.utils.data import distributed as torch_distributed

from ft_core.errors import ConfigError

__all__ = ["DistributedSampler"]

T_co = TypeVar("T_co", covariant=True)


class DistributedSampler(torch_distributed.DistributedSampler[T_co]):
    """Shards a dataset over all ranks of all replica groups.

    The split is over the *maximum* number of replica groups, not over those in the quorum, so it does not move when a
    group fails: the samples of a group that is away are not read until it is back, and those of a step that was not
    committed are skipped.

    Args:
        dataset: a map-style dataset with a length.
        replica_rank: index of this replica group among `num_replica_groups`, the same after a restart.
        num_replica_groups: how many replica groups the job has when complete.
        group_rank: this process' rank inside its replica group.
        num_replicas: how many ranks one replica group has.
        replica_group_id: what the examples of the reference implementation call replica_rank.
        kwargs: `shuffle`, `seed`, `drop_last` of `torch.utils.data.DistributedSampler`.

    Raises:
        ConfigError: a rank outside its range, or a keyword that is computed here.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        group_rank: int = 0,
        num_replicas: int = 1,
        *,
        replica_group_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if replica_group_id is not None:
            if replica_rank is not None:
                raise ConfigError(
                    f"replica_rank={replica_rank!r} and replica_group_id={replica_group_id!r} are the same: pass one"
                )
            replica_rank = replica_group_id
        _check_rank("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_rank("group_rank", group_rank, "num_replicas", num_replicas)
        if "rank" in kwargs:
            raise ConfigError("rank is computed from replica_rank and group_rank; pass those instead of rank")
        assert replica_rank is not None
        assert num_replica_groups is not None
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)

    def __repr__(self) -> str:
        place = f"rank={self.rank} of {self.num_replicas}"
        return f"DistributedSampler({place}, samples={self.num_samples}, epoch={self.epoch})"


def _check_rank(rank_name: str, rank: object, size_name: str, size: object) -> None:
    for name, value in ((rank_name, rank), (size_name, size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be an int, got {value!r}")
    assert isinstance(rank, int)
    assert isinstance(size, int)
    if size < 1:
        raise ConfigError(f"{size_name}={size}: must be at least 1")
    if not 0 <= rank < size:
        raise ConfigError(f"{rank_name}={rank}: must be from 0 to {size - 1} ({size_name}={size})")
