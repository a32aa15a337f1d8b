"""One forge (`tests.forge`) for all tests that want workers which have imported Accelerate and transformers already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.forge import Forge

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTS = (
    "accelerate", "accelerate.test_utils", "accelerate.test_utils.training", "accelerate.tracking", "transformers",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "ft_accelerate.accelerator", "ft_accelerate.trainer.trainer", "ft_core.fsdp",
    "torch.distributed.checkpoint.state_dict",
)  # fmt: skip


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Starts processes."""
    forge = Forge(IMPORTS)
    yield forge
    forge.close()


@pytest.fixture(autouse=True)
def _no_accelerator_stays() -> Iterator[None]:
    """Accelerate's states are one per process: the next test, and what it forks, begins without."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def forged_workers(forge: Forge) -> Iterator[None]:
    """ftrun's workers come from the forge."""
    with forge.serves_ftrun():
        yield
