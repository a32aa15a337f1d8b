"""`ShardedTraining`: what a Trainer does otherwise where FSDP2 shards its model in each replica group.

How it works. Trainer asks the Accelerator that it has made itself whether FSDP is on, and is told anew what ours says,
which shards on CPUs, too. It writes and reads checkpoints with Accelerate's functions, which are collectives of the
group and mean the group's first process by the main one (`ShardedPreparation.within_group`).

Threads: the training thread.
"""

from __future__ import annotations

from typing import Any

from ft_accelerate import fsdp, refusals
from ft_accelerate.plugin import plugin_or_none
from ft_core.errors import NotAvailableError

Base: Any = object


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse what cannot work before Trainer makes an Accelerator of its own with it. Raises as the Accelerator."""
    if plugin_or_none(arguments.get("fault_tolerance_plugin")) is not None:
        refusals.check_arguments(arguments, fsdp.plugin_in_force(arguments))


class ShardedTraining(Base):  # type: ignore[misc]
    """The part of the mixin that knows FSDP2."""

    accelerator: Any
    is_fsdp_enabled: bool

    def _ft_note_sharding(self) -> None:
        """After the Accelerator was replaced."""
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _ft_check_model(self) -> None:
        """Refuse a model that was sharded when it was loaded.

        Raises:
            NotAvailableError: it was.
        """
        if getattr(self, "is_distributed_loading_by_transformers", False):
            raise NotAvailableError(
                "a model that from_pretrained(distributed_config=...) has sharded cannot be trained with fault "
                "tolerance yet: load it without distributed_config, and shard it by "
                'TrainingArguments(fsdp=True, fsdp_config={"version": 2})'
            )

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.within_group():
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.within_group():
            return super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.within_group():
            return super()._load_best_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.within_group():
            return super()._save_optimizer_and_scheduler(*args, **kwargs)
