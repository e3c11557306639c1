"""The gRPC server: what it listens on, what it reports of its health, how it ends."""

import contextlib
import errno
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from server.config import ServerConfig
from server.engine.protocol import Engine
from server.errors import ConfigError
from server.events import EventBus
from server.preprocess import Preprocessor
from server.rpc.malformed import MalformedMessages
from server.rpc.service import InferenceService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_PROBE_TIMEOUT_S = 1.0
_MAX_SOCKET_PATH_NBYTES = 107  # sun_path's 108 less the zero byte at the end


class GrpcServer:
    """Serves outrider.v1.Inference, health and reflection on one address.

    Owned by compose.py; every method runs on the event loop that the engine's streams belong to.
    Health is NOT_SERVING until `set_serving`, and again from the first moment of `stop`.
    """

    def __init__(self, config: ServerConfig, engine: Engine, preprocessor: Preprocessor, events: EventBus) -> None:
        from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

        from server.rpc.health import HealthService

        self._config = config
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._health = HealthService([SERVICE_NAME])
        self._server = grpc.aio.server(
            interceptors=[MalformedMessages(SERVICE_NAME, events)], options=_options(config.max_message_bytes)
        )
        service = InferenceService(engine, preprocessor, self._pool, events, max_message_bytes=config.max_message_bytes)
        add_InferenceServicer_to_server(service, self._server)
        add_HealthServicer_to_server(self._health, self._server)

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
        await self._server.start()
        return port

    async def set_serving(self) -> None:
        """Report SERVING: the engine is warm."""
        await self._health.set_serving()

    async def stop(self) -> None:
        """Refuse new calls, let live ones end for `shutdown_timeout_seconds`, cancel the rest."""
        await self._health.close()
        await self._server.stop(self._config.shutdown_timeout_seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.uds)

    def _bind(self) -> int:
        check_address(self._config)
        if self._config.uds is not None:
            address = f"unix:{self._config.uds}"
        else:
            address = _tcp_address(self._config.host, self._config.port)
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
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping as often; the default of five minutes closes their connections.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def check_address(config: ServerConfig) -> None:
    """Find out, before a model is loaded, whether the address can be listened on.

    Raises: ConfigError naming cause and remedy.
    """
    if config.uds is None:
        _check_tcp(config.host, config.port)
    else:
        _check_socket_path(config.uds)


def _tcp_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_tcp(host: str, port: int) -> None:
    """Bind and close again: one of a name's addresses is enough, as it is for gRPC."""
    what = f"cannot listen on {_tcp_address(host, port)}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"{what}: {host} is no address and no name that is known here ({error.strerror})") from error
    problems: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: what is left of connections of a server that has ended is not in the way.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            return
        except OSError as error:
            problems.append(error)
    causes = {
        errno.EADDRINUSE: "another process listens there; stop it, or choose another --port (0 picks a free one)",
        errno.EADDRNOTAVAIL: "it is not an address of this machine; choose another --host, such as 0.0.0.0 for all",
        errno.EACCES: "this user may not use that port; choose a --port above 1023",
    }
    first = problems[0]
    raise ConfigError(f"{what}: {causes.get(first.errno or 0, first.strerror or first)}") from first


def _check_socket_path(path: str) -> None:
    """gRPC unlinks what it finds in its way: do not let it take the socket of a live server, or a file."""
    what = f"cannot listen on unix:{path}"
    folder = os.path.dirname(path) or "."
    if (nbytes := len(os.fsencode(path))) > _MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(f"{what}: the path has {nbytes} bytes, a Unix socket's at most {_MAX_SOCKET_PATH_NBYTES}")
    if not os.path.isdir(folder):
        raise ConfigError(f"{what}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: this user may not write into {folder}")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{what}: there is a file of that name that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
        except OSError as error:
            raise ConfigError(f"{what}: there is a socket that does not answer ({error}); remove it first") from error
    raise ConfigError(f"{what}: another server listens there")
