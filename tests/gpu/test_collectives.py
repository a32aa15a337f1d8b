"""Every collective on two ranks that share a GPU gives what Gloo gives in CPU memory."""

from __future__ import annotations

import pathlib

import pytest

from ft_core.process_group import open_store
from tests.gpu.collectives_job import COLLECTIVES
from tests.gpu.pair import MARKS, Pair

pytestmark = MARKS
JOB = str(pathlib.Path(__file__).with_name("collectives_job.py"))


@pytest.mark.parametrize("kind", ["ProcessGroupNCCL", "ProcessGroupBabyNCCL"])
def test_every_collective_gives_what_gloo_gives(kind: str) -> None:
    store = open_store("127.0.0.1")
    addresses = [f"127.0.0.1:{store.port}/{name}" for name in ("tried", "gloo")]
    with Pair(JOB, kind, *addresses) as pair:
        for child in pair.children:
            child.wait_for(lambda text: text.startswith("over "), "the end")
        for child in pair.children:
            said = [line for line in child.lines if line.startswith(("same ", "differs ", "over "))]
            assert said == [*(f"same {name}" for name in COLLECTIVES), "over None"], "\n".join(child.lines)
