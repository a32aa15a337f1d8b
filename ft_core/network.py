"""Which address other machines reach this one at. One function, used by every server we start.

How it works. The kernel knows from which of this machine's addresses a packet to a given host would leave: a UDP
socket is "connected" there, which sends nothing, and asked for its own address. So what is advertised is an address of
the network on which the others are, and never the host name, which other machines may not be able to resolve (and
which Debian resolves to 127.0.1.1 at home).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from ft_core.errors import ConfigError

SOMEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation: nobody has them, so the way there is the default route."""


def advertised_host(hostname: str | None, interface: str | None, *towards: str) -> str:
    """The host name or address to hand to peers.

    An explicit `hostname` (FT_HOSTNAME) wins; then the IPv4 address of `interface` (FT_INTERFACE, Linux); then the
    address from which packets to `towards` leave. 'localhost' or a loopback address there means a job on one machine:
    127.0.0.1 or ::1. (If a tunnel or a side-car leads from there to another machine, FT_HOSTNAME has to be set.)
    Of several (a lighthouse and one that stands by) the first that is on another machine and has a way to it counts.
    Without `towards`, or with names that cannot be resolved: the address of the default route; without any, 127.0.0.1.

    Raises:
        ConfigError: the interface does not exist or has no IPv4 address.
    """
    if hostname:
        return hostname
    if interface:
        return _interface_address(interface)
    if towards and all(is_loopback(there) for there in towards):
        return "::1" if ":" in towards[0] else "127.0.0.1"
    # A name that leads to this machine's loopback address is this machine under a name that others know.
    elsewhere = (address for there in towards if not is_loopback(there) for address in _addresses(there))
    ways = (_way_to(there) for there in (*elsewhere, *SOMEWHERE))
    return next((here for here in ways if here and not is_loopback(here)), "127.0.0.1")


def is_loopback(host: str) -> bool:
    """Whether this is 'localhost' or a loopback address, so that only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Whether `host` (a name or an address) is this machine."""
    return is_loopback(host) or any(is_loopback(there) or _way_to(there) == there for there in _addresses(host))


def _addresses(host: str) -> tuple[str, ...]:
    """What a name resolves to, in the order in which to try; nothing if it cannot be resolved."""
    if not host:
        return ()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


def _way_to(there: str) -> str:
    """This machine's address on the way to an address; '' if there is no such way. Sends nothing."""
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))
        here = str(probe.getsockname()[0])
        if not ipaddress.ip_address(here.partition("%")[0]).is_link_local or family == socket.AF_INET:
            return here
    return ""


def _interface_address(interface: str) -> str:
    import fcntl
    import struct

    request = struct.pack("256s", interface.encode()[:15])
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, request)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"FT_INTERFACE={interface!r} has no IPv4 address ({error.strerror}); interfaces here: {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
