"""grpc.health.v1 for one server whose services live and die together.

grpcio-health-checking brings a servicer too, but there the first watcher that leaves
silences all the others, and watchers hold a graceful stop up until its timeout.
"""
# ruff: noqa: N802 - the stubs name the methods

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Context = grpc.aio.ServicerContext[Any, Any]
Response = health_pb2.HealthCheckResponse


class HealthService(HealthServicer):  # type: ignore[misc]  # its base has no types
    """NOT_SERVING until told otherwise; used on one event loop."""

    def __init__(self, service_names: Collection[str]) -> None:
        self._names = {"", *service_names}
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def set_serving(self) -> None:
        """Report SERVING from now on; without effect once closed."""
        self._is_serving = not self._is_closed
        await self._notify()

    async def close(self) -> None:
        """Report NOT_SERVING for good, and end the watches with it."""
        self._is_serving, self._is_closed = False, True
        await self._notify()

    async def Check(self, request: Any, context: Context) -> Any:
        """The status of one service, "" being all; NOT_FOUND for services of others."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return Response(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> None:
        """The status now and at every change, until the server stops."""
        last = None
        while True:
            status, is_last = self._status(request.service), self._is_closed
            if status != last:
                await context.write(Response(status=status))
                last = status
            if is_last:
                return
            async with self._changed:
                await self._changed.wait_for(partial(self._has_news, request.service, status))

    def _status(self, service: str) -> Any:
        if service not in self._names:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if self._is_serving else Response.NOT_SERVING

    def _has_news(self, service: str, known: Any) -> bool:
        return self._is_closed or self._status(service) != known

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
