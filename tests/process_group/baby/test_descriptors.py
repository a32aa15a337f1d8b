"""A process with many open files: waiting for one of them works whatever its number is."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from ft_core.process_group.baby.descriptors import readable

HIGH = 1500
"""Above what select knows."""


@pytest.mark.parametrize("start", [0, HIGH])
def test_a_descriptor_of_any_number_can_be_waited_for(start: int) -> None:
    if start >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        pytest.skip("so many files may not be open here")
    low, write = os.pipe()
    read = fcntl.fcntl(low, fcntl.F_DUPFD, start)
    try:
        assert read >= start
        assert not readable(read, 0.0)
        os.write(write, b"x")
        assert readable(read, 5.0)
    finally:
        for fd in (low, write, read):
            os.close(fd)
