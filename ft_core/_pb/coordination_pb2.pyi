from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(_message.Message):
    __slots__ = ("step", "quorum_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    step: int
    quorum_id: int
    def __init__(self, step: _Optional[int] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("replica_id", "seq", "version", "lineage", "quorum_id", "failed", "reason", "min_replicas", "group_world_size", "heal_addresses", "store_address", "address", "signature", "init_sync", "allow_heal", "shrink_only", "heals_before_forward", "commit_failures", "data", "signature_lines", "heals_late", "unreachable", "reached", "stable", "unbuilt", "unbuilt_here", "from_scratch", "moves", "position", "not_cast", "fenced")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    ALLOW_HEAL_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    HEALS_BEFORE_FORWARD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_LINES_FIELD_NUMBER: _ClassVar[int]
    HEALS_LATE_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    UNBUILT_FIELD_NUMBER: _ClassVar[int]
    UNBUILT_HERE_FIELD_NUMBER: _ClassVar[int]
    FROM_SCRATCH_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NOT_CAST_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    seq: int
    version: Version
    lineage: int
    quorum_id: int
    failed: bool
    reason: str
    min_replicas: int
    group_world_size: int
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    store_address: str
    address: str
    signature: int
    init_sync: bool
    allow_heal: bool
    shrink_only: bool
    heals_before_forward: bool
    commit_failures: int
    data: str
    signature_lines: _containers.RepeatedScalarFieldContainer[str]
    heals_late: bool
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    reached: _containers.RepeatedScalarFieldContainer[str]
    stable: Version
    unbuilt: str
    unbuilt_here: bool
    from_scratch: bool
    moves: bool
    position: int
    not_cast: bool
    fenced: bool
    def __init__(self, replica_id: _Optional[str] = ..., seq: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., lineage: _Optional[int] = ..., quorum_id: _Optional[int] = ..., failed: bool = ..., reason: _Optional[str] = ..., min_replicas: _Optional[int] = ..., group_world_size: _Optional[int] = ..., heal_addresses: _Optional[_Iterable[str]] = ..., store_address: _Optional[str] = ..., address: _Optional[str] = ..., signature: _Optional[int] = ..., init_sync: bool = ..., allow_heal: bool = ..., shrink_only: bool = ..., heals_before_forward: bool = ..., commit_failures: _Optional[int] = ..., data: _Optional[str] = ..., signature_lines: _Optional[_Iterable[str]] = ..., heals_late: bool = ..., unreachable: _Optional[_Iterable[str]] = ..., reached: _Optional[_Iterable[str]] = ..., stable: _Optional[_Union[Version, _Mapping]] = ..., unbuilt: _Optional[str] = ..., unbuilt_here: bool = ..., from_scratch: bool = ..., moves: bool = ..., position: _Optional[int] = ..., not_cast: bool = ..., fenced: bool = ...) -> None: ...

class Basis(_message.Message):
    __slots__ = ("quorum_id", "members")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("replica_id", "version", "lineage", "group_world_size", "heal_addresses", "store_address", "address", "init_sync", "allow_heal", "shrink_only", "heals_before_forward", "previous_quorum_id", "commit_failures", "data", "heals_late", "position")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    ALLOW_HEAL_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    HEALS_BEFORE_FORWARD_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HEALS_LATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    version: Version
    lineage: int
    group_world_size: int
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    store_address: str
    address: str
    init_sync: bool
    allow_heal: bool
    shrink_only: bool
    heals_before_forward: bool
    previous_quorum_id: int
    commit_failures: int
    data: str
    heals_late: bool
    position: int
    def __init__(self, replica_id: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., lineage: _Optional[int] = ..., group_world_size: _Optional[int] = ..., heal_addresses: _Optional[_Iterable[str]] = ..., store_address: _Optional[str] = ..., address: _Optional[str] = ..., init_sync: bool = ..., allow_heal: bool = ..., shrink_only: bool = ..., heals_before_forward: bool = ..., previous_quorum_id: _Optional[int] = ..., commit_failures: _Optional[int] = ..., data: _Optional[str] = ..., heals_late: bool = ..., position: _Optional[int] = ...) -> None: ...

class QuorumInfo(_message.Message):
    __slots__ = ("quorum_id", "members", "created_ms", "after")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    created_ms: int
    after: _containers.RepeatedCompositeFieldContainer[Basis]
    def __init__(self, quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., created_ms: _Optional[int] = ..., after: _Optional[_Iterable[_Union[Basis, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("clock_us", "step", "phase", "stable", "paused_ms", "heal_addresses", "healed_bytes", "heal_bytes")
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    clock_us: int
    step: int
    phase: str
    stable: Version
    paused_ms: int
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    healed_bytes: int
    heal_bytes: int
    def __init__(self, clock_us: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., stable: _Optional[_Union[Version, _Mapping]] = ..., paused_ms: _Optional[int] = ..., heal_addresses: _Optional[_Iterable[str]] = ..., healed_bytes: _Optional[int] = ..., heal_bytes: _Optional[int] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("reason", "finished", "version", "agreed", "over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    finished: bool
    version: Version
    agreed: bool
    over: bool
    def __init__(self, reason: _Optional[str] = ..., finished: bool = ..., version: _Optional[_Union[Version, _Mapping]] = ..., agreed: bool = ..., over: bool = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("kind", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Refused.Kind]
        REFUSED: _ClassVar[Refused.Kind]
        FINISHED: _ClassVar[Refused.Kind]
        PROTOCOL: _ClassVar[Refused.Kind]
        CONFIG: _ClassVar[Refused.Kind]
        LOST: _ClassVar[Refused.Kind]
    KIND_UNSPECIFIED: Refused.Kind
    REFUSED: Refused.Kind
    FINISHED: Refused.Kind
    PROTOCOL: Refused.Kind
    CONFIG: Refused.Kind
    LOST: Refused.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: Refused.Kind
    reason: str
    def __init__(self, kind: _Optional[_Union[Refused.Kind, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ChangePending(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class MemberLost(_message.Message):
    __slots__ = ("quorum_id", "lost", "held", "failed", "moves")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    held: Version
    failed: bool
    moves: bool
    def __init__(self, quorum_id: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., held: _Optional[_Union[Version, _Mapping]] = ..., failed: bool = ..., moves: bool = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("quorum_id", "replica_id", "for_ms")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_id: str
    for_ms: int
    def __init__(self, quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., for_ms: _Optional[int] = ...) -> None: ...

class Superseded(_message.Message):
    __slots__ = ("quorum_id",)
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    def __init__(self, quorum_id: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("kind", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Order.Kind]
        DRAIN: _ClassVar[Order.Kind]
        KILL: _ClassVar[Order.Kind]
    KIND_UNSPECIFIED: Order.Kind
    DRAIN: Order.Kind
    KILL: Order.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: Order.Kind
    reason: str
    def __init__(self, kind: _Optional[_Union[Order.Kind, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("clock_us", "lease_age_ms", "renew_ms")
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    RENEW_MS_FIELD_NUMBER: _ClassVar[int]
    clock_us: int
    lease_age_ms: int
    renew_ms: int
    def __init__(self, clock_us: _Optional[int] = ..., lease_age_ms: _Optional[int] = ..., renew_ms: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "release", "room", "replica_id", "name", "incarnation", "version", "stable", "highest_id", "quorum_id", "members", "signature", "signature_lines", "expected", "min_replicas", "group_world_size", "join_ms", "liveness_ms", "orphan_ms", "heal_addresses", "paused_ms", "not_cast", "fenced", "after")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_LINES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    JOIN_MS_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_MS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_MS_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_CAST_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    release: str
    room: str
    replica_id: str
    name: str
    incarnation: int
    version: Version
    stable: Version
    highest_id: int
    quorum_id: int
    members: _containers.RepeatedScalarFieldContainer[str]
    signature: int
    signature_lines: _containers.RepeatedScalarFieldContainer[str]
    expected: int
    min_replicas: int
    group_world_size: int
    join_ms: int
    liveness_ms: int
    orphan_ms: int
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    paused_ms: int
    not_cast: bool
    fenced: bool
    after: _containers.RepeatedCompositeFieldContainer[Basis]
    def __init__(self, protocol_version: _Optional[int] = ..., release: _Optional[str] = ..., room: _Optional[str] = ..., replica_id: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., stable: _Optional[_Union[Version, _Mapping]] = ..., highest_id: _Optional[int] = ..., quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., signature: _Optional[int] = ..., signature_lines: _Optional[_Iterable[str]] = ..., expected: _Optional[int] = ..., min_replicas: _Optional[int] = ..., group_world_size: _Optional[int] = ..., join_ms: _Optional[int] = ..., liveness_ms: _Optional[int] = ..., orphan_ms: _Optional[int] = ..., heal_addresses: _Optional[_Iterable[str]] = ..., paused_ms: _Optional[int] = ..., not_cast: bool = ..., fenced: bool = ..., after: _Optional[_Iterable[_Union[Basis, _Mapping]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("hello", "progress", "ask", "left", "broken")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    progress: Progress
    ask: Ask
    left: Left
    broken: Break
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., broken: _Optional[_Union[Break, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "liveness_ms", "peers", "boot", "of_pair")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_MS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    OF_PAIR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    liveness_ms: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    boot: int
    of_pair: bool
    def __init__(self, protocol_version: _Optional[int] = ..., liveness_ms: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., boot: _Optional[int] = ..., of_pair: bool = ...) -> None: ...

class PackedQuorum(_message.Message):
    __slots__ = ("quorum_id", "info")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    info: bytes
    def __init__(self, quorum_id: _Optional[int] = ..., info: _Optional[bytes] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("replica_id", "heal_addresses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_id: _Optional[str] = ..., heal_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("seq", "welcome", "quorum", "reason", "change_pending", "member_lost", "paused", "superseded", "refused", "order", "ack", "verdict", "packed", "paused_ms")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHANGE_PENDING_FIELD_NUMBER: _ClassVar[int]
    MEMBER_LOST_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    welcome: Welcome
    quorum: QuorumInfo
    reason: str
    change_pending: ChangePending
    member_lost: MemberLost
    paused: Paused
    superseded: Superseded
    refused: Refused
    order: Order
    ack: Ack
    verdict: Verdict
    packed: PackedQuorum
    paused_ms: int
    def __init__(self, seq: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., quorum: _Optional[_Union[QuorumInfo, _Mapping]] = ..., reason: _Optional[str] = ..., change_pending: _Optional[_Union[ChangePending, _Mapping]] = ..., member_lost: _Optional[_Union[MemberLost, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., superseded: _Optional[_Union[Superseded, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., packed: _Optional[_Union[PackedQuorum, _Mapping]] = ..., paused_ms: _Optional[int] = ...) -> None: ...

class QuorumRequest(_message.Message):
    __slots__ = ("protocol_version", "room", "replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ..., replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., shrink_only: bool = ..., data: _Optional[str] = ..., commit_failures: _Optional[int] = ...) -> None: ...

class QuorumResponse(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: QuorumInfo
    def __init__(self, quorum: _Optional[_Union[QuorumInfo, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("protocol_version", "room", "replica_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    replica_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ..., replica_id: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("protocol_version", "room", "names")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica_id", "life", "since_ms", "step", "phase", "asking", "member", "stable", "paused_ms", "committed", "stalled")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ASKING_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    life: str
    since_ms: int
    step: int
    phase: str
    asking: bool
    member: bool
    stable: Version
    paused_ms: int
    committed: bool
    stalled: str
    def __init__(self, replica_id: _Optional[str] = ..., life: _Optional[str] = ..., since_ms: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., asking: bool = ..., member: bool = ..., stable: _Optional[_Union[Version, _Mapping]] = ..., paused_ms: _Optional[int] = ..., committed: bool = ..., stalled: _Optional[str] = ...) -> None: ...

class RoomStatus(_message.Message):
    __slots__ = ("room", "quorum_id", "members", "reason", "closed", "replicas", "given_up", "member_count")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    room: str
    quorum_id: int
    members: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    closed: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    given_up: _containers.RepeatedScalarFieldContainer[str]
    member_count: int
    def __init__(self, room: _Optional[str] = ..., quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., closed: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., given_up: _Optional[_Iterable[str]] = ..., member_count: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("release", "uptime_ms", "liveness_ms", "rooms")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_MS_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    release: str
    uptime_ms: int
    liveness_ms: int
    rooms: _containers.RepeatedCompositeFieldContainer[RoomStatus]
    def __init__(self, release: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., liveness_ms: _Optional[int] = ..., rooms: _Optional[_Iterable[_Union[RoomStatus, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("protocol_version", "room", "ended", "given_up", "reason")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    ended: str
    given_up: bool
    reason: str
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ..., ended: _Optional[str] = ..., given_up: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: int
    def __init__(self, rooms: _Optional[int] = ...) -> None: ...

class OrderRequest(_message.Message):
    __slots__ = ("protocol_version", "room", "replica", "reason")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    replica: str
    reason: str
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ..., replica: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class OrderResponse(_message.Message):
    __slots__ = ("told",)
    TOLD_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: _Optional[_Iterable[str]] = ...) -> None: ...

class ReopenRequest(_message.Message):
    __slots__ = ("protocol_version", "room")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    room: str
    def __init__(self, protocol_version: _Optional[int] = ..., room: _Optional[str] = ...) -> None: ...

class ReopenResponse(_message.Message):
    __slots__ = ("was_closed",)
    WAS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    was_closed: bool
    def __init__(self, was_closed: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol_version", "release", "replica_id", "rank", "world_size", "incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    release: str
    replica_id: str
    rank: int
    world_size: int
    incarnation: int
    def __init__(self, protocol_version: _Optional[int] = ..., release: _Optional[str] = ..., replica_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("quorum_id", "attempt", "outcome", "reason", "weight", "contributors", "change", "healed", "exhausted", "stop", "behind", "drain", "missing", "lapsed", "trails", "own_weight", "own_weights")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Verdict.Outcome]
        COMMIT: _ClassVar[Verdict.Outcome]
        VETO: _ClassVar[Verdict.Outcome]
        BROKEN: _ClassVar[Verdict.Outcome]
    OUTCOME_UNSPECIFIED: Verdict.Outcome
    COMMIT: Verdict.Outcome
    VETO: Verdict.Outcome
    BROKEN: Verdict.Outcome
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    HEALED_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LAPSED_FIELD_NUMBER: _ClassVar[int]
    TRAILS_FIELD_NUMBER: _ClassVar[int]
    OWN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    OWN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    attempt: int
    outcome: Verdict.Outcome
    reason: str
    weight: int
    contributors: int
    change: bool
    healed: bool
    exhausted: bool
    stop: bool
    behind: bool
    drain: bool
    missing: _containers.RepeatedScalarFieldContainer[int]
    lapsed: bool
    trails: bool
    own_weight: int
    own_weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, quorum_id: _Optional[int] = ..., attempt: _Optional[int] = ..., outcome: _Optional[_Union[Verdict.Outcome, str]] = ..., reason: _Optional[str] = ..., weight: _Optional[int] = ..., contributors: _Optional[int] = ..., change: bool = ..., healed: bool = ..., exhausted: bool = ..., stop: bool = ..., behind: bool = ..., drain: bool = ..., missing: _Optional[_Iterable[int]] = ..., lapsed: bool = ..., trails: bool = ..., own_weight: _Optional[int] = ..., own_weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Break(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("join", "progress", "ask", "vote", "broken", "left", "order", "room")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    join: JoinRequest
    progress: Progress
    ask: Ask
    vote: Verdict
    broken: Break
    left: Left
    order: Order
    room: str
    def __init__(self, join: _Optional[_Union[JoinRequest, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., vote: _Optional[_Union[Verdict, _Mapping]] = ..., broken: _Optional[_Union[Break, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., room: _Optional[str] = ...) -> None: ...

class RoomReport(_message.Message):
    __slots__ = ("room", "quorum_id", "members", "ended", "bases", "furthest", "closed", "finished", "merged", "entered", "orphan_ms", "elsewhere")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    FURTHEST_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_MS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    room: str
    quorum_id: int
    members: _containers.RepeatedScalarFieldContainer[str]
    ended: bool
    bases: _containers.RepeatedCompositeFieldContainer[Basis]
    furthest: int
    closed: str
    finished: Version
    merged: _containers.RepeatedScalarFieldContainer[int]
    entered: int
    orphan_ms: int
    elsewhere: _containers.RepeatedCompositeFieldContainer[Basis]
    def __init__(self, room: _Optional[str] = ..., quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., ended: bool = ..., bases: _Optional[_Iterable[_Union[Basis, _Mapping]]] = ..., furthest: _Optional[int] = ..., closed: _Optional[str] = ..., finished: _Optional[_Union[Version, _Mapping]] = ..., merged: _Optional[_Iterable[int]] = ..., entered: _Optional[int] = ..., orphan_ms: _Optional[int] = ..., elsewhere: _Optional[_Iterable[_Union[Basis, _Mapping]]] = ...) -> None: ...

class PartnerProposal(_message.Message):
    __slots__ = ("room", "quorum_id", "members", "bases", "over", "presumed", "orphan_ms", "furthest", "entered")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    PRESUMED_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_MS_FIELD_NUMBER: _ClassVar[int]
    FURTHEST_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    room: str
    quorum_id: int
    members: _containers.RepeatedScalarFieldContainer[str]
    bases: _containers.RepeatedCompositeFieldContainer[Basis]
    over: _containers.RepeatedScalarFieldContainer[int]
    presumed: bool
    orphan_ms: int
    furthest: int
    entered: int
    def __init__(self, room: _Optional[str] = ..., quorum_id: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., bases: _Optional[_Iterable[_Union[Basis, _Mapping]]] = ..., over: _Optional[_Iterable[int]] = ..., presumed: bool = ..., orphan_ms: _Optional[int] = ..., furthest: _Optional[int] = ..., entered: _Optional[int] = ...) -> None: ...

class PartnerAnswer(_message.Message):
    __slots__ = ("quorum_id", "accepted")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    accepted: bool
    def __init__(self, quorum_id: _Optional[int] = ..., accepted: bool = ...) -> None: ...

class PartnerReport(_message.Message):
    __slots__ = ("protocol_version", "release", "boot", "role", "hears", "leases", "rooms", "complete", "proposals", "answers", "contact")
    class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STARTING: _ClassVar[PartnerReport.Role]
        ACTIVE: _ClassVar[PartnerReport.Role]
        STANDBY: _ClassVar[PartnerReport.Role]
    STARTING: PartnerReport.Role
    ACTIVE: PartnerReport.Role
    STANDBY: PartnerReport.Role
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HEARS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    release: str
    boot: int
    role: PartnerReport.Role
    hears: int
    leases: int
    rooms: _containers.RepeatedCompositeFieldContainer[RoomReport]
    complete: bool
    proposals: _containers.RepeatedCompositeFieldContainer[PartnerProposal]
    answers: _containers.RepeatedCompositeFieldContainer[PartnerAnswer]
    contact: bool
    def __init__(self, protocol_version: _Optional[int] = ..., release: _Optional[str] = ..., boot: _Optional[int] = ..., role: _Optional[_Union[PartnerReport.Role, str]] = ..., hears: _Optional[int] = ..., leases: _Optional[int] = ..., rooms: _Optional[_Iterable[_Union[RoomReport, _Mapping]]] = ..., complete: bool = ..., proposals: _Optional[_Iterable[_Union[PartnerProposal, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[PartnerAnswer, _Mapping]]] = ..., contact: bool = ...) -> None: ...

class PartnerAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
