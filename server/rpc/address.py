"""Whether an address can be listened on, found out before anything is loaded."""

import errno
import os
import socket
import stat

from server.config import ServerConfig
from server.errors import ConfigError

_PROBE_TIMEOUT_S = 1.0
_MAX_SOCKET_PATH_NBYTES = 107  # sun_path's 108 less the zero byte at the end


def check_address(config: ServerConfig) -> None:
    """Find out, before a model is loaded, whether the addresses can be listened on.

    Raises: ConfigError naming cause and remedy.
    """
    if config.uds is None:
        _check_tcp(config.host, config.port)
    else:
        check_socket_path(config.uds)
    if config.admin_uds is not None:
        if config.uds is not None and os.path.realpath(config.uds) == os.path.realpath(config.admin_uds):
            raise ConfigError(f"cannot listen on unix:{config.admin_uds}: uds and admin_uds must differ")
        check_socket_path(config.admin_uds)


def tcp_address(host: str, port: int) -> str:
    """Host and port as gRPC takes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_tcp(host: str, port: int) -> None:
    """Bind and close again: one of a name's addresses is enough, as it is for gRPC."""
    what = f"cannot listen on {tcp_address(host, port)}"
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


def check_socket_path(path: str) -> None:
    """gRPC unlinks what it finds in its way: do not let it take the socket of a live server, or a file.

    Raises: ConfigError.
    """
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
