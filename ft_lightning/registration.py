"""Makes `strategy="fault_tolerant"` known to Lightning without anybody importing this package.

How it works. `import torch` runs the functions that packages name under the entry point group `torch.backends`;
`install` is ours. It puts a finder in front of Python's import machinery that waits for the modules that hold
Lightning's strategy registries and adds our name to the registry once such a module has been executed. What is added
is a function: the strategy, and ft_core with it, loads when somebody selects it. `import ft_lightning` calls `install`,
too, for those who switch torch's entry points off (TORCH_DEVICE_BACKEND_AUTOLOAD=0).

Invariants: only the standard library is imported here, and nothing is ever raised: an exception would break
`import torch` for everybody on this machine. Calling `install` again changes nothing. Threads: any.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ft_lightning.names import DESCRIPTION, FSDP2, FSDP2_DESCRIPTION, NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}
"""Module -> its attribute that is the registry."""
OF_TRAINERS = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
"""Those of the Trainer, which have the strategy for sharded models, too."""


class Finder:
    """Finds the four modules through the other finders, and has their registries filled when they are executed."""

    ft_lightning = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module; Python calls this for every one that it imports."""
        if fullname not in REGISTRIES:
            return None
        try:
            for finder in sys.meta_path:
                find = None if getattr(finder, "ft_lightning", False) else getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None else None
                if spec is not None:
                    _watch(spec.loader, fullname)
                    return spec  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001 - without us, Python finds out for itself what is wrong
            return None
        return None


def install() -> None:
    """Register with the registries that are loaded, and see to those that are loaded later. Never raises."""
    with contextlib.suppress(Exception):
        for name in REGISTRIES:
            if name in sys.modules:
                register(sys.modules[name])
        if not any(getattr(finder, "ft_lightning", False) for finder in sys.meta_path):
            sys.meta_path.insert(0, Finder())


def register(module: ModuleType) -> None:
    """Add our strategies to the registry in one of the REGISTRIES. Never raises."""
    with contextlib.suppress(Exception):
        registry = getattr(module, REGISTRIES[module.__name__])
        if NAME not in registry:
            tree = module.__name__.rpartition(".")[0]
            registry.register(NAME, _factory("strategy_class", tree), description=DESCRIPTION)
            if module.__name__ in OF_TRAINERS:
                registry.register(FSDP2, _factory("fsdp2_strategy_class", tree), description=FSDP2_DESCRIPTION)


def _factory(name: str, tree: str) -> Callable[..., Any]:
    def fault_tolerant(**kwargs: Any) -> Any:
        from ft_lightning import classes

        return getattr(classes, name)(tree)(**kwargs)

    return fault_tolerant


def _watch(loader: Any, name: str) -> None:
    """Call `register` after the loader has executed that module. The loader may serve other modules, too."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if module.__name__ == name:
            with contextlib.suppress(AttributeError):
                del loader.exec_module  # once
        execute(module)
        if module.__name__ == name:
            register(module)

    loader.exec_module = exec_module
