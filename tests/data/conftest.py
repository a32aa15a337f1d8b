"""Managers as threads over a loopback lighthouse, as in tests/manager."""

from tests.manager.conftest import cluster as cluster
from tests.manager.conftest import lighthouse as lighthouse
from tests.manager.conftest import store as store
