"""Live state: what moves a healthy replica's state to a healing one.

`encoding` splits a state into a safe skeleton and tensors, `layout` cuts those into ranges, `offer` and `http_server`
serve them, `http_client` and `receive_plan` fetch and place them; `transport` is the interface, `http_transport` what
the Manager uses.
"""

from ft_core.checkpointing.encoding import Encoded, Leaf, decode, encode, tensor_paths
from ft_core.checkpointing.http_client import FetchResult, fetch, get_blob, prefetch
from ft_core.checkpointing.http_server import StateServer
from ft_core.checkpointing.http_transport import HTTPTransport
from ft_core.checkpointing.pg_transport import PGTransport
from ft_core.checkpointing.receive_plan import Prefetched
from ft_core.checkpointing.transport import CheckpointTransport

__all__ = [
    "CheckpointTransport",
    "Encoded",
    "FetchResult",
    "HTTPTransport",
    "Leaf",
    "PGTransport",
    "Prefetched",
    "StateServer",
    "decode",
    "encode",
    "fetch",
    "get_blob",
    "prefetch",
    "tensor_paths",
]
