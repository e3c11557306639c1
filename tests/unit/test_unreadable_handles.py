"""Requests whose KV is where this node does not read."""

from dataclasses import replace

import pytest

from connectors.rare_log import REPEAT_AFTER_S
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.request import Request
from tests.fakes.core import Core, make_core, make_request
from tests.fakes.scripted_connector import ScriptedScheduler

BLOCK = 4
HANDLE = KVHandle("tcp", "e1", "host:1", "lease-1", 8, (1, 2), BLOCK, b"fake".hex())
"""With the fingerprint of a fake core."""


def handed_on(name: str, **handle: str) -> Request:
    continuation = Continuation((ChoiceState((1,), 7, 1),), replace(HANDLE, **handle))  # type: ignore[arg-type]
    return replace(make_request(name, range(9), max_tokens=2), continuation=continuation)


def told(core: Core) -> int:
    return core.scheduler.statistics().num_unreadable_handles


def test_it_is_told_of_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(block_size=BLOCK, connector=ScriptedScheduler(), reads_from=("lmcache", "filesystem"))
    core.scheduler.add(handed_on("a"))
    core.run()
    assert told(core) == 1
    (message,) = caplog.messages
    assert message == (
        "request a: its KV is held by connector tcp of engine e1, and this node reads from filesystem, lmcache: "
        "what its cache lacks is computed here"
    )


def test_a_node_without_a_connector_tells_of_it_too(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(block_size=BLOCK)
    core.scheduler.add(handed_on("a"))
    core.run()
    assert (told(core), len(caplog.messages)) == (1, 1)
    assert "this node reads from none" in caplog.text


def test_what_a_connector_here_reads_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(block_size=BLOCK, connector=ScriptedScheduler(), reads_from=("filesystem", "tcp"))
    for name, request in (("a", handed_on("a")), ("b", make_request("b", range(9), max_tokens=2))):
        core.scheduler.add(request)
        core.run()
        assert (told(core), caplog.messages) == (0, []), name


def test_what_does_not_fit_is_counted_and_left_to_its_connector_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(block_size=BLOCK, connector=ScriptedScheduler(), reads_from=("tcp",))
    for fingerprint in (b"another".hex(), ""):
        core.scheduler.add(handed_on(f"of {fingerprint}", fingerprint=fingerprint))
    assert (told(core), caplog.messages) == (2, [])
    core.run()


def test_each_source_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(block_size=BLOCK, connector=ScriptedScheduler())
    for name, engine_id in (("a", "e1"), ("b", "e1"), ("c", "e2")):
        core.scheduler.add(handed_on(name, engine_id=engine_id))
    assert [message[:9] for message in caplog.messages] == ["request a", "request c"]
    core.clock.now_s += REPEAT_AFTER_S
    core.scheduler.add(handed_on("d", engine_id="e1"))
    assert caplog.messages[-1].endswith("is computed here (1 more like this before)")
    assert told(core) == 4
