"""What may be said about fault tolerance, where, and what wins; nothing said: plain Accelerate."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import accelerate
import pytest

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator
from ft_accelerate.options import FIELDS, KINDS, variable
from ft_accelerate.plugin import plugin_or_none
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    import pathlib


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("FT_", "TORCHFT_", "ACCELERATE_")):
            monkeypatch.delenv(name)


def test_nothing_said_is_plain_accelerate() -> None:
    assert plugin_or_none(None) is None
    accelerator = FaultTolerantAccelerator(cpu=True)
    assert isinstance(accelerator, accelerate.Accelerator)
    assert accelerator.manager is None
    assert accelerator.is_main_process
    assert list(accelerator.epochs(3)) == [0, 1, 2]
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.end_training()


@pytest.mark.parametrize("name", ["FT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE", "ACCELERATE_FT_LIGHTHOUSE"])
def test_a_lighthouse_in_the_environment_switches_it_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "host:29510")
    plugin = plugin_or_none(None)
    assert plugin is not None
    assert plugin.address == "host:29510"
    monkeypatch.setenv("ACCELERATE_FT_ENABLED", "false")
    assert plugin_or_none(None) is None


def test_the_launchers_own_variables_mean_nothing_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FT_REPLICAS", "2")
    monkeypatch.setenv("ACCELERATE_FT_STANDBY", "1")
    assert plugin_or_none(None) is None  # plain python
    monkeypatch.setenv("FT_LIGHTHOUSE", "host:29510")  # ftrun
    plugin = plugin_or_none(None)
    assert plugin is not None
    assert plugin.min_replicas is None
    monkeypatch.setenv("ACCELERATE_FT_STANDBYS", "1")
    with pytest.raises(ConfigError, match=r"STANDBYS is not known .* did you mean ACCELERATE_FT_STANDBY"):
        plugin_or_none(None)


def test_argument_beats_environment_beats_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance_config: {timeout_s: 1, min_replicas: 1, quorum_timeout_s: 7}\n")
    monkeypatch.setenv("ACCELERATE_FT_TIMEOUT_S", "2")
    monkeypatch.setenv("ACCELERATE_FT_MIN_REPLICAS", "2")
    plugin = FaultTolerancePlugin(min_replicas=3, config_file=str(path))
    assert (plugin.min_replicas, plugin.timeout_s, plugin.quorum_timeout_s) == (3, 2.0, 7.0)
    told = plugin.for_manager()
    assert told["timeout"].total_seconds() == 2.0
    assert told["min_replica_size"] == 3


def test_whether_it_may_begin_from_scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert FaultTolerancePlugin().for_manager()["from_scratch"] is None  # FT_FROM_SCRATCH says it
    assert FaultTolerancePlugin(from_scratch=True).for_manager()["from_scratch"] is True
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance_config: {from_scratch: true}\n")
    assert FaultTolerancePlugin(config_file=str(path)).for_manager()["from_scratch"] is True
    monkeypatch.setenv("ACCELERATE_FT_FROM_SCRATCH", "no")
    assert FaultTolerancePlugin(config_file=str(path)).for_manager()["from_scratch"] is False
    with pytest.raises(ConfigError, match="from_scratch='perhaps' must be true or false"):
        FaultTolerancePlugin(from_scratch="perhaps")  # type: ignore[arg-type]


def test_the_group_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (FaultTolerancePlugin().group, FaultTolerancePlugin().groups) == (0, 1)
    monkeypatch.setenv("FT_REPLICA_GROUP", "2")
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "4")
    plugin = FaultTolerancePlugin()
    assert (plugin.group, plugin.groups, plugin.name) == (2, 4, "replica-2")
    assert FaultTolerancePlugin(replica_group=5).groups == 6
    assert FaultTolerancePlugin(replica_id="mine").name == "mine"


def test_every_field_is_documented() -> None:
    for name, field in FIELDS.items():
        assert field.metadata["help"]
        assert f"        {name}: " in (FaultTolerancePlugin.__doc__ or "").replace("    Args:\n", "")
        assert variable(name).startswith("ACCELERATE_FT_")
        assert KINDS[name] in (bool, int, float, str)
    assert all(value is None for value in dataclasses.asdict(FaultTolerancePlugin()).values())


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("ACCELERATE_FT_TIMEOUT_S", "soon", "ACCELERATE_FT_TIMEOUT_S='soon' must be a number"),
        ("ACCELERATE_FT_TIMEOUT_S", "-1", "must be a number of seconds, more than 0"),
        ("ACCELERATE_FT_MIN_REPLICAS", "0", "must be a whole number, 1 or more"),
        ("ACCELERATE_FT_MIN_REPLICAS", "1.5", "must be a whole number"),
        ("ACCELERATE_FT_EXPECTED_REPLICAS", "9999", "a quorum holds at most 1024 groups"),
        ("ACCELERATE_FT_ENABLED", "perhaps", "must be true or false"),
        ("ACCELERATE_FT_LIGHTHOUSE", "nowhere", "expected host:port"),
        ("ACCELERATE_FT_LIGHTHOUSE", "a:1,b:1,c:1", "ACCELERATE_FT_LIGHTHOUSE='a:1,b:1,c:1' names 3 lighthouses"),
        ("ACCELERATE_FT_MIN_REPLICA", "1", "did you mean ACCELERATE_FT_MIN_REPLICAS?"),
    ],
)
def test_a_mistake_names_the_setting(name: str, value: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rule.replace("?", r"\?")):
        FaultTolerancePlugin()


def test_a_group_number_beyond_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replica_group=3 with expected_replicas=2: .* from 0 to 1"):
        FaultTolerantAccelerator(cpu=True, fault_tolerance_plugin=FaultTolerancePlugin(
            lighthouse="localhost:1", replica_group=3, expected_replicas=2
        ))  # fmt: skip


def test_something_else_is_no_plugin() -> None:
    with pytest.raises(ConfigError, match=r"must be a ft_accelerate.FaultTolerancePlugin, got dict"):
        FaultTolerantAccelerator(fault_tolerance_plugin={})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "meant"), [("elastic", "elastic_data"), ("min_replica", "min_replicas")])
def test_an_argument_that_is_not_there_is_answered_with_the_nearest(name: str, meant: str) -> None:
    arguments: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"FaultTolerancePlugin has no argument {name}; did you mean {meant}"):
        FaultTolerancePlugin(**arguments)
