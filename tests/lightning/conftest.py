"""Each test has an environment of its own; one forge for all that want one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lightning.forge import IMPORTS, Forge
from tests.lightning.surroundings import bare
from tests.runtime.conftest import cluster as cluster
from tests.runtime.conftest import lighthouse as lighthouse
from tests.runtime.conftest import store as store

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def surroundings() -> Iterator[None]:
    """Each test is alone."""
    with bare():
        yield


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Starts processes that have imported Lightning already."""
    forge = Forge(IMPORTS)
    yield forge
    forge.close()


@pytest.fixture
def forged_workers(forge: Forge) -> Iterator[None]:
    """ftrun's workers come from the forge."""
    with forge.serves_ftrun():
        yield
