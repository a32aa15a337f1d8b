"""Protobuf <-> the pure dataclasses, checked in both directions. Nothing else knows the generated classes' fields.

`encode_*` turn pure values into bytes, `decode_*` turn bytes into pure values or raise. Nothing that came over the
network leaves this package unchecked: lengths and counts have named bounds (`bounds`), numbers a range, enums a known
value. No socket, thread or clock.
"""

from __future__ import annotations

from ft_core._pb import coordination_pb2 as pb
from ft_core.rpc.codec.bounds import (
    MAX_ADDRESS,
    MAX_ADDRESSES_BYTES,
    MAX_DATA,
    MAX_NAME,
    MAX_PUSH_BYTES,
    MAX_RANKS,
    MAX_REQUEST_BYTES,
    MAX_SIGNATURE_LINES,
    MAX_TEXT,
    check_version,
    clip,
)
from ft_core.rpc.codec.partner import decode_report, encode_report
from ft_core.rpc.codec.pushes import (
    answer,
    decode_push,
    encode_push,
    encode_quorum,
)
from ft_core.rpc.codec.requests import (
    Broken,
    RankAsk,
    decode_group_request,
    decode_lease_request,
    decode_quorum_info,
    decode_unary,
    encode_hello,
    encode_join,
    encode_lease,
    encode_quorum_info,
    encode_rank,
    encode_unary,
)
from ft_core.rpc.codec.state import Opening, Renewal, fit_signature_lines

__all__ = [
    "Broken",
    "MAX_ADDRESS",
    "MAX_ADDRESSES_BYTES",
    "MAX_DATA",
    "MAX_SIGNATURE_LINES",
    "MAX_NAME",
    "MAX_PUSH_BYTES",
    "MAX_RANKS",
    "MAX_REQUEST_BYTES",
    "MAX_TEXT",
    "Opening",
    "RankAsk",
    "Renewal",
    "answer",
    "check_version",
    "clip",
    "decode_group_request",
    "decode_report",
    "decode_push",
    "decode_lease_request",
    "decode_quorum_info",
    "decode_unary",
    "encode_hello",
    "encode_join",
    "encode_lease",
    "encode_push",
    "encode_quorum",
    "encode_quorum_info",
    "encode_rank",
    "encode_report",
    "encode_unary",
    "fit_signature_lines",
    "pb",
]
