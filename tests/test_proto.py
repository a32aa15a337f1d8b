"""scripts/gen-proto, which scripts/test asks whether the generated code is what proto/ says, notices when it is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CANNOT_RUN = 3

SCRATCH = """
syntax = "proto3";
package ft.scratch.v1;
message Ping { int64 step = 1; }
service Scratch { rpc Lease(stream Ping) returns (stream Ping); }
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]  # the first run installs the generator


def gen_proto(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(ROOT / "scripts/gen-proto"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    if done.returncode == CANNOT_RUN:
        pytest.skip(f"the generator cannot run here: {done.stderr.strip()}")
    return done


def test_the_check_notices_what_differs(tmp_path: Path) -> None:
    protos, generated = tmp_path / "proto", tmp_path / "pb"
    protos.mkdir()
    (protos / "scratch.proto").write_text(SCRATCH)
    folders = {"PROTO_DIR": str(protos), "PB_DIR": str(generated)}

    assert gen_proto("--check", **folders).returncode == 1, "nothing is generated yet"
    assert gen_proto(**folders).returncode == 0
    assert gen_proto("--check", **folders).returncode == 0

    (generated / "stale_pb2.py").write_text("")
    stub = generated / "scratch_pb2_grpc.py"
    stub.write_text(stub.read_text() + "# edited\n")
    done = gen_proto("--check", **folders)
    assert done.returncode == 1
    assert "stale_pb2.py" in done.stderr
    assert "scratch_pb2_grpc.py" in done.stderr
    assert gen_proto(**folders).returncode == 0
    assert not (generated / "stale_pb2.py").exists()
    assert gen_proto("--check", **folders).returncode == 0
