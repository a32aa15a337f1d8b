"""The kit in real Managers, without any framework."""

from __future__ import annotations

from tests.runtime.conftest import cluster as cluster
from tests.runtime.conftest import lighthouse as lighthouse
from tests.runtime.conftest import store as store
