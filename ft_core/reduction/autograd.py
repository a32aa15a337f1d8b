"""What is touched of autograd's private side, in one place.

Threads: a callback is queued on, and runs at the end of, the graph task of the thread that calls.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Callable

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Run something when the current backward (the innermost, if nested) has computed all gradients."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""A number that differs from one backward to the next; NO_GRAPH_TASK outside of any."""

NO_GRAPH_TASK = -1


def is_nested_backward() -> bool:
    """In a callback: whether the backward that ends was started inside another (a reentrant checkpoint does that).

    The engine gives no sign. But a nested backward is started by a Python autograd function's backward, and that is on
    the stack of this thread.
    """
    outer = BackwardCFunction.apply.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is outer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
