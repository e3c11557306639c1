"""An address that cannot be listened on is refused with its cause, and nothing is left behind."""

import socket
from pathlib import Path

import pytest

from server.config import ServerConfig
from server.errors import ConfigError
from server.rpc.address import check_address


def refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_address(ServerConfig.model_validate(settings))
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "localhost"])
def test_a_free_port_stays_free(host: str) -> None:
    check_address(ServerConfig(host=host, port=0))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert refusal(port=port).startswith(f"cannot listen on 127.0.0.1:{port}: another process listens there")
    check_address(ServerConfig(port=port))


def test_a_host_that_is_not_this_one() -> None:
    assert "203.0.113.7:5: it is not an address of this machine" in refusal(host="203.0.113.7", port=5)
    assert "no address and no name that is known here" in refusal(host="256.1.1.1.invalid", port=5)


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path}/no/dir" in refusal(uds=f"{tmp_path}/no/dir/x.sock")
    assert "the path has 108 bytes, a Unix socket's at most 107" in refusal(uds=str(tmp_path).ljust(108, "x"))


def test_what_lies_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("precious")
    assert "no socket" in refusal(uds=str(path))
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "another server listens there" in refusal(uds=str(path))
    check_address(ServerConfig(uds=str(path)))
    assert path.is_socket()
    path.unlink()
    check_address(ServerConfig(uds=str(path)))
    assert not path.exists()
