"""Fixtures: a c10d store per test session, and a check that nothing is left behind."""

import os

import pytest
import torch

from tests.process_group.ranks import Store

# c10d looks up the name of both ends of every store connection it opens or accepts, for its log messages. Where the
# name server drops queries, that takes the resolver's timeout (5 s) each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def store() -> Store:
    torch.set_num_threads(1)
    return Store()
