from collections.abc import Iterator

import pytest
import torch

from tests.process_group.ranks import Store


@pytest.fixture(scope="session")
def store() -> Iterator[Store]:
    torch.set_num_threads(1)
    return Store()
