"""torch's `Join` context over replicas that may fail: `with Join([model, optimizer]):` as in torch's documentation.

How it works. torch's context asks its members for a process group, and learns through all_reduces of one number on it
who is still there. `JoinGroup` stands for that group, and answers on this machine: what it asks for is known from the
fence. On the way out of the context torch asks "how many have not joined yet?" once per iteration; each time this
replica takes part in one attempt with weight zero (`Hooks.shadow_step`), and applies it if an OptimizerWrapper is
among the members of the context. So hooks have nothing left to do, and their order does not matter. As in torch's own
example, the loop may do without zero_grad: the model's forward then opens the step.

The group answers nothing but those questions. A member of the script's own may not reduce over it: the attempt in
which its peers' tensors could meet is over, or not begun, when it calls, so it would get its own tensor back.

Invariants: replicas that are in the context communicate through the Manager's attempts only. One replica, one context
at a time. Threads: the training thread.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ft_core.errors import ConfigError, UsageError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.done_work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import CodeType, FrameType

    from torch.distributed import Work

    from ft_core.runtime.hooks import Hooks

__all__ = ["JoinManager", "JoinMember", "Joining", "joining_of", "notify"]

JOIN_DEVICE = torch.device("cpu")
"""Where torch makes the numbers it asks with: they never leave this process."""


MAX_FRAMES = 8
"""How many callers are looked at to find out who asks: torch's collectives have some wrappers."""


class Question(enum.Enum):
    """What torch's context uses an all_reduce for."""

    HERE = "I have not joined; has anybody told us to terminate?"
    COUNT = "how many have not joined?"
    TERMINATE = "I terminate"


_QUESTIONS: dict[CodeType, Question] = {
    Join.notify_join_context.__code__: Question.HERE,
    Join._get_num_nonjoined_procs.__code__: Question.COUNT,
    Join._notify_procs_to_terminate.__code__: Question.TERMINATE,
}


class JoinManager(Protocol):
    """What joining needs of a `Manager`."""

    replica_id: str

    @property
    def members(self) -> tuple[str, ...]:
        """replica_id of each member of the quorum."""
        ...

    @property
    def step_open(self) -> bool:
        """A step was started and not voted on yet."""
        ...

    def start_quorum(self) -> None:
        """Open the next step."""

    @property
    def all_exhausted(self) -> bool:
        """The last step found the data pass over."""
        ...

    @property
    def stop_agreed(self) -> bool:
        """Everybody is to stop."""
        ...

    @property
    def hooks(self) -> Hooks:
        """Steps without data."""
        ...


class JoinGroup(ProcessGroup):
    """The process group that torch's context talks to: one rank, whose answers come from the fence."""

    def __init__(self, joining: Joining) -> None:
        super().__init__()
        self._joining = joining
        self._refused: Exception | None = None
        """What a collective raised, while torch describes the group for its log."""

    def __repr__(self) -> str:
        return f"JoinGroup({self._joining!r})"

    def __eq__(self, other: object) -> bool:
        if other is dist.GroupMember.NON_GROUP_MEMBER:
            return self._not_in_group()
        return self is other

    def __ne__(self, other: object) -> bool:
        if other is not self and _caller(_is_set_up) is not None:
            raise ConfigError(
                f"Join: {'the default group' if other is None else repr(other)} is the join_process_group of another "
                "member of this context. Those of a context with ft_core's model or optimizer all have to have "
                "model.join_process_group, as only the Manager knows who is there. A ZeroRedundancyOptimizer belongs "
                "into ft_core.Optimizer(manager, ...), which goes into Join in its place"
            )
        return not self == other

    def _not_in_group(self) -> bool:
        """Torch wants to know whether this process is outside the group: before it looks the group up in its tables.

        The context asks for its rank in the group, for messages only, and torch knows it only where there is a default
        group. A process that is not in the group has rank -1, whether there is one or not; `answer` mends it.
        """
        if self._refused is not None and _caller(_is_error_log) is not None:
            refused, self._refused = self._refused, None
            raise refused  # else torch, which describes the group for its log, ends in an error about that
        if _caller(_is_get_rank) is None:
            return False
        if _caller(_is_set_up) is None:
            raise UsageError(
                "the group of a Join context (join_process_group) has no ranks that stay the same: it stands for "
                "replicas that come and go, and cannot be given to a ZeroRedundancyOptimizer or another user of "
                "process groups. Give them a group of the ranks of this replica group, for example the default group"
            )
        return True

    def refuse(self, error: Exception) -> NoReturn:
        """Raise it out of torch's collective, which would hide it where there is a default group."""
        self._refused = error if dist.is_initialized() else None
        raise error

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
        asker = _caller(_asks)
        if name != "allreduce" or asker is None:
            self.refuse(
                UsageError(
                    f"{name} over the group of a Join context (join_process_group): it only tells torch who is still "
                    "there; a replica that has joined makes no collectives of a member's own, and the result would be "
                    "this replica's alone. Reduce after the context (manager.allreduce between optimizer.zero_grad() "
                    "and optimizer.step()); how many batches all replicas committed: manager.batches_committed()"
                )
            )
        question = _QUESTIONS[asker.f_code]
        (tensor,) = arguments[0]
        with torch.no_grad():
            try:
                self._joining.answer(tensor, question)
            except Exception as error:  # noqa: BLE001 - raised by this call
                self.refuse(error)
        if question is not Question.HERE:
            cast("Join", asker.f_locals["self"])._rank = self._joining.rank  # known now; for torch's messages
        return DoneWork(arguments[0])


