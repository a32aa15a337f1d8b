"""Run by scripts/check-runtimes inside an environment that has grpcio and protobuf and nothing else.

Imports the whole control plane, then starts a real lighthouse process, connects to it and ends it with SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("_pb", "protocol", "rpc", "control")
FILES = ("errors", "settings", "network", "certificates", "coordination", "lighthouse")
READY_S = 20.0


def import_control_plane() -> int:
    """Import all of it; return how many modules that was."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / "ft_core" / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    for name in [*names, *(f"ft_core.{name}" for name in FILES)]:
        importlib.import_module(name)
    return len(names) + len(FILES)


def serve_once() -> str:
    """Start `python -m ft_core.lighthouse`, connect, end it; return the line it printed."""
    import grpc

    command = [sys.executable, "-u", "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--min-replicas", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )
    watchdog = threading.Timer(READY_S, process.kill)  # bounds the read below
    watchdog.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"(?:http://)?([\w.\[\]:-]+:\d{2,5})\b", line):
                address = found.group(1)
                break
        else:
            raise SystemExit(f"the lighthouse ended without naming its address:\n{''.join(lines)}")
        port = address.rsplit(":", 1)[1]
        with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
            grpc.channel_ready_future(channel).result(timeout=READY_S)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=READY_S)[0]
        if process.returncode != 0:
            raise SystemExit(f"SIGTERM: expected exit status 0, got {process.returncode}:\n{rest}")
        return line.strip()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> None:
    """Check everything and print one line."""
    sys.path.insert(0, str(ROOT))
    assert importlib.util.find_spec("torch") is None, "this environment must not have torch"
    print(f"{import_control_plane()} modules imported; served: {serve_once()}")


if __name__ == "__main__":
    main()
