"""A donor as a process of its own: `python -m tests.checkpointing.donor_process SEED MIB [die|fork]`.

Prints its address; ends when its standard input does. `die`: kills itself with SIGKILL amid its third range.
`fork`: has a forked child that lives until standard input ends, like a DataLoader worker; prints its pid.
"""

import os
import signal
import sys
from typing import Any
from unittest import mock

import torch

from ft_core.checkpointing.http import server as http_server
from ft_core.checkpointing.http.byte_stream import ByteStream
from tests.checkpointing.conftest import MIB, make_state


def main() -> None:
    seed, mib, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    torch.set_num_threads(1)
    server = http_server.StateServer(bind="127.0.0.1").start()
    if mode == "die":
        die_in_the_middle()
    server.offer("t", make_state(seed, mib))
    if mode == "fork":
        pid = os.fork()
        if pid == 0:
            sys.stdin.read()
            os._exit(0)
        print(pid)
    print(server.address, flush=True)
    sys.stdin.read()
    server.shutdown()


def die_in_the_middle() -> None:
    sent = []
    original = ByteStream.send

    def send(stream: ByteStream, pieces: list[Any]) -> None:
        if len(pieces[-1]) >= MIB:
            sent.append(1)
            if len(sent) == 3:
                original(stream, [*pieces[:-1], pieces[-1][: MIB // 2]])
                os.kill(os.getpid(), signal.SIGKILL)
        original(stream, pieces)

    mock.patch.object(ByteStream, "send", send).start()


if __name__ == "__main__":
    main()
