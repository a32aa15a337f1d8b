"""examples/cluster: every command line and every environment variable in them is one that our programs know.

Nothing is started: manifests, batch scripts and the Ray example's command are read, their shell variables filled in as
the cluster would, and handed to the parsers of ftrun and ft-lighthouse.
"""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shlex
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.control.lighthouse import cli
from ft_core.errors import ConfigError
from ft_core.launch import options
from ft_core.settings import KNOWN_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.launch.spec import JobSpec

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
MANIFESTS = ("secret.yaml", "lighthouse.yaml", "lighthouse-pair.yaml", "replicas-job.yaml", "replicas-jobset.yaml")
WRAPPED = ("replicas-job.yaml", "replicas-jobset.yaml")
SCRIPTS = ("lighthouse.sbatch", "replicas.sbatch", "submit.sh")


def documents(name: str) -> list[dict[str, Any]]:
    """The resources of one manifest file."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is in the dev extra")
    return [found for found in yaml.safe_load_all((CLUSTER / "kubernetes" / name).read_text()) if found]


def the(kind: str, name: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


def job_spec(name: str) -> dict[str, Any]:
    """The Job of a manifest of replica groups, also of a JobSet."""
    if name == "replicas-job.yaml":
        spec = the("Job", name)["spec"]
    else:
        (replicated,) = the("JobSet", name)["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Pod specs of a manifest."""
    for document in documents(name):
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["spec"]["template"]["spec"]
    if name in WRAPPED:
        yield job_spec(name)["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (pod,) = pods(name)
    (found,) = pod["containers"]
    assert isinstance(found, dict)
    return found


def environment(name: str, **given: str) -> dict[str, str]:
    """What the container sees: plain values as they are, references by a stand-in."""
    out = dict(given)
    for entry in container(name)["env"]:
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            reference, secret = source["secretKeyRef"], the("Secret", "secret.yaml")
            assert reference["name"] == secret["metadata"]["name"]
            out[entry["name"]] = secret["stringData"][reference["key"]]
        else:
            out.setdefault(entry["name"], entry.get("value", ""))
    return out


def ftrun_lines(text: str) -> list[str]:
    """Command lines of a shell script that start ftrun, without what follows them."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip().removesuffix("&") for line in joined.splitlines() if re.match(r"\s*(srun .*)?ftrun ", line)]


def filled(line: str, env: dict[str, str], arguments: str = "") -> list[str]:
    """The words of a command line, with "$NAME" and "${NAME:-default}" filled in; fails for a variable nobody sets."""

    def value(found: re.Match[str]) -> str:
        name, default = found["plain"] or found["name"], found["default"]
        if name not in env and default is None:
            raise AssertionError(f"{line}: nobody sets ${name}")
        return env.get(name) or default or ""

    line = line.replace('"$@"', arguments)
    return shlex.split(re.sub(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\})", value, line))


def parsed(line: str, env: dict[str, str], arguments: str = "") -> JobSpec:
    words = filled(line, env, arguments)
    assert words[0] == "ftrun"
    return options.parse(words[1:], env)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples name the script relative to the checkout."""
    monkeypatch.chdir(ROOT)


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_known_environment(name: str) -> None:
    for pod in pods(name):
        for entry in pod["containers"][0]["env"]:
            assert not entry["name"].startswith("FT_") or entry["name"] in KNOWN_ENVIRONMENT, entry
        # Otherwise every Service adds variables: one called ft would add FT_SERVICE_HOST, which we warn about.
        assert pod["enableServiceLinks"] is False


def test_the_lighthouse_starts_with_these_options() -> None:
    found = container("lighthouse.yaml")
    assert found["command"] == ["ft-lighthouse"]
    arguments = cli._parser().parse_args(found["args"])
    (port,) = found["ports"]
    assert arguments.bind.endswith(f":{port['containerPort']}")
    assert "FT_TOKEN" in environment("lighthouse.yaml")
    assert found["readinessProbe"]["tcpSocket"]["port"] == port["name"]


def test_there_is_one_lighthouse_at_a_time() -> None:
    spec = the("Deployment", "lighthouse.yaml")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_the_service_leads_to_the_lighthouse() -> None:
    service, deployment = the("Service", "lighthouse.yaml"), the("Deployment", "lighthouse.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in [p["name"] for p in container("lighthouse.yaml")["ports"]]
    for name in WRAPPED:
        assert environment(name)["FT_LIGHTHOUSE"] == f"{service['metadata']['name']}:{port['port']}"


@pytest.mark.parametrize("ordinal", [0, 1])
def test_each_of_two_lighthouses_is_told_of_the_other(ordinal: int) -> None:
    found, stateful = container("lighthouse-pair.yaml"), the("StatefulSet", "lighthouse-pair.yaml")
    name = stateful["metadata"]["name"]
    env = environment("lighthouse-pair.yaml", HOSTNAME=f"{name}-{ordinal}")
    assert "FT_TOKEN" in env
    (line,) = found["args"]
    words = subprocess.run(
        [*found["command"], line.replace("exec ft-lighthouse", "printf '%s\\n'")],
        env=env, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    arguments = cli._parser().parse_args(words)
    (port,) = found["ports"]
    assert arguments.bind.endswith(f":{port['containerPort']}")
    other = f"{name}-{1 - ordinal}.{the('Service', 'lighthouse-pair.yaml')['metadata']['name']}"
    assert arguments.peer == f"{other}:{port['containerPort']}"


def test_two_lighthouses_have_a_node_and_an_address_each() -> None:
    """And never a third one: a pod is replaced when it is gone, and no balancer stands before them."""
    spec, service = (the(kind, "lighthouse-pair.yaml")["spec"] for kind in ("StatefulSet", "Service"))
    labels = spec["template"]["metadata"]["labels"]
    assert spec["replicas"] == 2
    assert spec["serviceName"] == the("Service", "lighthouse-pair.yaml")["metadata"]["name"]
    assert spec["podManagementPolicy"] == "Parallel"
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == spec["selector"]["matchLabels"] == labels
    (apart,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    budget = the("PodDisruptionBudget", "lighthouse-pair.yaml")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}


@pytest.mark.parametrize("name", WRAPPED)
def test_replicas_are_told_how_to_name_both_lighthouses(name: str) -> None:
    stateful, service = the("StatefulSet", "lighthouse-pair.yaml"), the("Service", "lighthouse-pair.yaml")
    (port,) = service["spec"]["ports"]
    pods_, under = stateful["metadata"]["name"], service["metadata"]["name"]
    both = ",".join(f"{pods_}-{ordinal}.{under}:{port['port']}" for ordinal in range(stateful["spec"]["replicas"]))
    assert f"# With lighthouse-pair.yaml: {both}\n" in (CLUSTER / "kubernetes" / name).read_text()
    assert both in (CLUSTER / "kubernetes" / "lighthouse-pair.yaml").read_text()
    env = environment(name, JOB_COMPLETION_INDEX="0", JOB_INDEX="0") | {"FT_LIGHTHOUSE": both}
    (line,) = ftrun_lines(container(name)["args"][0])
    assert parsed(line, env).lighthouse == both


@pytest.mark.parametrize("replica", [0, 3])
def test_job_pods_run_their_group(replica: int) -> None:
    spec = job_spec("replicas-job.yaml")
    env = environment("replicas-job.yaml", JOB_COMPLETION_INDEX=str(replica))
    (line,) = ftrun_lines(container("replicas-job.yaml")["args"][0])
    job = parsed(line, env)
    assert (job.first, job.groups, job.total) == (replica, 1, spec["completions"])
    assert job.lighthouse == env["FT_LIGHTHOUSE"]
    assert job.token == env["FT_TOKEN"]
    assert spec["maxFailedIndexes"] == spec["completions"] - job.min_replicas


def test_jobset_pods_run_their_part_of_a_group() -> None:
    (replicated,) = the("JobSet", "replicas-jobset.yaml")["spec"]["replicatedJobs"]
    network, name = the("JobSet", "replicas-jobset.yaml")["spec"]["network"], "replicas-jobset.yaml"
    env = environment(name, JOB_INDEX="3", JOB_COMPLETION_INDEX="1")
    (line,) = ftrun_lines(container(name)["args"][0])
    job = parsed(line, env)
    assert (job.first, job.groups, job.total) == (3, 1, replicated["replicas"])
    assert job.nodes == job_spec(name)["completions"] == job_spec(name)["parallelism"]
    jobset = the("JobSet", name)["metadata"]["name"]
    host, port = job.rdzv_endpoint.rsplit(":", 1)
    assert network["enableDNSHostnames"]
    assert host == f"{jobset}-{replicated['name']}-3-0.{network['subdomain']}"
    assert int(port) in [p["containerPort"] for p in container(name)["ports"]]


@pytest.mark.parametrize("name", WRAPPED)
def test_pods_are_replaced_one_by_one(name: str) -> None:
    spec = job_spec(name)
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    assert spec["backoffLimitPerIndex"] > 0
    assert pod["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert rules[1]["onExitCodes"]["containerName"] == container(name)["name"]
    (line,) = ftrun_lines(container(name)["args"][0])
    job = parsed(line, environment(name, JOB_COMPLETION_INDEX="0", JOB_INDEX="0"))
    assert pod["terminationGracePeriodSeconds"] > job.drain_s + 10


@pytest.mark.process
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(
    ("does", "status"),
    [("exit 0", 0), ("exit 1", 1), ("kill -9 $$", 137), ("kill -TERM $PPID; while :; do sleep 0.1; done", 143)],
)
def test_the_wrapper_passes_on_signals_and_statuses(name: str, does: str, status: int, tmp_path: pathlib.Path) -> None:
    """ftrun is a stand-in that ends as `does` says; on SIGTERM it drains and ends with 0, as the real one does."""
    stand_in = tmp_path / "ftrun"
    stand_in.write_text(f"#!/bin/sh\ntrap 'sleep 0.2; exit 0' TERM\n{does}\n")
    stand_in.chmod(0o755)
    env = environment(name, JOB_COMPLETION_INDEX="0", JOB_INDEX="0") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*container(name)["command"], *container(name)["args"]]
    assert subprocess.run(command, env=env, timeout=20, check=False).returncode == status


# ---------------------------------------------------------------- Slurm


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(CLUSTER / "slurm" / name)], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_set_only_known_environment(name: str) -> None:
    for found in re.findall(r"\bFT_[A-Z0-9_]+", (CLUSTER / "slurm" / name).read_text()):
        assert found in KNOWN_ENVIRONMENT


def test_slurm_lighthouse() -> None:
    text = (CLUSTER / "slurm" / "lighthouse.sbatch").read_text()
    (line,) = [found for found in text.splitlines() if found.startswith("ft-lighthouse ")]
    for given, peer in (("", ""), ("--peer node1:29510", "node1:29510")):
        words = filled(line.removesuffix("&").replace('"${peer[@]}"', given), {"port": "29510"})
        arguments = cli._parser().parse_args(words[1:])
        assert (arguments.bind, arguments.min_replicas, arguments.peer) == ("0.0.0.0:29510", 1, peer)


@pytest.mark.process
def test_slurm_is_given_two_lighthouses_that_know_each_other(tmp_path: pathlib.Path) -> None:
    """sbatch is a stand-in that writes down what it is given."""
    submitted = submit(tmp_path, LIGHTHOUSE_HOSTS="node0,node1", LIGHTHOUSE_PORT="29510")
    assert (tmp_path / "job" / "address").read_text() == "node0:29510,node1:29510\n"
    one, other, array, end = submitted
    for job, host, peer in ((one, "node0", "node1"), (other, "node1", "node0")):
        assert (job["host"], job["peer"]) == (host, f"{peer}:29510")
        assert f"--nodelist {host} " in job["words"]
        assert job["words"].endswith(f"lighthouse.sbatch {tmp_path / 'job'}")
    assert "--dependency after:1?after:2 " in array["words"]
    assert "scancel 1 2" in end["words"]
    (line,) = ftrun_lines((CLUSTER / "slurm" / "replicas.sbatch").read_text())
    env = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "3", "FT_TOKEN": "x"}
    env["lighthouse"] = "node0:29510,node1:29510"
    assert parsed(line, env, "examples/ddp/train.py").lighthouse == "node0:29510,node1:29510"


@pytest.mark.process
def test_slurm_is_given_one_lighthouse_that_announces_itself(tmp_path: pathlib.Path) -> None:
    one, array, end = submit(tmp_path)
    assert (one["host"], one["peer"]) == ("", "")
    assert "--dependency after:1 " in array["words"]
    assert "scancel 1" in end["words"]
    assert not (tmp_path / "job" / "address").exists()


@pytest.mark.process
@pytest.mark.parametrize("hosts", ["node0", "node0,node0", "node0,node1,node2"])
def test_slurm_lighthouses_on_one_node_are_refused(hosts: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        submit(tmp_path, LIGHTHOUSE_HOSTS=hosts)
    assert caught.value.returncode == 2
    assert "name two different nodes" in caught.value.stderr


def submit(folder: pathlib.Path, **env: str) -> list[dict[str, str]]:
    """What submit.sh hands to sbatch, job by job."""
    stand_in, jobs = folder / "sbatch", folder / "jobs"
    stand_in.write_text(
        f'#!/bin/bash\necho "${{LIGHTHOUSE_HOST:-}}|${{LIGHTHOUSE_PEER:-}}|$*" >> {jobs}\nwc -l < {jobs}\n'
    )
    stand_in.chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_DIR": str(folder / "job"), "HOME": str(folder)} | env
    command = [str(CLUSTER / "slurm" / "submit.sh"), "3", "examples/ddp/train.py"]
    subprocess.run(command, env=given, check=True, capture_output=True, text=True, timeout=60)
    return [
        dict(zip(("host", "peer", "words"), line.split("|", 2), strict=True)) for line in jobs.read_text().splitlines()
    ]


@pytest.mark.process
@pytest.mark.parametrize(("addresses", "found"), [("{0}", True), ("{1},{0}", True), ("{1}", False)])
def test_slurm_tasks_wait_for_either_lighthouse(addresses: str, found: bool) -> None:
    text = (CLUSTER / "slurm" / "replicas.sbatch").read_text()
    (function,) = re.findall(r"^answers\(\) \{\n.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = addresses.format(*(f"127.0.0.1:{one.getsockname()[1]}" for one in (there, nobody)))
        ended = subprocess.run(["bash", "-c", f'{function}answers "{where}"'], check=False, timeout=60)
    assert (ended.returncode == 0) is found


@pytest.mark.parametrize("extra", ["", "--nproc-per-replica 2 --standby 1 "])
def test_slurm_tasks_run_their_group(extra: str) -> None:
    text = (CLUSTER / "slurm" / "replicas.sbatch").read_text()
    (line,) = ftrun_lines(text)
    env = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3", "lighthouse": "10.0.0.1:29510", "FT_TOKEN": "x"}
    job = parsed(line, env, f"{extra}examples/ddp/train.py --steps 10")
    assert (job.first, job.groups, job.total, job.lighthouse) == (2, 1, 3, "10.0.0.1:29510")
    assert job.script.args == ("--steps", "10")
    # The signal comes early enough for the drain.
    (before_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert job.drain_s < int(before_s)
    assert "#SBATCH --requeue" in text


def test_a_task_outside_the_array_is_refused() -> None:
    (line,) = ftrun_lines((CLUSTER / "slurm" / "replicas.sbatch").read_text())
    env = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "3", "lighthouse": "10.0.0.1:29510"}
    with pytest.raises(ConfigError, match="--replica 3: out of range"):
        parsed(line, env, "examples/ddp/train.py")


def test_slurm_options_of_the_script_come_last() -> None:
    """Whatever submit.sh gets after `--` reaches ftrun behind our options, so it may override them."""
    (line,) = ftrun_lines((CLUSTER / "slurm" / "replicas.sbatch").read_text())
    assert line.rstrip().endswith('"$@"')


# ---------------------------------------------------------------- Ray


def test_ray_actors_run_their_group() -> None:
    """The example imports ray, which is optional: only the function that makes the command line is run."""
    tree = ast.parse((CLUSTER / "ray" / "train_ray.py").read_text())
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "ftrun_command"]
    names: dict[str, Any] = {"sys": __import__("sys")}
    exec(compile(ast.Module([function], []), "train_ray.py", "exec"), names)
    rest = ["--standby", "1", "examples/ddp/train.py", "--steps", "5"]
    words = names["ftrun_command"](1, 4, 2, "10.0.0.1:29510", rest)
    assert words[1:3] == ["-m", "ft_core.launch"]
    job = options.parse(words[3:], {"FT_TOKEN": "x"})
    assert (job.first, job.groups, job.total, job.min_replicas) == (1, 1, 4, 2)
    assert (job.lighthouse, job.standby, job.script.args) == ("10.0.0.1:29510", 1, ("--steps", "5"))
    both = "10.0.0.1:29510,10.0.0.2:29510"
    assert options.parse(names["ftrun_command"](1, 4, 2, both, rest)[3:], {"FT_TOKEN": "x"}).lighthouse == both
