"""The processes of the chaos tests: what is waited for may be what another process prints."""

from __future__ import annotations

import time

import pytest

from tests.chaos.cluster import WAIT_S, Cluster


class Bare(Cluster):
    """Without a lighthouse."""

    def __enter__(self) -> Bare:
        return self


@pytest.mark.process
def test_a_line_of_another_process_ends_a_wait() -> None:
    with Bare() as cluster:
        silent = cluster.start_command("silent", ["sleep", "60"])
        other = cluster.start_command("other", ["sh", "-c", "sleep 0.3; echo said; exec sleep 60"])
        began = time.monotonic()
        silent.wait_for(lambda: any(line == "said" for _, line in other.lines), "was told")
        assert time.monotonic() - began < WAIT_S / 2
