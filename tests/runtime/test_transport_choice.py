"""Which transport a Manager takes, by argument, environment and what cannot work."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.checkpointing import HTTPTransport, PGTransport
from ft_core.errors import ConfigError
from ft_core.process_group import ProcessGroupGloo
from ft_core.runtime import config as setup
from ft_core.runtime.startup import kind_of
from tests.certificates import Authority
from tests.runtime.harness import Cluster, Replica
from tests.runtime.test_api import arguments

if TYPE_CHECKING:
    import pathlib


def chosen(variables: dict[str, str], **changes: Any) -> str:
    return setup.resolve(arguments(**changes), variables).transport


def test_the_argument_beats_the_environment_and_auto_is_http() -> None:
    assert chosen({}) == "http"
    assert chosen({}, transport="auto") == chosen({"FT_TRANSPORT": "auto"}) == "http"
    assert chosen({"FT_TRANSPORT": "pg"}) == chosen({}, transport="pg") == "pg"
    assert chosen({"FT_TRANSPORT": "pg"}, transport="http") == "http"
    assert chosen({"FT_TRANSPORT": "pg"}, own_transport="http") == "http"


def test_what_cannot_work_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="transport='rdma' must be one of 'auto', 'http', 'pg'"):
        chosen({}, transport="rdma")
    with pytest.raises(ConfigError, match="FT_TRANSPORT='rdma'"):
        chosen({"FT_TRANSPORT": "rdma"})
    with pytest.raises(ConfigError, match="transport='pg' and checkpoint_transport"):
        chosen({}, transport="pg", own_transport="http")
    tls = Authority().files(tmp_path / "tls")
    variables = {"FT_TLS_CERT": str(tls.cert), "FT_TLS_KEY": str(tls.key), "FT_TLS_CA": str(tls.ca)}
    assert chosen(variables) == chosen(variables, transport="auto") == "http"
    with pytest.raises(ConfigError, match=r"FT_TRANSPORT='pg'.*encrypts nothing"):
        chosen(variables | {"FT_TRANSPORT": "pg"})


def test_what_replicas_compare() -> None:
    made: list[HTTPTransport[Any]] = [
        HTTPTransport(timedelta(seconds=1)), PGTransport(ProcessGroupGloo(), timedelta(seconds=1)),
    ]  # fmt: skip
    assert [kind_of(transport) for transport in made] == ["http", "pg"]
    for transport in made:
        transport.shutdown()


def test_replicas_heal_over_process_groups_and_no_live_state_is_copied(cluster: Cluster) -> None:
    newcomer = Replica(2, steps=10, transport="pg")
    first = Replica(0, steps=10, transport="pg", at={(4, "boundary"): cluster.joins(newcomer)})
    cluster.run(first, Replica(1, steps=10, transport="pg"))
    cluster.check(steps=10)
    for replica in cluster.replicas:
        transfer = replica.manager._runtime.shell.transfer
        assert isinstance(transfer._transport, PGTransport)
        assert transfer.prefetched_bytes == 0
    assert newcomer.commits[0].step > 4


def test_replicas_with_different_transports_are_refused(cluster: Cluster) -> None:
    cluster.run(Replica(0, steps=4, transport="pg"), Replica(1, steps=4, transport="http"))
    errors = [str(r.error) for r in cluster.replicas if r.error is not None]
    assert errors
    assert all("transport of state" in error for error in errors)
