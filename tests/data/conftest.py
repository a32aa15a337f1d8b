"""Managers as threads over a loopback lighthouse, as in tests/runtime."""

from tests.runtime.conftest import cluster as cluster
from tests.runtime.conftest import lighthouse as lighthouse
from tests.runtime.conftest import store as store
