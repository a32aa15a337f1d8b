"""Which address other machines reach this one at. One function, used by every server we start."""

from __future__ import annotations

import socket

from ft_core.errors import ConfigError


def advertised_host(hostname: str | None, interface: str | None) -> str:
    """The host name or address to hand to peers.

    An explicit `hostname` (FT_HOSTNAME) wins; then the IPv4 address of `interface` (FT_INTERFACE, Linux); then this
    machine's host name if it resolves; else 127.0.0.1.

    Raises:
        ConfigError: the interface does not exist or has no IPv4 address.
    """
    if hostname:
        return hostname
    if interface:
        return _interface_address(interface)
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


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
