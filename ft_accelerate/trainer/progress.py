"""`Progress`: the state of transformers' Trainer that a newcomer takes over: its TrainerState, and the scheduler.

Threads: the training thread.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN = ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params",
       "stateful_callbacks")  # fmt: skip
"""Fields of TrainerState that differ from replica to replica."""


class Progress:
    """State that a newcomer takes over besides what the accelerator prepared.

    Args:
        trainer: whose progress it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The progress as texts, numbers and tensors."""
        trainer = self._trainer
        state = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in OWN}
        scheduler = trainer.lr_scheduler
        return {
            "state": json.dumps(state), "scheduler": None if scheduler is None else scheduler.state_dict(),
            "logged_at": trainer._globalstep_last_logged, "total_loss": trainer._total_loss_scalar,
            "loss": float(trainer._tr_loss),
        }  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on a donor; counts from the next batch."""
        trainer, state = self._trainer, json.loads(saved["state"])
        if state["max_steps"] != trainer.state.max_steps and trainer._created_lr_scheduler:
            self._plan_anew(state["max_steps"])
        for name, value in state.items():
            setattr(trainer.state, name, value)
        if saved["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(saved["scheduler"])
            for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        trainer._globalstep_last_logged, trainer._total_loss_scalar = saved["logged_at"], saved["total_loss"]
        trainer._tr_loss.fill_(saved["loss"])

    def _plan_anew(self, steps: int) -> None:
        """The others began with another number of groups, and so of steps: their schedule counts."""
        trainer = self._trainer
        trainer.lr_scheduler = None
        trainer.create_scheduler(num_training_steps=steps)
        trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
