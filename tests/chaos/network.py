"""Machines that can be cut from each other: network namespaces on one bridge, always taken away again.

Each machine is a namespace with one interface of its own on a bridge in a namespace that is the switch. A cut is
silent, as a broken cable or a firewall that drops: nothing is refused and no connection ends. It is made per direction,
with a permanent neighbour entry that leads to a hardware address that nobody has.

Needs root and `ip` (iproute2): `available` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.chaos.cluster import Cluster, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.forge import Forge

NOBODY = "02:00:00:00:00:fe"
SUBNET = "10.199.0"
COMMAND_S = 10.0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def available() -> str:
    """Why namespaces cannot be made here; '' if they can."""
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    try:
        with Network(["probe"]):
            return ""
    except OSError as error:
        return f"needs CAP_NET_ADMIN and CAP_SYS_ADMIN: {error}"


class Network:
    """Machines of the given names; a context manager."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._machines = list(machines)
        self._switch = f"ft{os.getpid()}-switch"
        self._made: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make(self._switch)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for number, machine in enumerate(self._machines):
                self._plug(machine, f"port{number}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        while self._made:
            ip("netns", "delete", self._made.pop())  # and with it its interfaces

    def address(self, machine: str) -> str:
        return f"{SUBNET}.{self._machines.index(machine) + 1}"

    def on(self, machine: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `machine` (as the same process: `ip` replaces itself)."""
        return ["ip", "netns", "exec", self._name(machine), *command]

    def namespace(self, machine: str) -> str:
        """The file that stands for the machine's namespace."""
        return f"/run/netns/{self._name(machine)}"

    def cut(self, one: str, other: str, both_ways: bool = True) -> None:
        """Lose what `one` sends to `other`, and what it answers."""
        self._neighbour("replace", one, other, "lladdr", NOBODY, "nud", "permanent")
        if both_ways:
            self.cut(other, one, both_ways=False)

    def mend(self, one: str, other: str, both_ways: bool = True) -> None:
        """Take `cut` back."""
        self._neighbour("delete", one, other)
        if both_ways:
            self.mend(other, one, both_ways=False)

    def _neighbour(self, verb: str, one: str, other: str, *how: str) -> None:
        ip("-n", self._name(one), "neighbour", verb, self.address(other), *how, "dev", "eth0")

    def _name(self, machine: str) -> str:
        return f"ft{os.getpid()}-{machine}"

    def _make(self, name: str) -> None:
        ip("netns", "add", name)
        self._made.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    def _plug(self, machine: str, port: str) -> None:
        name = self._name(machine)
        self._make(name)
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", name, "address", "add", f"{self.address(machine)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


class NetworkCluster(Cluster):
    """A cluster on several machines: `hub` with the lighthouse, and one of each trainer's name; a context manager."""

    def __init__(self, forge: Forge, *trainers: str, **env: object) -> None:
        self.network = Network(["hub", *trainers])
        self.host = self.network.address("hub")
        super().__init__(forge, FT_TOKEN="chaos", FT_HOSTNAME="", **env)

    def __enter__(self) -> NetworkCluster:
        with contextlib.ExitStack() as stack:
            stack.push(super().__exit__)
            stack.enter_context(self.network)
            super().__enter__()
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self.network.__exit__()

    def start(self, name: str, **env: object) -> Process:
        """Start (or restart) a trainer on the machine of its name."""
        return super().start(name, MACHINE=self.network.namespace(name), **env)

    def placed(self, name: str, command: list[str]) -> list[str]:
        """The lighthouse runs on the hub; a trainer, which may be a forge's child, goes to its machine by itself."""
        return self.network.on("hub", command) if name == "lighthouse" else command
