"""A server in the lighthouse's place that stands by: it answers every call with "standby: ..." and counts them."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any

from ft_core.addresses import STANDBY
from ft_core.rpc.channel import LIGHTHOUSE, grpc

STREAMS = {"Lease": grpc.stream_stream_rpc_method_handler, "Watch": grpc.unary_stream_rpc_method_handler}


class Standby:
    """Constructed running; `shutdown` ends it."""

    def __init__(self, active: str = "elsewhere:1", holds: str = "") -> None:
        self.calls: list[str] = []
        self.holds = holds
        """A method whose calls wait for `shutdown`."""
        self.called = threading.Condition()
        self._ended = threading.Event()
        self._active = active
        self._workers = futures.ThreadPoolExecutor(8, "standby")
        self._server = grpc.server(self._workers, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Everything(self),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def take(self, method: str, context: grpc.ServicerContext) -> None:
        with self.called:
            self.calls.append(method)
            self.called.notify_all()
        if method == self.holds:
            self._ended.wait(30)
        context.abort(grpc.StatusCode.UNAVAILABLE, f"{STANDBY}{self._active} is active")

    def shutdown(self) -> None:
        self._ended.set()
        ended: threading.Event = self._server.stop(None)
        ended.wait(5)
        self._workers.shutdown()


class _Everything(grpc.GenericRpcHandler):
    def __init__(self, standby: Standby) -> None:
        self._standby = standby

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.removeprefix(f"/{LIGHTHOUSE}/")

        def answer(_request: object, context: grpc.ServicerContext) -> Any:
            self._standby.take(method, context)

        return STREAMS.get(method, grpc.unary_unary_rpc_method_handler)(answer)
