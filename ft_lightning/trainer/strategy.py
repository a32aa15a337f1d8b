"""`Trainer(strategy="fault_tolerant")`: Lightning's DDP strategy over replica groups that may fail.

How it works. Inside its group this is DDPStrategy, each rank of which holds the whole model. The model is wrapped in
ft_core's DistributedDataParallel, so gradients are averaged over all ranks of all groups while backward runs. The rest
is `FaultTolerance`.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core import DistributedDataParallel
from ft_core.errors import ConfigError
from ft_core.loop.group_model import GroupModel
from ft_core.loop.inside_group import InsideGroup
from ft_core.loop.tools import check_arguments
from ft_lightning import _compat
from ft_lightning._compat import callbacks as _callbacks
from ft_lightning.arguments import Arguments, DataArguments, check_kwargs
from ft_lightning.names import NAME
from ft_lightning.trainer.fault_tolerance import FaultTolerance

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import nn


class DataParallel(FaultTolerance):
    """The fault tolerance of DDPStrategy; `strategy_class` mixes the two for one of Lightning's two class trees.

    Args:
        min_replicas: smallest quorum; None: FT_MIN_REPLICAS, else 1.
        timeout: how long a collective waits for a silent peer, as a timedelta or in seconds; None: FT_TIMEOUT_S, else
            60 s.
        lighthouse: host:port, or two with a comma between; None: FT_LIGHTHOUSE, or an embedded one where `fit` starts
            the replica groups itself.
        manager_kwargs: further arguments of `ft_core.Manager`, for example {"max_retries": 100}.
        ftrun_options: options of ftrun for a run without a launcher, for example ["--standby", "1"].
        find_unused_parameters: False: all parameters are used in every step (their users are not counted; one that is
            unused all the same gets zeros). True: they may also be frozen for a time (toggle_optimizer). None: True
            with manual optimization, else neither is said.
        broadcast_buffers: buffers (BatchNorm's statistics) follow the first participant at each commit.
        bucket_cap_mb: size of the gradient buckets; None: torch's.
        process_group_backend: of the group's own process group; None: Lightning's choice.
        from_scratch: whether the job may begin again at step 0 if every group that held its state is lost and no
            checkpoint is loaded; otherwise it ends. None: FT_FROM_SCRATCH, else no.
        elastic_data: make the training DataLoader elastic: each sample of an epoch goes into exactly one committed
            step, whatever fails. Shuffled by Lightning's seed.
        global_batch_size: with elastic data, samples of one optimizer step, whatever the membership, by more or fewer
            micro-batches per replica.
        max_micro_steps: with `global_batch_size`, refuse more micro-batches per step and rank than this.
        lr_scaling: "linear" or "sqrt": learning rates follow the samples of each committed step (without elastic data:
            the number of replica groups in it). Schedulers see the unscaled ones.
        reference_batch_size: with lr_scaling, samples (or groups) in the steps for which the rates were chosen.
        on_exhausted: what a replica does whose loader ends before the others' in an epoch: "shadow", "stop_all" or
            "leave", see `ft_core.Manager.run_out`; None: it begins its next epoch earlier. Not with elastic data, which
            ends everywhere at once.
        share_evaluation: divide validation, test and prediction data among the replica groups; what a lost group had
            not delivered is evaluated again. Metrics and predictions are those of all data, on all groups.
        kwargs: further arguments of Lightning's DDPStrategy. Refused: ddp_comm_hook and what belongs to it,
            model_averaging_period, start_method, cluster_environment.

    Raises:
        ConfigError: an argument cannot work; names it, the value and what to do.
    """

    def __init__(
        self,
        min_replicas: int | None = None,
        timeout: timedelta | float | None = None,
        lighthouse: str | None = None,
        manager_kwargs: dict[str, Any] | None = None,
        ftrun_options: list[str] | None = None,
        find_unused_parameters: bool | None = None,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        *,
        from_scratch: bool | None = None,
        elastic_data: bool = False,
        global_batch_size: int | None = None,
        max_micro_steps: int | None = None,
        lr_scaling: str | None = None,
        reference_batch_size: int | None = None,
        on_exhausted: str | None = None,
        share_evaluation: bool = False,
        **kwargs: Any,
    ) -> None:
        arguments = Arguments(
            min_replicas, timeout, lighthouse, manager_kwargs or {}, ftrun_options or (), from_scratch
        )
        arguments.check()
        data = DataArguments(
            elastic_data, global_batch_size, max_micro_steps, lr_scaling, reference_batch_size, on_exhausted,
            share_evaluation,
        )  # fmt: skip
        data.check()
        unused = {} if find_unused_parameters is None else {"find_unused_parameters": find_unused_parameters}
        kwargs.update(unused, **({} if broadcast_buffers else {"broadcast_buffers": False}))
        kwargs.update({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb})
        check_kwargs(kwargs, type(self))
        super().__init__(arguments, data, process_group_backend=process_group_backend, **kwargs)
        check_arguments(self._ddp_kwargs)  # type: ignore[attr-defined]

    @property
    def trained_model(self) -> GroupModel:
        """The wrapped model."""
        return self.model  # type: ignore[attr-defined,no-any-return]

    @property
    def crosses(self) -> bool:
        """Not under `no_sync`, as while gradients accumulate."""
        return bool(self.trained_model.require_backward_grad_sync)

    def take_part(self, taking_part: bool) -> None:
        """Before a batch that is only gone through: its backwards stay on this rank."""
        self.trained_model.require_backward_grad_sync = taking_part

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.manager is None:
            return super()._setup_model(model)  # type: ignore[misc,no-any-return]
        this: Any = self
        if this.world_size > 1:
            _compat.share_state(self._tree, model)
        # With manual optimization most backwards leave parameters of other optimizers without a gradient.
        manual = {} if this.lightning_module.automatic_optimization else {"find_unused_parameters": True}
        options = {**manual, **this._ddp_kwargs}
        inside = InsideGroup(this.world_size)
        if _callbacks.thaws(self._trainer):  # what is frozen now counts as unused until it is not
            options["find_unused_parameters"] = True
            with _callbacks.all_thawed(model):
                return GroupModel(self.manager, inside, model, **options)
        return GroupModel(self.manager, inside, model, **options)

    def _register_ddp_hooks(self) -> None:
        """Refuse DDP's hooks: the Manager communicates."""
        if getattr(self, "_ddp_comm_hook", None) is not None:
            raise ConfigError("ddp_comm_hook cannot be used with strategy='fault_tolerant': the Manager communicates")

    def _detach_model(self) -> None:
        wrapped: Any = getattr(self, "model", None)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.gradient_reducer.remove_hooks()  # another fit wraps the same parameters again


_classes: dict[str, type] = {}


def strategy_class(tree: str = "lightning.pytorch") -> type:
    """FaultTolerantStrategy for `lightning.pytorch` or `pytorch_lightning`."""
    if tree not in _classes:
        base = _compat.part(tree, "strategies.DDPStrategy")
        _classes[tree] = type("FaultTolerantStrategy", (DataParallel, base), {
            "_tree": tree, "strategy_name": NAME, "__doc__": DataParallel.__doc__, "__module__": "ft_lightning",
            "register_strategies": classmethod(lambda cls, registry: registry.register(NAME, cls, override=True)),
        })  # fmt: skip
    return _classes[tree]
