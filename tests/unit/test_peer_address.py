"""Which hosts a node may be sent to."""

import pytest

from connectors.peer.address import AllowedPeers, PeerAddress


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("a-1.prefill.svc:65535", "a-1.prefill.svc", 65535),
        ("[::1]:7000", "::1", 7000),
        ("[2001:DB8::0:1]:1", "2001:db8::1", 1),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    address = PeerAddress.parse(text)
    assert (address.host, address.port) == (host, port)
    assert PeerAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "a", "a:", ":80", "a:0", "a:65536", "a:-1", "a:+1", "a:٣", "a:1e3", "::1:80", "[::1]", "[a]:1"),
        *("a b:80", "a\r\nb:80", "a/b:80", "user@a:80", "http://a:80", "a..b:80", ".a:80", "a" * 300 + ":80"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no host:port|neither a host name|IPv6|address|At least"):
        PeerAddress.parse(text)


@pytest.mark.parametrize(
    ("rules", "address", "is_allowed"),
    [
        (None, "127.0.0.1:9", True),
        (None, "127.9.9.9:9", True),
        (None, "localhost:9", True),
        (None, "LOCALHOST:9", True),
        (None, "[::1]:9", True),
        (None, "10.0.0.1:9", False),
        (None, "[::ffff:127.0.0.1]:9", False),
        (None, "localhost.example.com:9", False),
        (None, "2130706433:9", False),
        (None, "0x7f.1:9", False),
        (["10.0.0.0/8"], "10.1.2.3:9", True),
        (["10.0.0.0/8"], "11.1.2.3:9", False),
        (["10.0.0.0/8"], "127.0.0.1:9", False),
        (["10.0.0.0/8:7000"], "10.1.2.3:7000", True),
        (["10.0.0.0/8:7000"], "10.1.2.3:7001", False),
        (["10.1.2.3"], "10.1.2.3:1", True),
        (["10.1.2.3:5"], "10.1.2.3:1", False),
        (["fd00::/8"], "[fd00::1]:1", True),
        (["[fd00::/8]:7"], "[fd00::1]:7", True),
        (["[fd00::/8]:7"], "[fd00::1]:8", False),
        (["*.prefill.svc"], "a.prefill.svc:1", True),
        (["*.prefill.svc"], "a.PREFILL.svc:1", True),
        (["*.prefill.svc"], "a.prefill.svc.evil:1", False),
        (["*.prefill.svc:5"], "a.prefill.svc:1", False),
        (["*"], "anything:1", True),
        (["*"], "127.0.0.1:1", False),
        (["0.0.0.0/0"], "anything:1", False),
        ([], "127.0.0.1:1", False),
    ],
)
def test_only_what_is_allowed(rules: list[str] | None, address: str, is_allowed: bool) -> None:
    allowed = AllowedPeers() if rules is None else AllowedPeers(rules)
    assert allowed.allow(PeerAddress.parse(address)) == is_allowed


@pytest.mark.parametrize(
    "rule", ["", "10.0.0.0/33", "10.0.0", "300.1.1.1", "a b", "a:b", "a:0", "a:99999", "[a]:1", "a/8"]
)
def test_a_rule_that_means_nothing_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        AllowedPeers([rule])
