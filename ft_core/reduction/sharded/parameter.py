"""`ShardedParameter`: what this rank holds of an FSDP2 parameter, as a reducer wants parameters: plain local tensors.

How it works. FSDP2 runs the post-accumulate hooks of a sharded parameter once its reduce-scattered gradient is in
`.grad`. The local tensor of that gradient is what is reduced; the reduced view of a bucket is put back into a DTensor
of the parameter's layout, made once per view.

Invariant: `grad` returns the view it was given, the same object, until the script replaces the parameter's gradient.
Threads: as `bucket_reducer`, which owns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's shard, sharing its memory, outside of autograd (`DTensor.to_local` records a graph)."""
    return tensor._local_tensor.detach()


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the layout of `tensor` whose shard is `local`."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class ShardedParameter:
    """One rank's shard of a parameter.

    Args:
        parameter: a DTensor.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter: Any = parameter
        """The DTensor parameter itself."""
        self._view: torch.Tensor | None = None
        self._wrapped: DTensor | None = None

    def __repr__(self) -> str:
        return f"ShardedParameter({list(self.shape)} of {list(self.parameter.shape)})"

    @property
    def local(self) -> torch.Tensor:
        """The shard as it lies in memory now."""
        return local_of(self.parameter)

    @property
    def grad(self) -> torch.Tensor | None:
        """The local tensor of the gradient."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient is self._wrapped:
            return self._view
        local: torch.Tensor = gradient._local_tensor
        return local

    @grad.setter
    def grad(self, view: torch.Tensor | None) -> None:
        if view is None:
            self.parameter.grad = None
            return
        if view is not self._view:
            self._view, self._wrapped = view, sharded_like(self.parameter, view)
        if self.parameter.grad is not self._wrapped:
            self.parameter.grad = self._wrapped

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """As the parameter's; the hook is given this object."""
        return self.parameter.register_post_accumulate_grad_hook(lambda _: hook(self))

    # ------------------------------------------------------------ of the local tensor

    @property
    def shape(self) -> torch.Size:
        """Of the shard."""
        return self.local.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        dtype: torch.dtype = self.parameter.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the shard lies."""
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        """It is trained."""
        return bool(self.parameter.requires_grad)

    def stride(self) -> tuple[int, ...]:
        """Of the shard."""
        return tuple(self.local.stride())

    def is_contiguous(self) -> bool:
        """Whether the shard lies row by row."""
        return self.local.is_contiguous()

    def is_complex(self) -> bool:
        """Whether its elements are complex numbers."""
        return self.local.is_complex()

    def numel(self) -> int:
        """Elements of the shard; 0 where the ranks are more than the rows."""
        return self.local.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.local.element_size()

    def data_ptr(self) -> int:
        """Where the shard begins."""
        return self.local.data_ptr()
