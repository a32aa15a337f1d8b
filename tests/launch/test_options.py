"""ftrun's command line: every option, what is refused, and how the refusal reads."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.backends import TorchBuild
from ft_core.errors import ConfigError
from ft_core.launch.__main__ import main
from ft_core.launch.argument_parser import TORCHRUNS, parser
from ft_core.launch.chaos_schedule import ChaosSettings
from ft_core.launch.options import parse
from ft_core.launch.spec import Streams
from ft_core.process_group import availability
from tests.certificates import Authority, environment

if TYPE_CHECKING:
    from ft_core.launch.spec import JobSpec


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text("print(1)\n")
    return str(path)


def job(script: str, line: str = "", environ: dict[str, str] | None = None, after: str = "") -> JobSpec:
    """What `ftrun <line> script <after>` asks for; without GPUs unless `environ` names them."""
    return parse([*line.split(), script, *after.split()], {"CUDA_VISIBLE_DEVICES": "", **(environ or {})})


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv, {"CUDA_VISIBLE_DEVICES": "", **(environ or {})})
    return str(caught.value)


def test_defaults(script: str) -> None:
    spec = job(script)
    assert (spec.groups, spec.max_groups, spec.first, spec.total, spec.whole_job) == (1, 1, 0, 1, True)
    assert (spec.min_replicas, spec.nproc, spec.name, spec.nodes) == (1, 1, "replica", 1)
    assert (spec.lighthouse, spec.lighthouse_bind, spec.host) == ("", "127.0.0.1:0", "127.0.0.1")
    assert (spec.timeout_s, spec.drain_s, spec.monitor_s, spec.standby) == (None, 30.0, 0.1, 0)
    assert (spec.restarts.max_restarts, spec.restarts.window_s, spec.restarts.crash_loop) == (10, 3600.0, 3)
    assert (spec.log_dir, spec.tee, spec.redirects, spec.chaos) == ("", Streams(), Streams(), None)
    assert (spec.gpus, spec.rdzv_endpoint) == ((None,), "")
    assert (spec.script.path, spec.script.args, spec.script.module, spec.script.no_python) == (script, (), False, False)
    assert spec.script.command() == [sys.executable, "-u", script]


def test_an_embedded_lighthouse_has_a_secret_of_its_own(script: str) -> None:
    first, second = job(script), job(script)
    assert len(first.token) == 32
    assert first.token != second.token
    assert first.run_id != second.run_id
    assert job(script, environ={"FT_TOKEN": "word"}).token == "word"
    assert job(script, "--lighthouse 127.0.0.1:1").token == ""


REMOTE = "--lighthouse 127.0.0.1:1"
VALUES = [
    ("--replicas 4", "groups", 4),
    ("--replicas 4", "max_groups", 4),
    ("--replicas 2:4", "groups", 2),
    ("--replicas 2:4", "max_groups", 4),
    ("--replica 3 --lighthouse 127.0.0.1:1", "first", 3),
    ("--replica-offset 8 --replicas 8 --lighthouse 127.0.0.1:1", "first", 8),
    ("--num-replicas 9 --replicas 4 --lighthouse 127.0.0.1:1", "total", 9),
    ("--min-replicas 2 --replicas 3", "min_replicas", 2),
    ("--nproc-per-replica 2", "nproc", 2),
    ("--nproc-per-node 2", "nproc", 2),
    ("--name trainer", "name", "trainer"),
    ("--lighthouse http://127.0.0.1:7", "lighthouse", "http://127.0.0.1:7"),
    ("--lighthouse 127.0.0.1:7,127.0.0.2:7", "lighthouse", "127.0.0.1:7,127.0.0.2:7"),
    ("--lighthouse [::1]:7,127.0.0.2:7", "host", "::1"),
    ("--lighthouse-bind [::1]:0", "host", "::1"),
    ("--lighthouse-bind [::1]:0", "lighthouse_bind", "[::1]:0"),
    ("--http 127.0.0.1:0", "http", "127.0.0.1:0"),
    ("--http off", "http", ""),
    ("", "http", "auto"),
    ("--local-addr 127.0.0.7", "host", "127.0.0.7"),
    ("--timeout 2.5", "timeout_s", 2.5),
    ("--run-id job7", "run_id", "job7"),
    ("--rdzv-id job7", "run_id", "job7"),
    ("--rdzv-backend c10d", "nodes", 1),
    ("--rdzv-backend static", "nodes", 1),
    ("--rdzv-endpoint localhost:0", "nodes", 1),
    ("--node-rank 0 --master-addr localhost --master-port 29600", "nodes", 1),
    ("--role trainer --rdzv-conf join_timeout=5 --start-method spawn --event-log-handler null", "nodes", 1),
    ("--nnodes 1", "nodes", 1),
    ("--nnodes 1:1", "nodes", 1),
    (f"--nnodes 1:2 --replica 0 --rdzv-endpoint h:1 --rdzv-id x {REMOTE}", "nodes", 2),
    (f"--nnodes 1:2 --replica 0 --rdzv-endpoint h:1 --rdzv-id x {REMOTE}", "min_nodes", 1),
    (f"--nnodes 2 --replica 0 --rdzv-endpoint h:1 --rdzv-id x {REMOTE}", "min_nodes", 2),
    ("--max-restarts 0", "restarts.max_restarts", 0),
    ("--restart-window 60", "restarts.window_s", 60.0),
    ("--restart-window inf", "restarts.window_s", math.inf),
    ("--crash-loop 5", "restarts.crash_loop", 5),
    ("--standby 2", "standby", 2),
    ("--drain-timeout 5", "drain_s", 5.0),
    ("--monitor-interval 0.5", "monitor_s", 0.5),
    ("--chaos kill=30s,seed=7", "chaos", ChaosSettings(kill_s=30.0, seed=7)),
    ("--gpus none", "gpus", ("",)),
    ("--gpus all", "gpus", (None,)),
]


@pytest.mark.parametrize("spelling", ["minus", "underscore", "equals"])
@pytest.mark.parametrize(("line", "name", "value"), VALUES)
def test_values(script: str, line: str, name: str, value: object, spelling: str) -> None:
    words = line.split()
    if spelling == "underscore":
        words = [f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in words]
    if spelling == "equals":
        words = [f"{option}={given}" for option, given in zip(words[::2], words[1::2], strict=True)]
    found: Any = job(script, " ".join(words))
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


def test_streams(script: str, tmp_path: Path) -> None:
    spec = job(script, f"-t 3 -r 0:1,1:2 --nproc-per-replica 2 --log-dir {tmp_path / 'a' / 'b'}")
    assert spec.tee == Streams(3)
    assert [spec.redirects.of(rank) for rank in range(3)] == [1, 2, 0]
    assert spec.log_dir == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_files_without_a_place_get_one(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = job(script, "--tee 3").log_dir
    assert Path(folder).parent == tmp_path
    refusal(["--tee", "3", "--name", "a b", script])
    assert [str(path) for path in tmp_path.iterdir()] == [folder], "a refused command leaves nothing behind"


def test_what_runs() -> None:
    spec = parse(["-m", "json.tool", "--x"], {})
    assert (spec.script.module, spec.script.command()) == (True, [sys.executable, "-u", "-m", "json.tool", "--x"])
    assert str(spec.script) == "-m json.tool"
    assert parse(["--module", "json"], {}).script.module
    spec = parse(["--no-python", "sh", "-c", "true"], {"PATH": "/bin:/usr/bin"})
    assert spec.script.command() == ["sh", "-c", "true"]


@pytest.mark.parametrize(
    "after",
    ["--replicas 9 --lr 0.1", "-m x", "--help", "--version", "--", "-- --a", "a -- b", "-- a -- b", "resize", "-t -t"],
)
def test_what_follows_the_script_is_the_scripts(script: str, after: str) -> None:
    spec = job(script, "--replicas 2", after=after)
    assert spec.script.args == tuple(after.split())
    assert spec.groups == 2


def test_two_minus_signs_may_end_our_options(script: str) -> None:
    spec = parse(["--replicas", "2", "--", script, "--replicas", "3"], {"CUDA_VISIBLE_DEVICES": ""})
    assert (spec.groups, spec.script.path, spec.script.args) == (2, script, ("--replicas", "3"))


def test_the_environment_speaks_where_the_line_is_silent(script: str) -> None:
    environ = {"FT_LIGHTHOUSE": "127.0.0.1:5", "FT_NUM_REPLICA_GROUPS": "6", "FT_MIN_REPLICAS": "2"}
    spec = job(script, "--replicas 3", environ)
    assert (spec.lighthouse, spec.total, spec.min_replicas, spec.whole_job) == ("127.0.0.1:5", 6, 2, False)
    spec = job(script, "--replicas 3 --num-replicas 3 --min-replicas 1 --lighthouse 127.0.0.1:6", environ)
    assert (spec.lighthouse, spec.total, spec.min_replicas, spec.whole_job) == ("127.0.0.1:6", 3, 1, True)
    assert job(script, environ={"FT_HOSTNAME": "127.0.0.9"}).host == "127.0.0.9"
    assert job(script, environ={"FT_NUM_REPLICA_GROUPS": "", "FT_MIN_REPLICAS": ""}).total == 1


def test_workers_wait_for_groups_that_start_late_and_for_a_lighthouse_elsewhere(script: str) -> None:
    embedded, elsewhere = job(script), job(script, "--lighthouse 127.0.0.1:1")
    assert embedded.patience({}) == {"FT_QUORUM_S": "900"}
    assert elsewhere.patience({}) == {"FT_QUORUM_S": "900", "FT_CONNECT_S": "300"}
    for theirs in ("FT_QUORUM_S", "TORCHFT_QUORUM_TIMEOUT_SEC"):
        assert elsewhere.patience({theirs: "5"}) == {"FT_CONNECT_S": "300"}
        assert embedded.patience({theirs: "5"}) == {}
    for theirs in ("FT_CONNECT_S", "TORCHFT_CONNECT_TIMEOUT_SEC"):
        assert elsewhere.patience({theirs: "5"}) == {"FT_QUORUM_S": "900"}


def test_a_part_does_not_guess_the_size_of_the_job(script: str) -> None:
    """Group 0 and group 3 of one job must not tell their scripts different numbers of groups."""
    for line in ("--replica 0", "--replica 3", "--replicas 2 --replica-offset 4"):
        spec = job(script, f"{line} --min-replicas 5 --lighthouse 127.0.0.1:1")
        assert (spec.total, spec.whole_job, spec.min_replicas) == (0, False, 5)
        assert "FT_NUM_REPLICA_GROUPS" not in spec.environment(spec.first, spec.lighthouse, spec.total)
    spec = job(script, "--replica 3 --num-replicas 8 --lighthouse 127.0.0.1:1")
    assert spec.environment(3, "x", spec.total)["FT_NUM_REPLICA_GROUPS"] == "8"


def test_a_part_may_embed_the_lighthouse_of_all(script: str) -> None:
    spec = job(script, "--replica 0 --lighthouse-bind 127.0.0.1:29510", {"FT_TOKEN": "word"})
    assert (spec.lighthouse, spec.token) == ("", "word")


def test_gpus_are_those_of_the_environment(script: str) -> None:
    spec = job(script, "--replicas 2 --nproc-per-replica 2", {"CUDA_VISIBLE_DEVICES": "4, 5,6,7"})
    assert [spec.visible_devices(number) for number in range(2)] == ["4,5", "6,7"]
    spec = job(script, "--replicas 1:3", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert spec.gpus == ("0", "1", "2"), "those that resize may add get theirs too"
    assert job(script, "--replicas 2", {"CUDA_VISIBLE_DEVICES": "-1"}).gpus == (None, None)
    assert job(script, "--replicas 2", {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}).gpus == ("0", "1")
    assert job(script, "--replicas 2 --gpus share", {"CUDA_VISIBLE_DEVICES": "0"}).gpus == ("0", "0")


REFUSED = [
    # which groups
    ("--replicas 0", ["--replicas 0", "1 to 1024"]),
    ("--replicas 3000", ["--replicas 3000", "1 to 1024"]),
    ("--replicas 3:2", ["--replicas 3:2", "2:3"]),
    ("--replicas abc", ["--replicas abc", "N:MAX"]),
    ("--replicas ²", ["--replicas ²", "N:MAX"]),
    ("--replicas=", ["--replicas ", "number of groups"]),
    ("--replicas 2 --replica 1", ["--replica 1", "leave out --replicas"]),
    ("--replica 1 --replica-offset 1", ["--replica 1", "leave out", "--replica-offset"]),
    ("--replica -1", ["--replica -1", "must be 0"]),
    ("--replica 1024", ["--replica 1024", "1024 groups"]),
    ("--replica x", ["--replica x", "whole number"]),
    ("--replica-offset -1", ["--replica-offset -1", "must be 0"]),
    (f"--replica 4 --num-replicas 4 {REMOTE}", ["--replica 4", "out of range", "0 to 3", "--num-replicas 4"]),
    (f"--replicas 2 --replica-offset 3 --num-replicas 4 {REMOTE}", ["groups 3 to 4", "0 to 3", "--num-replicas 4"]),
    (f"--replicas 2:4 --num-replicas 3 {REMOTE}", ["groups 0 to 3", "--replicas 2:4", "--num-replicas 3"]),
    ("--num-replicas 0", ["--num-replicas 0", "1 to 1024"]),
    ("--min-replicas 0", ["--min-replicas 0", "1 to 1"]),
    ("--min-replicas 4 --replicas 3", ["--min-replicas 4", "1 to 3"]),
    (f"--min-replicas 9 --replica 1 --num-replicas 8 {REMOTE}", ["--min-replicas 9", "1 to 8"]),
    ("--nproc-per-replica 0", ["--nproc-per-replica 0", "auto"]),
    ("--nproc-per-replica two", ["--nproc-per-replica two", "auto"]),
    ("--nproc-per-replica ²", ["--nproc-per-replica ²", "auto"]),
    ("--nproc-per-node 2000", ["--nproc-per-replica 2000", "1 to 1024"]),
    ("--name a:b", ["--name 'a:b'", "letters"]),
    ("--name a/b", ["--name 'a/b'"]),
    ("--name .", ["--name '.'"]),
    ("--name=", ["--name ''"]),
    (f"--name {'x' * 41}", ["--name", "at most 40"]),
    ("--gpus al", ["--gpus al", "auto, all, share, none", "did you mean all?"]),
    # lighthouse and addresses
    ("--replica 1", ["part of a job", "--lighthouse host:port", "FT_LIGHTHOUSE"]),
    ("--replica 0", ["part of a job", "--lighthouse host:port"]),
    ("--replicas 2 --replica-offset 2", ["part of a job", "--lighthouse host:port"]),
    ("--replicas 2 --num-replicas 3", ["part of a job", "--lighthouse host:port"]),
    ("--replica 0 --lighthouse-bind 0.0.0.0:29510", ["--lighthouse-bind 0.0.0.0:29510", "FT_TOKEN"]),
    ("--lighthouse 127.0.0.1:1 --replica 0 --local-addr 192.0.2.7",
     ["other machines reach the workers at 192.0.2.7 (--local-addr)", "without FT_TOKEN", "FT_INSECURE=1"]),
    ("--lighthouse https://127.0.0.1:1", ["'https://127.0.0.1:1' asks for TLS", "set FT_TLS_CA"]),
    ("--lighthouse grpcs://127.0.0.1:1", ["asks for TLS", "FT_TLS_CERT"]),
    ("--admin-token-file /nowhere", ["--admin-token-file /nowhere cannot be read: No such file"]),
    ("--admin-token-file /dev/null", ["--admin-token-file /dev/null is empty"]),
    ("--lighthouse nohost", ["--lighthouse='nohost'", "host:port"]),
    ("--lighthouse host:99999", ["--lighthouse='host:99999'", "65535"]),
    ("--lighthouse a:1,b:1,c:1", ["--lighthouse='a:1,b:1,c:1'", "3 lighthouses", "at most 2"]),
    ("--lighthouse a:1,a:1", ["--lighthouse='a:1,a:1'", "twice"]),
    ("--lighthouse a:1,", ["--lighthouse='a:1,'", "an address is missing"]),
    ("--lighthouse a:1,b", ["--lighthouse='b'", "host:port"]),
    ("--lighthouse 127.0.0.1:1,https://127.0.0.1:2", ["='https://127.0.0.1:2' asks for TLS", "set FT_TLS_CA"]),
    (f"{REMOTE} --lighthouse-bind :0", ["--lighthouse 127.0.0.1:1", "--lighthouse-bind :0", "leave one"]),
    ("--lighthouse-bind host", ["--lighthouse-bind='host'", "host:port"]),
    ("--http host", ["--http='host'", "host:port"]),
    (f"{REMOTE} --http 127.0.0.1:0", ["--http 127.0.0.1:0", "at 127.0.0.1:1", "ft-lighthouse"]),
    ("--local-addr no.such.host.invalid", ["--local-addr no.such.host.invalid", "leave it out"]),
    ("--nnodes 0", ["--nnodes 0", "number of hosts"]),
    ("--nnodes 2:1", ["--nnodes 2:1", "MIN:MAX"]),
    ("--nnodes 1:2:3", ["--nnodes 1:2:3", "MIN:MAX"]),
    ("--nnodes 1:2", ["--nnodes 1:2", "same --replica"]),
    (f"--nnodes 1:2 --replica 0 --num-replicas 2 --rdzv-endpoint h:1 --rdzv-id x {REMOTE}",
     ["--nnodes 1:2", "same number of ranks", "--replica-offset"]),
    ("--nnodes ²", ["--nnodes ²"]),
    ("--nnodes 2", ["--nnodes 2", "same --replica", "--rdzv-endpoint host:port"]),
    (f"--nnodes 2 --replica 0 {REMOTE}", ["--nnodes 2", "--rdzv-endpoint host:port"]),
    (f"--nnodes 2 --replica 0 --rdzv-endpoint h {REMOTE}", ["--rdzv-endpoint='h'", "host:port"]),
    (f"--nnodes 2 --replica 0 --rdzv-endpoint h:1 {REMOTE}", ["--nnodes 2", "--rdzv-id"]),
    ("--nnodes 2 --replica 0 --rdzv-endpoint h:1 --rdzv-id x", ["part of a job", "--lighthouse host:port"]),
    ("--nnodes 2 --replica 0 --num-replicas 1 --rdzv-endpoint h:1 --rdzv-id x", ["--nnodes 2", "--lighthouse"]),
    ("--rdzv-backend etcd", ["--rdzv-backend etcd", "c10d"]),
    (f"--nnodes 2 --rdzv-backend static --replica 0 {REMOTE}", ["--rdzv-backend static", "c10d"]),
    ("--run-id a/b", ["--run-id 'a/b'", "letters"]),
    ("--run-id ..", ["--run-id '..'"]),
    ("--run-id=", ["--run-id ''"]),
    # times and restarts
    ("--timeout 0", ["--timeout 0", "more than 0"]),
    ("--timeout -1", ["--timeout -1", "more than 0"]),
    ("--timeout nan", ["--timeout nan", "seconds"]),
    ("--timeout inf", ["--timeout inf", "seconds"]),
    ("--timeout soon", ["--timeout soon", "number of seconds"]),
    ("--drain-timeout 0", ["--drain-timeout 0"]),
    ("--drain-timeout inf", ["--drain-timeout inf"]),
    ("--monitor-interval 0", ["--monitor-interval 0"]),
    ("--monitor-interval nan", ["--monitor-interval nan"]),
    ("--restart-window 0", ["--restart-window 0"]),
    ("--restart-window nan", ["--restart-window nan"]),
    ("--max-restarts -1", ["--max-restarts -1"]),
    ("--max-restarts many", ["--max-restarts many", "whole number"]),
    ("--crash-loop 0", ["--crash-loop 0"]),
    ("--standby -1", ["--standby -1", "0 to 1024"]),
    ("--standby 2000", ["--standby 2000", "0 to 1024"]),
    ("--chaos kil=3s", ["--chaos", "did you mean kill?"]),
    ("--chaos=", ["--chaos ''", "for example"]),
    ("--chaos kill=3s --max-restarts 0", ["--chaos", "--max-restarts 0"]),
    # output
    ("--tee 4", ["--tee 4", "stdout"]),
    ("--redirects 0:1,", ["--redirects 0:1,", "like 0:1,1:3"]),
    ("--tee 0:1,0:2", ["--tee 0:1,0:2", "rank 0 is named twice"]),
    ("--tee 1:3", ["--tee 1:3", "no local rank 1", "--nproc-per-replica is 1"]),
    ("--log-dir /dev/null/logs", ["--log-dir /dev/null/logs", "cannot write"]),
    ("--log-dir=", ["--log-dir ", "cannot write"]),
    # what to run
    ("-m --no-python", ["--no-python", "--module", "leave one"]),
    # options that are not there
    ("--relpicas 3", ["no option --relpicas", "did you mean --replicas?"]),
    ("--relpicas=3", ["no option --relpicas", "did you mean --replicas?"]),
    ("--min_replica 3", ["no option --min_replica", "did you mean --min-replicas?"]),
    ("--rep 3", ["no option --rep"]),
    ("-x", ["no option -x", "ftrun --help"]),
    ("--node_rank=1", ["--node-rank 1", "leave it out"]),
    ("--nnodes 2 --node-rank 0", ["--node-rank 0 is torchrun's", "leave it out"]),
    ("--nnodes 2 --master-port 1", ["--master-port 1 is torchrun's", "--rdzv-endpoint"]),
    ("--standalone --lighthouse h:1", ["--standalone", "--lighthouse h:1"]),
    ("--standalone --nnodes 2", ["--standalone", "--nnodes 2"]),
    ("--local_ranks_filter=1", ["--local_ranks_filter is torchrun's", "leave it out"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(script: str, line: str, says: list[str]) -> None:
    text = refusal([*line.split(), script])
    assert [part for part in says if part not in text] == [], text
    assert "\n" not in text


OPTIONS = [(a, [name for name in a.option_strings if name.startswith("--")]) for a in parser()._actions if a.metavar]


@pytest.mark.parametrize("option", [name for action, names in OPTIONS if action.type for name in names])
def test_every_number_is_refused_by_its_name(script: str, option: str) -> None:
    assert refusal([option, "x", script]).startswith(f"{option.replace('_', '-')} x must be a ")


@pytest.mark.parametrize("option", [name for _, names in OPTIONS for name in names])
def test_every_option_without_its_value_says_what_is_missing(option: str) -> None:
    assert re.match(r"--[a-z-]+ needs a value: \S+ \(ftrun --help", refusal([option]))


def test_a_standalone_job_embeds_its_lighthouse(script: str) -> None:
    assert job(script, "--standalone").lighthouse == ""


def test_torchruns_other_options_are_known_by_name(script: str) -> None:
    for option, instead in TORCHRUNS.items():
        assert f"{option} is torchrun's: {instead}" in refusal([f"{option}=1", script])
    own = {name for action in parser()._actions for name in action.option_strings}
    assert not own & set(TORCHRUNS)


ENVIRONMENT = [
    ("", {"FT_NUM_REPLICA_GROUPS": "three"}, ["FT_NUM_REPLICA_GROUPS='three'", "whole number"]),
    ("", {"FT_NUM_REPLICA_GROUPS": "0"}, ["FT_NUM_REPLICA_GROUPS=0", "1 to 1024"]),
    ("", {"FT_NUM_REPLICA_GROUPS": "²"}, ["FT_NUM_REPLICA_GROUPS='²'"]),
    (f"--replica 5 {REMOTE}", {"FT_NUM_REPLICA_GROUPS": "4"}, ["--replica 5", "FT_NUM_REPLICA_GROUPS=4"]),
    ("", {"FT_NUM_REPLICA_GROUPS": "4"}, ["part of a job", "FT_NUM_REPLICA_GROUPS"]),
    ("", {"FT_MIN_REPLICAS": "1.5"}, ["FT_MIN_REPLICAS='1.5'", "whole number"]),
    ("", {"FT_MIN_REPLICAS": "2"}, ["FT_MIN_REPLICAS=2", "1 to 1"]),
    ("", {"FT_TIMEOUT_S": "a minute"}, ["FT_TIMEOUT_S='a minute'", "number"]),
    ("", {"FT_TIMEOUT_S": "-1"}, ["FT_TIMEOUT_S=-1", "more than 0"]),
    ("", {"FT_CONNECT_S": "nan"}, ["FT_CONNECT_S=nan", "more than 0"]),
    ("", {"FT_PROGRESS_S": "x"}, ["FT_PROGRESS_S='x'"]),
    ("", {"FT_LIGHTHOUSE": "host"}, ["FT_LIGHTHOUSE='host'", "host:port"]),
    ("--lighthouse-bind :0", {"FT_LIGHTHOUSE": "h:1"}, ["FT_LIGHTHOUSE h:1", "--lighthouse-bind :0", "leave one"]),
    ("", {"FT_HOSTNAME": "no.such.host.invalid"}, ["FT_HOSTNAME no.such.host.invalid"]),
    ("", {"FT_INTERFACE": "nosuch0"}, ["FT_INTERFACE='nosuch0'", "interfaces here"]),
    ("--replicas 4", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["4 replicas", "need 4 GPUs, 2 are visible", "--replicas 2"]),
    ("--replicas 1:4", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["need 4 GPUs, 2 are visible"]),
    ("--replicas 2", {"CUDA_VISIBLE_DEVICES": "0,x"}, ["CUDA_VISIBLE_DEVICES=0,x: entry 2, 'x', names no GPU"]),
    ("--replicas 2 --gpus share", {"CUDA_VISIBLE_DEVICES": "0,0"}, ["entry 2: 0 is named twice"]),
    ("--replicas 2", {"FT_BACKEND": "ncll"}, ["FT_BACKEND='ncll': unknown; did you mean nccl?", "baby-nccl"]),
    ("--replicas 2 --gpus none", {"FT_BACKEND": "nccl"}, ["FT_BACKEND=nccl with --gpus none: nccl needs devices"]),
    ("--nproc-per-replica gpu", {}, ["--nproc-per-replica gpu"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "environ", "says"), ENVIRONMENT)
def test_refused_because_of_the_environment(
    script: str, line: str, environ: dict[str, str], says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = refusal([*line.split(), script], environ)
    assert [part for part in says if part not in text] == [], text


def test_a_name_with_a_space_is_refused(script: str) -> None:
    assert "--name 'a b' must be at most 40 letters" in refusal(["--name", "a b", script])


def test_scripts_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def f():\n    retrun 1\n")
    Path("null.py").write_bytes(b"a\0b")
    Path("latin.py").write_bytes(b"a = '\xe9'\n")
    Path("plain").write_text("echo")
    cases = {
        "nope.py": "cannot read the script nope.py: No such file or directory",
        "nope": "(a module? then put -m before it)",
        "bin/nope": "(a program? then put --no-python before it)",
        ".": "cannot read the script .: Is a directory",
        "rezise": "did you mean `ftrun resize N`?",
        "4": "options go before the script",
        "plain/x.py": "cannot read the script plain/x.py: Not a directory",
        "broken.py": "the script does not parse: broken.py, line 2: invalid syntax: retrun 1",
        "null.py": "the script does not parse: null.py",
        "latin.py": "the script does not parse: latin.py",
    }
    for name, says in cases.items():
        assert says in refusal([name])
    assert "no script is named; usage: ftrun [options] script [arguments]" in refusal([])
    assert "no script is named" in refusal(["--replicas", "2"])
    assert "--module: there is no module nosuchpackage" in refusal(["-m", "nosuchpackage.train"])
    assert "--module: train.py/x is no module name" in refusal(["-m", "train.py/x"])
    assert "--no-python: the program nosuchprogram cannot be found" in refusal(["--no-python", "nosuchprogram"])
    assert "--no-python: the program ./plain may not be executed" in refusal(["--no-python", "./plain"])


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_only.py").write_text("")
    assert parse(["-m", "mine_only"], {}).script.module


def test_a_script_that_warns_is_no_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("pattern = '\\d'\n")
    assert parse([str(path)], {}).script.path == str(path)


def test_what_the_user_reads(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FT_LIGHTHUOSE_OF_TEST_OPTIONS", "h:1")
    monkeypatch.delenv("FT_LIGHTHOUSE", raising=False)
    assert main(["--replica", "1", script]) == 2
    out, err = capsys.readouterr()
    warning, message = err.splitlines()
    assert out == ""
    assert warning.startswith("ftrun: environment variable FT_LIGHTHUOSE_OF_TEST_OPTIONS is not known")
    assert message.startswith("ftrun: a part of a job ")


def test_ctrl_c_before_anything_runs(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ft_core.launch.__main__.parse", interrupted)
    assert main([script]) == 130


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_what_only_prints(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([option], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "ftrun" in text
    assert "_" not in re.sub(r"FT_\w+|TORCHELASTIC_\w+", "", text), "help shows one spelling"


def test_metrics_of_each_group_have_a_port_of_their_own(script: str) -> None:
    token = {"FT_TOKEN": "job"}
    spec = job(script, "--metrics 0.0.0.0:9300 --replicas 3", token)
    assert (spec.metrics, spec.metrics_setting) == ("0.0.0.0:9300", "--metrics")
    assert [spec.environment(number, "x", 3)["FT_METRICS"] for number in range(3)] == [
        "0.0.0.0:9301", "0.0.0.0:9302", "0.0.0.0:9303",
    ]  # fmt: skip
    far = job(script, "--replica 5 --num-replicas 8 --metrics :9300 --lighthouse 127.0.0.1:1", token)
    assert far.environment(5, "x", 8)["FT_METRICS"] == ":9306"
    assert job(script, "--metrics [::]:0", token).environment(1, "x", 2)["FT_METRICS"] == "[::]:0"
    named = job(script, environ={"FT_METRICS": "http://127.0.0.1:9300/metrics"})
    assert (named.metrics, named.metrics_setting) == ("127.0.0.1:9300", "FT_METRICS")
    for spec in (job(script), job(script, "--metrics off", {"FT_METRICS": "127.0.0.1:9300"})):
        assert spec.metrics == ""
        assert spec.environment(0, "x", 1)["FT_METRICS"] == "", "no group takes ftrun's own port from its surroundings"


def test_metrics_that_cannot_be(script: str) -> None:
    assert refusal(["--metrics", "9300", script]).startswith("--metrics='9300': expected HOST:PORT")
    assert refusal([script], {"FT_METRICS": "here"}).startswith("FT_METRICS='here': expected HOST:PORT")
    assert refusal(["--replicas", "2:4", "--metrics", "127.0.0.1:65533", script]) == (
        "--metrics 127.0.0.1:65533: group N serves its metrics at port 65533 + 1 + N, and there are 4 groups: use a "
        "port of at most 65531"
    )
    assert job(script, "--replicas 2:4 --metrics localhost:65531").metrics_of(3) == "localhost:65535"


def test_metrics_for_other_machines_demand_a_token_that_somebody_else_can_send(script: str) -> None:
    """The one that ftrun makes for its own lighthouse is in nobody's Prometheus."""
    for options, environ in (
        (["--metrics", ":9300"], {}),
        (["--metrics", "10.0.0.1:0"], {"FT_TLS_CERT": ""}),
        ([], {"FT_METRICS": "0.0.0.0:9300"}),
    ):
        said = refusal([*options, script], environ)
        assert re.match(r"(--metrics |FT_METRICS=)[0-9.]*:\d+ without FT_TOKEN: whoever reaches this address may", said)
    made = job(script, "--metrics :9300 --insecure")
    assert made.token
    assert made.environment(0, "x", 1)["FT_MADE_TOKEN"] == "1"
    given = job(script, "--metrics :9300", {"FT_TOKEN": "job", "FT_ADMIN_TOKEN": "chief"})
    assert (given.token, given.made_token, given.admin_token) == ("job", False, "chief")
    assert given.environment(0, "x", 1)["FT_MADE_TOKEN"] == ""


