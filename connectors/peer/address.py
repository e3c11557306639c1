"""Which hosts a node may be sent to.

A client names the node that holds its prompt's KV. It must not make this one connect to whatever it likes, so an
address is used only if the configuration allows it.
"""

import fnmatch
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
"""What is allowed unless configured: only nodes of the same machine."""

_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]{1,253}")
MAX_LENGTH = 260


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a node listens. Attributes: host: a name, or an IP address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "PeerAddress":
        """Read host:port or [host]:port. Raises: ValueError."""
        host, colon, port = text.rpartition(":")
        if len(text) > MAX_LENGTH or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ValueError(f"{text[:MAX_LENGTH]!r} is no host:port")
        if host.startswith("[") and host.endswith("]"):
            host = str(ipaddress.IPv6Address(host[1:-1]))
        elif not _NAME.fullmatch(host):
            raise ValueError(f"{host!r} is neither a host name nor an IP address; IPv6 goes in brackets")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Rule:
    """An entry of the list: a network or a pattern of names, with a port or for all of them."""

    network: _Network | None
    names: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "_Rule":
        host, port = text, None
        bracketed = re.fullmatch(r"\[([^]]*:[^]]*)\](?::(\d+))?", text)
        if bracketed:
            host, port = bracketed[1], bracketed[2]
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r}: {port!r} is no port")
        number = None if port is None else int(port)
        try:
            return cls(ipaddress.ip_network(host, strict=False), "", number)
        except ValueError:
            if "/" in host or ":" in host or not _NAME_PATTERN.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
                raise ValueError(f"{text!r} is no IP address, network or pattern of host names") from None
        return cls(None, host.lower(), number)

    def allows(self, host: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if ip is None:
            return self.network is None and fnmatch.fnmatchcase(host, self.names)
        return self.network is not None and ip in self.network


class AllowedPeers:
    """Addresses that may be connected to.

    An address given as an IP is matched by networks alone, one given as a name by patterns of names alone: what a
    name stands for is whoever answers for it in the name service, so allow only names of your own.
    """

    def __init__(self, rules: Iterable[str] = LOOPBACK) -> None:
        """Args: rules: each an IP address, a network (10.0.0.0/8), or a pattern of host names (*.prefill.svc); with
        :port, or for any port; IPv6 with a port in brackets.

        Raises: ValueError.
        """
        self._rules = [_Rule.parse(rule) for rule in rules]

    def allow(self, address: PeerAddress) -> bool:
        """Whether one of the rules does."""
        host = address.host.lower()
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            ip = None
        return any(rule.allows(host, ip, address.port) for rule in self._rules)

    def refusal(self, text: str) -> str | None:
        """Why an address, as a client gave it, is of no use; None if it is not."""
        try:
            address = PeerAddress.parse(text)
        except ValueError as error:
            return f"address of its KV: {error}"
        return None if self.allow(address) else f"allowed_peers does not have {address}, where its KV is"
