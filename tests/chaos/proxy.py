"""A TCP proxy in front of the lighthouse, as a balancer or a service mesh puts one there: `proxy.py PORT HOST:PORT`.

A process of its own, so that killing it closes all connections at once, as its restart does. Prints one line when it
listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

MAX_PIECE = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(MAX_PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def main(port: int, host: str, target: int) -> None:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection(host, target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    server = await asyncio.start_server(accepted, "127.0.0.1", port)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    where, _, number = sys.argv[2].rpartition(":")
    asyncio.run(main(int(sys.argv[1]), where, int(number)))
