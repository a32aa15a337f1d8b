"""The error tree: one class per answer to "whose fault was it, and what can be done?".

Everything this project raises on purpose derives from `FaultToleranceError`. The direct children say who has
to act: the caller (`ConfigError`), a peer or the network (`PeerError` and its children; these are normally *recorded*
in the step and spent at the commit, see `protocol.rank`), or the coordinator (`LighthouseError` and its children).
Messages name the setting, the value and what to do. `assert` is kept for our own invariants.
"""

from __future__ import annotations


class FaultToleranceError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(FaultToleranceError, ValueError):
    """The caller passed something that cannot work; raised where the mistake was made, before anything starts."""


class NotAvailableError(FaultToleranceError, NotImplementedError):
    """A known name whose implementation needs something that is not there (a package, a device, a later release)."""


class UsageError(FaultToleranceError, RuntimeError):
    """An API was called in an order that cannot work (for example `should_commit` before `start_quorum`)."""


class PeerError(FaultToleranceError, RuntimeError):
    """Another replica, or the network to it, failed. Recorded in the step; the step is not committed."""


class CollectiveError(PeerError):
    """A collective of the current quorum failed or was aborted; the process group has to be rebuilt."""


class ThisMachineError(CollectiveError):
    """The process group cannot be built because of this machine, whatever the others do (no descriptors, no memory)."""


class HealError(PeerError):
    """State could not be received from any donor, or what arrived did not verify."""


class StateRefusedError(HealError):
    """A state that cannot be carried: every donor refused to send its own, or it holds a class unknown here.

    Every donor refuses also where the token or the certificates of the two sides do not fit.

    Unlike other heal errors this one is raised by the Manager: asking again would not change it.
    """


class EncodingError(ConfigError):
    """A state dict holds a type that cannot be sent safely; the message names the key path."""


class LighthouseError(FaultToleranceError, RuntimeError):
    """The lighthouse refused, or could not be reached."""


class ProtocolError(LighthouseError):
    """The other side speaks another protocol version, or bytes arrived that are not of this protocol."""


class RefusedError(LighthouseError):
    """The lighthouse refused this replica for good (token, signature, duplicate name, bad settings)."""


class StateLostError(RefusedError):
    """The job has committed, nobody holds that state any more, and no checkpoint was loaded: it begins not again."""


class JobFinishedError(LighthouseError):
    """The room was closed by a replica that finished training; a late restart has nothing left to do."""


class QuorumTimeoutError(LighthouseError, TimeoutError):
    """No quorum within `quorum_timeout`; the message carries the lighthouse's last reason."""
