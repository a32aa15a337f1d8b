"""Live state: what moves a healthy replica's state to a healing one.

`state_encoding` splits a state into a safe skeleton and tensors (`state_types`: which classes of the user's may be in
it), `ranges` cuts those into ranges, `offer` and `offers` hold what is served, `range_fetch` and `receive_plan` fetch
and place it (`own_state`: what a receiver believes). What carries it in between is a `donor_link`: `http` or `pg`.
`transport` is the interface, `http_transport` and `pg_transport` are what the Manager uses.
"""

from ft_core.checkpointing.http.client import fetch, get_blob, prefetch
from ft_core.checkpointing.http.server import StateServer
from ft_core.checkpointing.http_transport import HTTPTransport
from ft_core.checkpointing.own_state import OwnState
from ft_core.checkpointing.pg_transport import PGTransport
from ft_core.checkpointing.range_fetch import FetchResult
from ft_core.checkpointing.receive_plan import Prefetched
from ft_core.checkpointing.state_encoding import Encoded, Leaf, decode, encode
from ft_core.checkpointing.state_types import register_state_type
from ft_core.checkpointing.transport import CheckpointTransport, LiveTransport
from ft_core.checkpointing.tree import tensor_paths

__all__ = [
    "CheckpointTransport",
    "Encoded",
    "FetchResult",
    "HTTPTransport",
    "Leaf",
    "LiveTransport",
    "OwnState",
    "PGTransport",
    "Prefetched",
    "StateServer",
    "decode",
    "encode",
    "fetch",
    "get_blob",
    "prefetch",
    "register_state_type",
    "tensor_paths",
]
