"""c10d asks no name server for the host names at the ends of a store connection."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_ASKS = """
import contextlib, ctypes, socket, struct, threading
from datetime import timedelta
import torch
from torch._C._distributed_c10d import TCPStore
from ft_core.process_group import create_store_client, open_store

queries = []
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 0))

def answer():
    while True:
        query, asker = server.recvfrom(2048)
        queries.append(query)
        server.sendto(query[:2] + b"\\x81\\x83" + query[4:6] + bytes(6) + query[12:], asker)

threading.Thread(target=answer, daemon=True).start()
libc = ctypes.CDLL(None)
libc["__res_init"]()
state_of_thread = libc["__res_state"]
state_of_thread.restype = ctypes.c_void_p
state = state_of_thread()
address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", server.getsockname()[1]) + socket.inet_aton("127.0.0.1")
ctypes.memmove(state + 20, address, len(address))  # nsaddr_list[0], in the resolver's state of this thread

def asked():
    before = len(queries)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False)
    return len(queries) - before

print(asked(), end=" ")
store = open_store("127.0.0.1")
create_store_client(f"127.0.0.1:{store.port}/x", timedelta(seconds=20)).set("still", "works")
print(asked(), end=" ")
before = len(queries)
with contextlib.suppress(socket.gaierror):  # what is answered is not the question here
    socket.getnameinfo(("192.0.2.9", 1), socket.NI_NUMERICSERV)  # what others ask is none of our business
print(len({query[12:] for query in queries[before:]}))  # without their numbers: one that got no answer comes again
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's resolver")
@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9), reason="c10d of torch < 2.9 always asks"
)
def test_opening_and_joining_a_store_asks_no_name_server() -> None:
    """The name server is this test's own, for one thread of a process of its own."""
    done = subprocess.run([sys.executable, "-c", _ASKS], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    plain, ours, others = map(int, done.stdout.split())
    assert plain > 0  # c10d by itself does ask: otherwise this test proves nothing
    assert ours == 0
    assert others == 1
    assert done.stderr == ""
