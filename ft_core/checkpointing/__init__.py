"""Live state: what moves a healthy replica's state to a healing one.

`state_encoding` splits a state into a safe skeleton and tensors (`state_types`: which classes of the user's may be in
it), `ranges` cuts those into ranges, `offer` and `http.server` serve them, `http.client` and `receive_plan` fetch and
place them (`own_state`: what a receiver believes); `transport` is the interface, `http_transport` what the Manager
uses.
"""

from ft_core.checkpointing.http.client import FetchResult, fetch, get_blob, prefetch
from ft_core.checkpointing.http.server import StateServer
from ft_core.checkpointing.http_transport import HTTPTransport
from ft_core.checkpointing.own_state import OwnState
from ft_core.checkpointing.pg_transport import PGTransport
from ft_core.checkpointing.receive_plan import Prefetched
from ft_core.checkpointing.state_encoding import Encoded, Leaf, decode, encode
from ft_core.checkpointing.state_types import register_state_type
from ft_core.checkpointing.transport import CheckpointTransport
from ft_core.checkpointing.tree import tensor_paths

__all__ = [
    "CheckpointTransport",
    "Encoded",
    "FetchResult",
    "HTTPTransport",
    "Leaf",
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
