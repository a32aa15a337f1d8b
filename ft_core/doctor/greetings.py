"""What kind of server it is that begins like this. Pure."""

from __future__ import annotations

SETTINGS = "\x04"
"""The type of the frame with which every HTTP/2 server begins."""


def is_grpc(greeting: str) -> bool:
    """A server of HTTP/2, as gRPC's are: its first frame is SETTINGS, of stream 0."""
    return len(greeting) >= 9 and greeting[3] == SETTINGS and greeting[5:9] == "\0\0\0\0"


def kind(greeting: str) -> str:
    """The kind of server in words; '': one of gRPC, or it cannot be told."""
    if is_grpc(greeting):
        return ""
    if greeting.startswith("SSH-"):
        return f"an SSH server ({greeting.splitlines()[0].strip()})"
    if greeting.startswith("HTTP/"):
        return f"a web server ({greeting.splitlines()[0].strip()})"
    if greeting.startswith("+OK") or greeting.startswith("220"):
        return f"a mail or file server ({greeting.splitlines()[0].strip()})"
    printable = "".join(c for c in greeting if c.isprintable())
    return f"a server of another kind (it begins with {printable!r})" if greeting else "a server that says nothing"
