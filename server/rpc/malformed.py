"""Answers bytes that are no message of the contract: cut off, or with a string that is not UTF-8.

grpc.aio itself says UNKNOWN then, as of a bug of ours, and logs a traceback for each.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from server.errors import InvalidRequest
from server.events import EventBus
from server.rpc.call import recorded_call

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """Parses the requests of one service where a failure can still be answered as INVALID_ARGUMENT."""

    def __init__(self, service_name: str, events: EventBus) -> None:
        self._service = service_name
        self._prefix = f"/{service_name}/"
        self._events = events

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The method's handler, parsing in its own coroutine; those of other services as they are."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        name = handler_call_details.method.removeprefix(self._prefix)
        method = self._parsing(name, handler.request_deserializer, handler.unary_unary or handler.unary_stream)
        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
        return make(method, response_serializer=handler.response_serializer)

    def _parsing(self, name: str, parse: Callable[[bytes], Any], method: Method) -> Method:
        async def call(body: bytes, context: Context) -> Any:
            try:
                request = parse(body)
            except DecodeError as error:
                async with recorded_call(name, context, self._events, service=self._service):
                    description = "is cut off, or a text in it is not UTF-8"
                    raise InvalidRequest.of("request", description) from error
            return await method(request, context)

        return call
