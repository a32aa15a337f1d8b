"""Whether a wrapped module has trained parameters that it did not have when it was wrapped.

Their gradients would be this replica's own: the replicas' models would part without an error. How it works: a module
holds its parameters and parts in dicts, of which the entries and the lengths are compared before each forward, at 0.1
us for each; only if one differs is the module walked through. What stands in a parameter's place for one call
(`torch.func.functional_call`) is no parameter, and has the gradient that its history gives it.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class ParameterWatch:
    """Of one module; `known`: what is reduced or was frozen, `ignored`: names of parameters that are left alone."""

    def __init__(self, module: nn.Module, known: Iterable[nn.Parameter], ignored: Iterable[str]) -> None:
        self._module = module
        self._known = {id(parameter): parameter for parameter in known}
        self._ignored = frozenset(ignored)
        self._entries: list[tuple[dict[str, Any], str, object]] = []
        self._lengths: list[tuple[dict[str, Any], int]] = []
        self._untrained: list[nn.Parameter] = []
        """Parameters that came later, and are well as long as they are not trained."""
        self._note()

    def __repr__(self) -> str:
        return f"ParameterWatch({len(self._known)} parameters, {len(self._lengths) // 2} modules)"

    def newcomer(self) -> str:
        """The name of a parameter that is trained, and is neither known nor ignored; "": there is none."""
        if (
            all(held.get(name) is value for held, name, value in self._entries)
            and all(len(held) == length for held, length in self._lengths)
            and not any(parameter.requires_grad for parameter in self._untrained)
        ):
            return ""
        self._untrained = []
        for name, value in self._module.named_parameters():
            if id(value) in self._known or name in self._ignored or not isinstance(value, nn.Parameter):
                continue
            if value.requires_grad:
                return name
            self._untrained.append(value)
        self._note()
        return ""

    def _note(self) -> None:
        held = [part for module in self._module.modules() for part in (module._parameters, module._modules)]
        self._entries = [(part, name, value) for part in held for name, value in part.items()]
        self._lengths = [(part, len(part)) for part in held]
