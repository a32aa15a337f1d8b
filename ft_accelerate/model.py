"""`WrappedModel`: a model, as `prepare` wraps it.

Threads: the training thread.
"""

from __future__ import annotations

from typing import Any

from ft_core.loop.model import WindowedModel


class WrappedModel(WindowedModel):
    """A prepared model. Attributes that it does not have are those of the model inside, as if that were not wrapped."""

    def __getattr__(self, name: str) -> Any:
        # Accelerate leaves a model unwrapped in a job of one process, and scripts for that use its attributes.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("_"):
                raise
            return getattr(self.module, name)
