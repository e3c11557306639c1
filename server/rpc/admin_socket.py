"""Where an operator's calls come in: a Unix socket, as there is nothing else yet by which to know an operator."""

import contextlib
import os

import grpc

from protos.outrider.v1.admin_pb2_grpc import add_AdminServicer_to_server
from server.engine.protocol import Engine
from server.errors import ConfigError
from server.events import EventBus
from server.rpc.address import check_socket_path
from server.rpc.admin import SERVICE_NAME, AdminService
from server.rpc.malformed import MalformedMessages

_OWNER_ONLY = 0o177


class AdminSocket:
    """Serves outrider.v1.Admin and reflection to the user that the server runs as; used on the event loop."""

    def __init__(self, path: str, engine: Engine, events: EventBus) -> None:
        self._path = path
        self._server = grpc.aio.server(interceptors=[MalformedMessages(SERVICE_NAME, events)])
        add_AdminServicer_to_server(AdminService(engine, events), self._server)

    async def start(self) -> None:
        """Listen and answer. Raises: ConfigError if the socket cannot be made."""
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        check_socket_path(self._path)
        # The socket takes connections from the moment it exists: a chmod would come too late.
        umask = os.umask(_OWNER_ONLY)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on unix:{self._path}: {error}") from error
        finally:
            os.umask(umask)
        await self._server.start()

    async def stop(self) -> None:
        """Cancel calls, and remove the socket."""
        await self._server.stop(None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
