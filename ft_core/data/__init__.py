"""Data loading over replica groups that come and go.

`ElasticDataLoader` (and `ElasticSampler` below it) trains on every sample of an epoch exactly once, whatever dies;
`DistributedSampler` is the fixed division by the maximum number of groups. `IndexedStream` and `ReplayedStream` are for
data that is read forward.
"""

from ft_core.data.conversion import elastic_loader
from ft_core.data.distributed_sampler import DistributedSampler
from ft_core.data.interface import DataListener, DataManager
from ft_core.data.loader import ElasticDataLoader
from ft_core.data.sampler import ElasticSampler
from ft_core.data.scaling import LearningRateScaling, learning_rate_factor
from ft_core.data.seeded_dataset import SeededDataset
from ft_core.data.stream import IndexedStream, ReplayedStream

__all__ = [
    "DataListener", "DataManager", "DistributedSampler", "ElasticDataLoader", "ElasticSampler", "IndexedStream",
    "LearningRateScaling", "ReplayedStream", "SeededDataset", "elastic_loader", "learning_rate_factor",
]  # fmt: skip