def test_a_lighthouse_for_groups_elsewhere_demands_no_token_that_they_cannot_have(script: str, tmp_path: Path) -> None:
    here = "--replicas 1 --num-replicas 2 --lighthouse-bind 127.0.0.1:29510"
    assert "set FT_TOKEN" in refusal([*here.split(), script])
    tls = environment(Authority().files(tmp_path))
    for options, environ in ((" --insecure", {}), ("", {"FT_INSECURE": "1"}), ("", tls)):
        spec = job(script, here + options, environ)
        assert (spec.token, spec.made_token) == ("", False)
    assert job(script, here, {"FT_TOKEN": "job"}).token == "job"


def test_a_backend_that_this_machine_lacks_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(availability, "torch_build", lambda: TorchBuild("2.13.0+cpu"))
    assert refusal(["--replicas", "2", script], {"FT_BACKEND": "nccl"}).startswith(
        "FT_BACKEND=nccl: torch 2.13.0+cpu is built without CUDA: install a CUDA build of it; or leave out FT_BACKEND"
    )
    monkeypatch.setattr(availability, "torch_build", lambda: TorchBuild("2.13.0", "13.0", nccl=True, cuda_devices=2))
    found = {"FT_BACKEND": "nccl", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert job(script, "--replicas 2", found).gpus == ("0", "1")
