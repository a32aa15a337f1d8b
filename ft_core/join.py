"""torch's `Join` context over replicas that may fail: `with Join([model, optimizer]):` as in torch's documentation.

How it works. torch's context asks its members for a process group, and learns through all_reduces of one number on it
who is still there. `JoinGroup` stands for that group, and answers on this machine: what it asks for is known from the
fence. On the way out of the context torch asks "how many have not joined yet?" once per iteration; each time this
replica takes part in one attempt with weight zero (`Manager.shadow_step`), and applies it if an OptimizerWrapper is
among the members of the context. So hooks have nothing left to do, and their order does not matter.

Invariants: replicas that are in the context communicate through the Manager's attempts only. One replica, one context
at a time. Threads: the training thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ft_core.errors import ConfigError, UsageError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.distributed import Work

__all__ = ["JoinManager", "JoinMember", "Joining", "joining_of", "notify"]

JOIN_DEVICE = torch.device("cpu")
"""Where torch makes the numbers it asks with: they never leave this process."""


class JoinManager(Protocol):
    """What joining needs of a `Manager`."""

    @property
    def all_exhausted(self) -> bool:
        """The last step found the round of data over."""
        ...

    @property
    def everyone_out(self) -> bool:
        """Every member ran out of data by itself."""
        ...

    @property
    def stop_agreed(self) -> bool:
        """Everybody is to stop."""
        ...

    def shadow_step(self, apply: Callable[[], object] | None = None, *, ends: bool = False) -> bool:
        """Take part in one step without data; True if the round is over."""
        ...


class JoinGroup(ProcessGroup):
    """The process group that torch's context talks to: one rank, whose answers come from the fence."""

    def __init__(self, joining: Joining) -> None:
        super().__init__()
        self._joining = joining

    def __repr__(self) -> str:
        return f"JoinGroup({self._joining!r})"

    def __eq__(self, other: object) -> bool:
        # The context asks for its rank in the group, for messages only, and torch knows it only where there is a
        # default group. A process that is "not in the group" has rank -1, whether there is one or not.
        if other is dist.GroupMember.NON_GROUP_MEMBER:
            return _called_by_get_rank()
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def getBackendName(self) -> str:
        """Return the name."""
        return "ft-join"

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0

    def errored(self) -> Exception | None:
        """Return None: errors come out of the Manager's calls."""
        return None

    def abort(self) -> None:
        """Nothing is ever pending."""

    def set_timeout(self, timeout: timedelta) -> None:
        """The Manager's timeouts hold."""

    def shutdown(self) -> None:
        """Nothing is open."""

    def _launch(self, name: str, *arguments: Any) -> Work:
        if name != "allreduce":
            raise UsageError(f"the group of a Join context answers all_reduce only, not {name}")
        (tensor,) = arguments[0]
        with torch.no_grad():
            self._joining.answer(tensor)
        return DoneWork(arguments[0])


class Joining:
    """What the members of a context share: one per Manager."""

    def __init__(self, manager: JoinManager) -> None:
        self.group = JoinGroup(self)
        self.notifying = False
        """A member tells torch that it is there; else torch asks on the way out of the context."""
        self._manager = manager
        self._members: list[Joinable] = []
        self._apply: Callable[[], object] | None = None
        self._complete = False
        self._failed: Exception | None = None

    def __repr__(self) -> str:
        applies = "applies commits" if self._apply is not None else "trails behind commits"
        return f"Joining({len(self._members)} members, {applies} when joined)"

    def check(self) -> None:
        """Raise what went wrong in the last answer: inside torch's all_reduce its logging would hide it."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def add(self, member: Joinable, apply: Callable[[], object] | None = None) -> JoinHook:
        """A context is being made with this member. Returns its hook.

        Raises:
            ConfigError: it is the second one that steps an optimizer.
        """
        if self._complete:  # of the context before
            self._members, self._apply, self._complete = [], None, False
        if apply is not None and self._apply is not None:
            raise ConfigError(
                "Join takes one OptimizerWrapper: each of them votes on its own step, and a replica that has joined "
                "cannot know whose vote comes next. Step several optimizers after one vote (manager.should_commit)"
            )
        self._members.append(member)
        self._apply = apply or self._apply
        return _Hook(self)

    def complete(self) -> JoinGroup:
        """All members are there. Returns their group."""
        self._complete = True
        return self.group

    def answer(self, tensor: torch.Tensor) -> None:
        """Overwrite the number torch asks with."""
        says_something = bool(tensor.any())
        if self.notifying:
            # "I am here" needs no answer. "Has anybody told us to terminate?": somebody who ended the round for all.
            if not says_something:
                tensor.fill_(self._manager.all_exhausted)
        elif says_something:  # "I terminate": the others know it from the fence
            self.check()
        else:  # "How many have not joined?"
            try:
                tensor.fill_(0 if self._out_of_data() else 1)
            except Exception as error:  # noqa: BLE001 - raised by the hook that torch calls next
                self._failed = error
                tensor.fill_(1)

    def _out_of_data(self) -> bool:
        manager = self._manager
        if not any(member._join_config.throw_on_early_termination for member in self._members):
            return manager.stop_agreed or manager.shadow_step(self._apply)
        while not manager.stop_agreed and not manager.shadow_step(self._apply, ends=True):
            pass  # vetoed by somebody's failure, or another member is healed first
        return manager.everyone_out  # else torch raises: here now, elsewhere in the next forward


class _Hook(JoinHook):
    """What there is to do is done when torch asks who is still there; a failure of it comes out here."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining

    def main_hook(self) -> None:
        self._joining.check()


class JoinMember(Joinable):
    """The half of a Joinable that is the same for models and optimizers."""

    @property
    def join_device(self) -> torch.device:
        """The CPU: nothing that torch's context exchanges leaves this process."""
        return JOIN_DEVICE

    @property
    def join_process_group(self) -> Any:
        """The group whose answers come from the fence."""
        return joining_of(self._join_manager()).complete()

    def _join_manager(self) -> object:
        """The Manager, or whatever was given for one."""
        raise NotImplementedError


def joining_of(manager: object) -> Joining:
    """The one of this Manager.

    Raises:
        ConfigError: it is not a `Manager`.
    """
    if not hasattr(manager, "shadow_step"):
        raise ConfigError(f"Join needs a model and an optimizer of a Manager, not of a {type(manager).__name__}")
    known = cast("Any", manager).__dict__
    joining: Joining | None = known.get("_joining")
    if joining is None:
        joining = known["_joining"] = Joining(cast("JoinManager", manager))
    return joining


def notify(member: JoinMember) -> None:
    """A step begins: tell the context, if there is one and this member is the one that speaks.

    Raises:
        RuntimeError: torch's, with throw_on_early_termination: another replica is out of data.
    """
    config = member._join_config
    if not (config.enable and config.is_first_joinable):
        return
    joining = joining_of(member._join_manager())
    joining.notifying = True
    try:
        Join.notify_join_context(member)
    finally:
        joining.notifying = False


def _called_by_get_rank() -> bool:
    frame, depth = sys._getframe(2), 2
    for _ in range(depth):
        if frame.f_code is dist.get_rank.__code__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