class Joining:
    """What the members of a context share: one per Manager."""

    def __init__(self, manager: JoinManager) -> None:
        self.group = JoinGroup(self)
        self._manager = manager
        self._members: list[Joinable] = []
        self._apply: Callable[[], object] | None = None
        self._complete = False
        self._inside = False
        """This replica has not joined yet: what it does belongs to the context."""
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
        self._inside = True
        self._apply = apply or self._apply
        return _Hook(self)

    def complete(self) -> JoinGroup:
        """All members are there. Returns their group."""
        self._complete = True
        return self.group

    @property
    def rank(self) -> int:
        """This replica's place in the quorum; 0 while there is none."""
        members, me = self._manager.members, self._manager.replica_id
        return members.index(me) if me in members else 0

    def begin(self, member: Joinable, *, opens: bool) -> None:
        """This replica is there. `opens`: a step begins here, if the loop has not opened it before.

        Raises:
            RuntimeError: torch's, with throw_on_early_termination: another replica is out of data.
        """
        opens = opens and self._inside and not self._manager.step_open
        for speaker in self._members if opens else (member,):  # whoever it is that speaks for all
            Join.notify_join_context(speaker)
        if opens:
            self._manager.start_quorum()

    def answer(self, tensor: torch.Tensor, question: Question) -> None:
        """Overwrite the number torch asks with."""
        says_something = bool(tensor.any())
        if question is Question.HERE:
            # "I am here" needs no answer. "Has anybody told us to terminate?": somebody who ended the pass for all.
            if not says_something:
                ended = self._manager.all_exhausted
                self._inside = not ended
                tensor.fill_(ended)
        elif question is Question.TERMINATE:  # the others know it from the fence
            self.check()
        else:
            self._inside = False
            try:
                tensor.fill_(0 if self._out_of_data() else 1)
            except Exception as error:  # noqa: BLE001 - raised by the hook that torch calls next
                self._failed = error
                tensor.fill_(1)

    def _out_of_data(self) -> bool:
        manager = self._manager
        if not any(member._join_config.throw_on_early_termination for member in self._members):
            return manager.stop_agreed or manager.hooks.shadow_step(self._apply)
        while not manager.stop_agreed and not manager.hooks.shadow_step(self._apply, ends=True):
            pass  # vetoed by somebody's failure, or another member is healed first
        return manager.hooks.everyone_out  # else torch raises: here now, elsewhere in the next forward


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
    if not hasattr(getattr(manager, "hooks", None), "shadow_step"):
        raise ConfigError(f"Join needs a model and an optimizer of a Manager, not of a {type(manager).__name__}")
    known = cast("Any", manager).__dict__
    joining: Joining | None = known.get("_joining")
    if joining is None:
        joining = known["_joining"] = Joining(cast("JoinManager", manager))
    return joining


def notify(member: JoinMember, *, opens: bool = False) -> None:
    """Tell the context, if there is one, that this replica is there; `opens`: as in `Joining.begin`, which raises."""
    if member._join_config.enable:
        joining_of(member._join_manager()).begin(member, opens=opens)


def _caller(wanted: Callable[[FrameType], bool]) -> FrameType | None:
    """The nearest frame above the caller's that is wanted, among MAX_FRAMES."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MAX_FRAMES):
        if frame is None or wanted(frame):
            return frame
        frame = frame.f_back
    return None


def _asks(frame: FrameType) -> bool:
    return frame.f_code in _QUESTIONS


def _is_get_rank(frame: FrameType) -> bool:
    return frame.f_code is dist.get_rank.__code__


def _is_set_up(frame: FrameType) -> bool:
    return frame.f_code is Join._extract_dist_info.__code__


def _is_error_log(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_get_msg_dict"
