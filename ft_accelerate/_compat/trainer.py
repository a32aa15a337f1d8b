"""The parts of transformers.Trainer that are not public API: the methods the mixin relies on, a callback handler.

How it works. Trainer is made to be subclassed, but the loop that the mixin has to follow is split into methods with an
underscore. `check` looks for them when a trainer is made, so that an unknown version is an error at once.

Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler, ProgressCallback, TrainerState

from ft_core.errors import NotAvailableError

try:
    from transformers.trainer_utils import rotate_checkpoints
except ImportError as error:  # before 5.3, whose loop is another one
    raise NotAvailableError(
        f"FaultTolerantTrainer does not know the training loop of transformers {transformers.__version__}: "
        "pip install 'transformers>=5.3'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallbackHandler", "TrainerState", "check", "follow", "rotate_checkpoints"]
METHODS = (
    "_build_accelerator_args", "create_accelerator_and_postprocess", "_run_epoch", "_init_training_state",
    "_finalize_training", "get_batch_samples", "_get_num_items_in_batch", "set_initial_training_values",
    "get_total_train_batch_size", "_save_checkpoint", "_get_output_dir", "evaluation_loop", "_load_rng_state",
    "_maybe_log_save_evaluate", "_wrap_model", "prediction_step",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model", "_save_optimizer_and_scheduler",
)  # fmt: skip
"""Methods of Trainer that the mixin overrides or calls."""
REPORTERS = tuple(INTEGRATION_TO_CALLBACK.values())
"""Trainer's callbacks for TensorBoard, wandb and others (`report_to`), which open once what they write to, if ever."""


def check(trainer: type) -> None:
    """Refuse a Trainer whose training loop is another one.

    Raises:
        NotAvailableError: names the installed version and what it lacks.
    """
    missing = [name for name in METHODS if not hasattr(trainer, name)]
    if missing:
        raise NotAvailableError(
            f"FaultTolerantTrainer does not know the training loop of transformers {transformers.__version__} "
            f"({', '.join(missing)} missing): pip install 'transformers>=5.3'"
        )


class FollowingHandler(CallbackHandler):  # type: ignore[misc]
    """Calls the trainer's callbacks for what happened on all replicas, and lets them know who writes.

    Args:
        handler: Trainer's own, whose callbacks are taken over.
        leads: whether this process writes and reports now.
        stepped: called at the end of each optimizer step; False: it was vetoed, no callback is called for it.
        skips: whether the epoch that begins is passed over.
    """

    callbacks: list[Any]

    def __init__(
        self, handler: Any, leads: Callable[[], bool], stepped: Callable[[Any], bool], skips: Callable[[], bool]
    ) -> None:
        super().__init__(
            handler.callbacks, handler.model, handler.processing_class, handler.optimizer, handler.lr_scheduler
        )
        self._leads = leads
        self._stepped = stepped
        self._skips = skips
        self._trains = False
        """Training has begun, and has not ended."""
        self._reports = False
        """The reporters were set up when this process led, so they have something to write to."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a commit as ever."""
        return super().on_step_end(args, state, control, **kwargs) if self._stepped(state) else control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Unless the epoch is over on the other replicas."""
        return control if self._skips() else super().on_epoch_begin(args, state, control, **kwargs)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Callbacks look at the state to know whether they should write."""
        state.is_world_process_zero = self._leads()
        state.is_local_process_zero = state.is_world_process_zero  # groups of one machine would print the same
        self._trains = (self._trains or event == "on_train_begin") and event != "on_train_end"
        if state.is_world_process_zero and not self._reports:
            self._pass_on_reports(event, args, state, control)
        if event not in ("on_train_begin", "on_train_end"):
            self._pass_on_bars(args, state, control)
        return super().call_event(event, args, state, control, **kwargs)

    def _pass_on_reports(self, event: str, args: Any, state: Any, control: Any) -> None:
        """A new leader's reporters have been told that another process writes: they begin again."""
        self._reports = True
        everybody, reporters = self.callbacks, [one for one in self.callbacks if isinstance(one, REPORTERS)]
        for reporter in reporters:
            if hasattr(reporter, "_initialized"):
                reporter._initialized = False
        if not self._trains or event == "on_train_begin":
            return  # they are told, or set themselves up when something is logged
        self.callbacks = reporters
        try:
            super().call_event("on_train_begin", args, state, control)
        finally:
            self.callbacks = everybody

    def _pass_on_bars(self, args: Any, state: Any, control: Any) -> None:
        """The progress bar is the leader's: a new one has none yet, a former one's prints nothing more."""
        for callback in self.callbacks:
            if not isinstance(callback, ProgressCallback):
                continue
            if state.is_world_process_zero and callback.training_bar is None and self._trains:
                callback.on_train_begin(args, state, control)
            if not state.is_world_process_zero:
                for bar in (callback.training_bar, callback.prediction_bar):
                    if bar is not None:
                        bar.disable = True
                callback.training_bar = callback.prediction_bar = None


def follow(
    handler: Any, leads: Callable[[], bool], stepped: Callable[[Any], bool], skips: Callable[[], bool]
) -> FollowingHandler:
    """A FollowingHandler in place of Trainer's."""
    return FollowingHandler(handler, leads, stepped, skips)
