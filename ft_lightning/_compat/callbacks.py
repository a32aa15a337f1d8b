"""The part of `_compat` about callbacks that ship with Lightning and keep state where no checkpoint has it.

How it works. As `_compat`. A resumed run rebuilds what a checkpoint lacks from the order in which its hooks are called;
a newcomer in the middle of an epoch has those hooks behind it. So donors hand out `hidden` besides the checkpoint, and
`around_loading` puts it where the callbacks have it:

- ModelPruning renames parameters and keeps masks; it saves weights without them, which a pruned module cannot load.
  The layers of the lottery ticket are copied before replicas have equal weights, and are in no checkpoint.
- BackboneFinetuning (every BaseFinetuning) adds groups to the optimizer, thaws parameters and lets BatchNorm count.
- StochasticWeightAveraging reads how many models it has averaged at its first epoch only.
- WeightAveraging puts the average where the module's weights are expected, and these under a key of its own.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.utils import prune

from ft_core.loop.tools import snapshot
from ft_lightning._compat import part, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    Trainer = Any
WEIGHTS = "state_dict"
"""The key of the module's state in a Lightning checkpoint."""


def _those(trainer: Trainer, name: str) -> list[Any]:
    kind = part(tree_of(trainer), f"callbacks.{name}")
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def has(trainer: Trainer, name: str) -> bool:
    """Whether one of Lightning's callbacks of this name is among the Trainer's."""
    known = part(tree_of(trainer), "callbacks.__dict__")
    return name in known and bool(_those(trainer, name))


def thaws(trainer: Trainer) -> bool:
    """A callback trains parameters later that are frozen when the module is wrapped."""
    return bool(_those(trainer, "BaseFinetuning"))


def schedules_accumulation(trainer: Trainer) -> bool:
    """Whether a GradientAccumulationScheduler changes the number of micro-batches."""
    return bool(_those(trainer, "GradientAccumulationScheduler"))


@contextlib.contextmanager
def all_thawed(module: nn.Module) -> Iterator[None]:
    """Meanwhile no parameter is frozen, so what is wrapped has a place for the gradient of each."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def masks_kept(trainer: Trainer) -> Iterator[None]:
    """Meanwhile ModelPruning saves weights and masks. Relies on `on_save_checkpoint` asking for this attribute."""
    those = [callback for callback in _those(trainer, "ModelPruning") if callback._make_pruning_permanent]
    for callback in those:
        callback._make_pruning_permanent = False
    try:
        yield
    finally:
        for callback in those:
            callback._make_pruning_permanent = True


def hidden(trainer: Trainer) -> dict[str, Any]:
    """State that the callbacks keep besides `state_dict()`; tensors are references."""
    module, pruning = trainer.lightning_module, _those(trainer, "ModelPruning")
    counting = [name for name, owner in module.named_modules() if getattr(owner, "track_running_stats", False)]
    return {
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "counting": counting,
        "tickets": [[_ticket(callback, ref) for ref in _layers(callback)] for callback in pruning],
    }


def _layers(callback: Any) -> list[dict[str, Any]]:
    """The lottery ticket. Relies on `ModelPruning._original_layers`: `data` is a layer, `names` which parameters."""
    return list((callback._original_layers or {}).values())


def _weights(callback: Any, ref: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name in the layer, and the module's parameter that is reset to it."""
    for index, name in ref["names"]:
        owner = callback._parameters_to_prune[index][0]
        yield name, getattr(owner, f"{name}_orig" if hasattr(owner, f"{name}_orig") else name)


def _ticket(callback: Any, ref: Mapping[str, Any]) -> dict[str, Any]:
    """A reset makes the module's weight and the ticket one memory (`_copy_param`), so training changes both."""
    layer = ref["data"]
    tied = [name for name, weight in _weights(callback, ref) if getattr(layer, name).data_ptr() == weight.data_ptr()]
    return {"state": layer.state_dict(), "tied": tied}


def load_hidden(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take over what `hidden` returned, once the callbacks know their state and before the optimizers know theirs.

    Relies on `BaseFinetuning.on_fit_start` making the optimizer's groups of what `load_state_dict` was given, and on
    `StochasticWeightAveraging.load_state_dict` keeping the count as `_init_n_averaged`.
    """
    module = trainer.lightning_module
    frozen, counting = set(state["frozen"]), set(state["counting"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, submodule in module.named_modules():
        if hasattr(submodule, "track_running_stats"):
            submodule.track_running_stats = name in counting
    for callback, layers in zip(_those(trainer, "ModelPruning"), state["tickets"], strict=True):
        for ref, layer in zip(_layers(callback), layers, strict=True):
            ref["data"].load_state_dict(layer["state"])
            for name, weight in _weights(callback, ref):
                if name in layer["tied"]:
                    getattr(ref["data"], name).data = weight.data
    for callback in _those(trainer, "BaseFinetuning"):
        callback.on_fit_start(trainer, module)
    for callback in _those(trainer, "StochasticWeightAveraging"):
        if callback.n_averaged is not None:
            callback.n_averaged.fill_(callback._init_n_averaged)


def prune_likewise(module: nn.Module, names: Mapping[str, Any]) -> None:
    """Give `module` the masks that a module with these names in its state has."""
    own = module.state_dict()
    for name in names:
        path = name.removesuffix("_orig")
        if path == name or name in own or path not in own or f"{path}_mask" not in names:
            continue
        owner, _, parameter = path.rpartition(".")
        prune.custom_from_mask(module.get_submodule(owner), parameter, names[f"{path}_mask"].to(own[path].device))


def _is_sharded(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes long, and is for those who shard
    return module is not None and isinstance(tensor, module.DTensor)


def apart(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state`, in which nothing changes while another part of it is loaded.

    What was received in place lies in this replica's own memory: each tensor where our own state has it. A callback's
    `on_save_checkpoint` may have put the module's weights under another key; there they would be overwritten as soon as
    what stands in their place is loaded. So only the module's own entries remain where they are.
    """
    module: nn.Module = trainer.lightning_module
    own: dict[str, Tensor] = module.state_dict()
    if any(map(_is_sharded, own.values())):
        return dict(state)  # callbacks that put weights elsewhere are refused for sharded models
    storages = {value.untyped_storage().data_ptr() for value in own.values()}
    result = {key: value if key == WEIGHTS else snapshot(value, storages) for key, value in state.items()}
    result[WEIGHTS] = type(state[WEIGHTS])(state[WEIGHTS])
    for name, value in state[WEIGHTS].items():
        if name not in own or value.data_ptr() != own[name].data_ptr():
            result[WEIGHTS][name] = value.clone()
    return result
