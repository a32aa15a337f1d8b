"""What adapters use of ft_core's own parts, besides its public names: one list, so that the rest may change.

Threads: as each says.
"""

from ft_core.checkpointing.tree import snapshot
from ft_core.reduction.ddp_arguments import check_arguments, known_arguments
from ft_core.rpc.channel import release
from ft_core.runtime.drain_signal import Sigterm
from ft_core.runtime.step_attempt import StepAttempt

__all__ = ["Sigterm", "StepAttempt", "check_arguments", "known_arguments", "release", "snapshot"]
