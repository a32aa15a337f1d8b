"""`Trainer(strategy="fault_tolerant_fsdp2")`: Lightning's ModelParallelStrategy over replica groups that may fail.

How it works. Inside its group this is ModelParallelStrategy: the LightningModule shards itself in `configure_model`,
over `self.device_mesh`, which is that of the group's ranks. When it is set up, each rank's shards are averaged with
those of the same rank in the other groups while backward runs (`ft_core.fsdp`). The rest is `FaultTolerance`.

- Accumulation: micro-batches before the last are reduced inside the group only; one reduction per optimizer step
  crosses to the other groups.
- State for other replicas is each rank's own part, collected without communication: the ranks of a group collect it at
  different moments (`handing_out`). What Lightning collects for a checkpoint are the same parts, under other names.
- Saving and loading a checkpoint are collective: all ranks of the leading group write, those of other groups remember
  how. Lightning loads after the model is set up, when the Manager is there already.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_core.fsdp import shard_settings
from ft_core.loop.sharded_model import ShardedModel
from ft_lightning import _compat
from ft_lightning._compat import model_parallel, writers
from ft_lightning.arguments import Arguments, DataArguments
from ft_lightning.names import FSDP2
from ft_lightning.trainer import sharded_arguments as refusals
from ft_lightning.trainer.checkpoint_folders import PlacedCheckpoint
from ft_lightning.trainer.fault_tolerance import FaultTolerance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta

log = logging.getLogger("ft_lightning")


class ModelParallel(FaultTolerance):
    """The fault tolerance of ModelParallelStrategy; `strategy_class` mixes the two for one of Lightning's class trees.

    Args:
        min_replicas: smallest quorum; None: FT_MIN_REPLICAS, else 1.
        timeout: how long a collective across groups waits for a silent peer, as a timedelta or in seconds; None:
            FT_TIMEOUT_S, else 60 s.
        lighthouse: host:port, or two with a comma between; None: FT_LIGHTHOUSE.
        manager_kwargs: further arguments of `ft_core.Manager`, for example {"max_retries": 100}.
        data_parallel_size: ranks of a replica group over which FSDP2 shards; "auto": all, divided by
            tensor_parallel_size.
        tensor_parallel_size: ranks of a replica group that compute on the same samples; "auto": 1.
        save_distributed_checkpoint: checkpoints are folders to which each rank of the leading group writes its shards;
            False: one file with the whole model.
        bucket_cap_mb: MiB of this rank's shards per gradient bucket; None: 4.
        process_group_backend: of the group's own process group; None: Lightning's choice.
        from_scratch: whether the job may begin again at step 0 if every group that held its state is lost and no
            checkpoint is loaded; otherwise it ends. None: FT_FROM_SCRATCH, else no.
        elastic_data, global_batch_size, max_micro_steps, lr_scaling, reference_batch_size, share_evaluation: as those
            of FaultTolerantStrategy.
        kwargs: none; what DDP's and FSDP1's strategies have is refused, with what to write instead.

    Raises:
        ConfigError: an argument cannot work; names it, the value and what to do.
    """

    _name = FSDP2

    def __init__(
        self,
        min_replicas: int | None = None,
        timeout: timedelta | float | None = None,
        lighthouse: str | None = None,
        manager_kwargs: dict[str, Any] | None = None,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        save_distributed_checkpoint: bool = True,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        *,
        from_scratch: bool | None = None,
        elastic_data: bool = False,
        global_batch_size: int | None = None,
        max_micro_steps: int | None = None,
        lr_scaling: str | None = None,
        reference_batch_size: int | None = None,
        share_evaluation: bool = False,
        **kwargs: Any,
    ) -> None:
        refusals.check_arguments(kwargs, type(self))
        refusals.check_size("data_parallel_size", data_parallel_size)
        refusals.check_size("tensor_parallel_size", tensor_parallel_size)
        refusals.check_bucket_cap(bucket_cap_mb)
        arguments = Arguments(min_replicas, timeout, lighthouse, manager_kwargs or {}, (), from_scratch)
        arguments.check()
        data = DataArguments(
            elastic_data, global_batch_size, max_micro_steps, lr_scaling, reference_batch_size, None, share_evaluation
        )
        data.check()
        super().__init__(
            arguments, data, data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint, process_group_backend=process_group_backend,
        )  # fmt: skip
        self._given_sizes = data_parallel_size, tensor_parallel_size
        self._bucket_cap_mb = bucket_cap_mb
        self._sharded: ShardedModel | None = None
        """The model, while `fit` runs."""
        self._for_replicas = False
        """State is collected for other replicas, or taken over from one."""

    # ------------------------------------------------------------ set-up and end

    def check_start(self) -> None:
        """Refuse to start groups: how many ranks one has is the launcher's to say.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"strategy={FSDP2!r} without a launcher: a group has several ranks, which a launcher starts; for two "
            f"groups of {self.wanted_devices} on this machine: ftrun --replicas 2 --nproc-per-replica "
            f"{self.wanted_devices} train.py. validate, test and predict work without one"
        )

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        this: Any = self
        refusals.check_precision(str(this.precision_plugin.precision))
        if self.place.launched:
            refusals.mesh_sizes(*self._given_sizes, self.place.world_size)

    def connect(self, model: Any) -> None:
        """Called before everything else of a run."""
        super().connect(model)
        if self._trainer is not None:
            model_parallel.share_path(self._trainer, self.broadcast)  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Lightning makes the mesh here: of this group's ranks, data parallel unless something else was said."""
        this: Any = self
        model_parallel.set_sizes(self, *refusals.mesh_sizes(*self._given_sizes, this.world_size))
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """As the base's, once the model is known to be sharded as a whole."""
        this: Any = self
        refusals.check_model(this.model)
        refusals.check_trainer(trainer)
        super().setup(trainer)

    def _attach_model(self) -> None:
        this: Any = self
        assert self.manager is not None
        assert self.window is not None
        roots = tuple(model_parallel.roots(this.model))
        self._sharded = ShardedModel(self.manager, self.window, roots, shard_settings(roots, self._bucket_cap_mb))

    def _detach_model(self) -> None:
        sharded, self._sharded = self._sharded, None
        if sharded is not None:
            sharded.unwrap()
        if self._trainer is not None:
            model_parallel.no_longer_share_path(self._trainer)

    def on_train_start(self) -> None:
        """The training data is there."""
        super().on_train_start()
        if self.elastic.active:
            refusals.check_elastic(model_parallel.sizes(self)[1], len(self.trained_model.roots))

    # ------------------------------------------------------------ gradients

    @property
    def trained_model(self) -> ShardedModel:
        """The sharded modules."""
        assert self._sharded is not None
        return self._sharded

    @property
    def crosses(self) -> bool:
        """Each backward does, unless `set_requires_all_reduce(False)` was said, which the reducer knows."""
        return True

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients accumulate they are reduced inside the group only."""
        roots: Any = () if self._sharded is None else self._sharded.roots
        for root in roots:
            root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            for root in roots:
                root.set_requires_all_reduce(True)

    # ------------------------------------------------------------ state

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Inside, state is this rank's parts, as the modules have them."""
        before, self._for_replicas = self._for_replicas, True
        try:
            yield
        finally:
            self._for_replicas = before

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores optimizers from what other replicas sent; `load_checkpoint` has done it from a file."""
        return self._for_replicas

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state: this rank's parts, not copied."""
        this: Any = self
        if self._for_replicas:
            state: dict[str, Any] = this.lightning_module.state_dict()
            return state
        return model_parallel.model_parts_for_checkpoint(this.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state likewise."""
        this: Any = self
        if self._for_replicas:
            return model_parallel.optimizer_of(optimizer).state_dict()
        with self.own_steps():
            return model_parallel.optimizer_parts_for_checkpoint(this.model, optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take over another replica's; what is in a file was loaded by `load_checkpoint`."""
        if self._for_replicas:
            model_parallel.load_parts(self._tree, self, "load_model_state_dict", checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over another replica's likewise."""
        if self._for_replicas:
            model_parallel.load_parts(self._tree, self, "load_optimizer_state_dict", checkpoint)

    # ------------------------------------------------------------ checkpoints

    def group_leads(self, first: bool) -> bool:
        """What the first rank knows: all of them write."""
        leads: bool = self.broadcast(first)  # type: ignore[attr-defined]
        return leads

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """All ranks of the leading group write; on all ranks of all groups."""
        path = str(filepath)
        if storage_options is not None:
            self._write_now(checkpoint, filepath, storage_options)  # Lightning says why not
        if "://" in path:
            raise ConfigError(
                f"checkpoint {path!r} {refusals.NOT_HERE}: name a folder of a file system of this machine"
            )
        if writers.interrupted(self._trainer):
            log.warning("%s is not saved: an exception ends this rank, and all ranks of its group would save it", path)
            return
        step = 0 if self.manager is None else self.manager.current_step()
        placed = PlacedCheckpoint(self, path, step, lambda place: self._write_now(dict(checkpoint), place, None))

        def write() -> None:
            if model_parallel.saves_folders(self):
                placed.write_folder()
            else:
                placed.write_file(checkpoint)

        self.leader.saving_together(path, write, placed.place, placed.discard)

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        """Load it on all ranks of this group, into the model and the optimizers. The Manager goes to its step."""
        with self.own_steps():
            checkpoint = super().load_checkpoint(checkpoint_path, **kwargs)
        if self.manager is not None:
            self.resume.into(self.manager)
            self.first_step = self.manager.current_step()
        return checkpoint

    def _read(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        """Raises FileNotFoundError on all ranks of the group if one of them does not find it."""
        this: Any = self
        path = this.broadcast(str(checkpoint_path))  # the first rank has put in place what it has written
        if not this.reduce_boolean_decision(os.path.exists(path)):
            raise FileNotFoundError(path)
        return super()._read(path, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the ranks of this group; not where an exception ends this rank, and the others do not come."""
        if self._trainer is None or not writers.interrupted(self._trainer):
            super().barrier(name)  # type: ignore[misc]


_classes: dict[str, type] = {}


def strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantFSDP2Strategy for `lightning.pytorch` or `pytorch_lightning`."""
    if tree not in _classes:
        base = _compat.part(tree, "strategies.ModelParallelStrategy")
        _classes[tree] = type("FaultTolerantFSDP2Strategy", (ModelParallel, base), {
            "_tree": tree, "strategy_name": FSDP2, "__doc__": ModelParallel.__doc__, "__module__": "ft_lightning",
            "register_strategies": classmethod(lambda cls, registry: registry.register(FSDP2, cls, override=True)),
        })  # fmt: skip
    return _classes[tree]
