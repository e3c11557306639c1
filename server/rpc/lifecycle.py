"""The gRPC server: what it listens on, what it reports of its health, how it ends."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from server.config import ServerConfig
from server.engine.protocol import Engine
from server.errors import ConfigError
from server.events import EventBus
from server.kv_transfer_config import Role
from server.preprocess import Preprocessor
from server.rpc.address import check_address, tcp_address
from server.rpc.admin_socket import AdminSocket
from server.rpc.malformed import MalformedMessages
from server.rpc.service import InferenceService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class GrpcServer:
    """Serves outrider.v1.Inference, health and reflection on one address, and Admin on a socket of its own if any.

    Owned by compose.py; every method runs on the event loop that the engine's streams belong to.
    Health is NOT_SERVING until `set_serving`, and again from the first moment of `stop`.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        preprocessor: Preprocessor,
        events: EventBus,
        *,
        role: Role = "both",
    ) -> None:
        """Args: role: which part of requests this node does."""
        from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

        from server.rpc.health import HealthService

        self._config = config
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._grammar_pool = ThreadPoolExecutor(config.grammar_threads, thread_name_prefix="grammar")
        self._health = HealthService([SERVICE_NAME])
        self._server = grpc.aio.server(
            interceptors=[MalformedMessages(SERVICE_NAME, events)], options=_options(config.max_message_bytes)
        )
        service = InferenceService(
            engine,
            preprocessor,
            self._pool,
            self._grammar_pool,
            events,
            max_message_bytes=config.max_message_bytes,
            role=role,
        )
        add_InferenceServicer_to_server(service, self._server)
        add_HealthServicer_to_server(self._health, self._server)
        self._admin = None if config.admin_uds is None else AdminSocket(config.admin_uds, engine, events)

    async def start(self) -> int:
        """Listen and answer, health still NOT_SERVING.

        Returns: the TCP port, 0 for a Unix socket.
        Raises: ConfigError if the address cannot be bound.
        """
        from grpc_reflection.v1alpha import reflection

        from server.rpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME

        names = (SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        port = self._bind()
        if self._admin is not None:
            await self._admin.start()
        await self._server.start()
        return port

    async def set_serving(self) -> None:
        """Report SERVING: the engine is warm."""
        await self._health.set_serving()

    async def stop(self) -> None:
        """Refuse new calls, let live ones end for `shutdown_timeout_seconds`, cancel the rest."""
        await self._health.close()
        await self._server.stop(self._config.shutdown_timeout_seconds)
        if self._admin is not None:
            await self._admin.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        if self._config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.uds)

    def _bind(self) -> int:
        check_address(self._config)
        if self._config.uds is not None:
            address = f"unix:{self._config.uds}"
        else:
            address = tcp_address(self._config.host, self._config.port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        return 0 if self._config.uds is not None else port


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Otherwise a second server on the same port takes half of the first one's calls.
        ("grpc.so_reuseport", 0),
        # A client whose machine vanished is found out within a minute, and its request ended.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # without it, the one above is at least a minute
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ask whether it is there twice a second; the default of five minutes closes their connections.
        ("grpc.http2.min_ping_interval_without_data_ms", 450),
    ]
