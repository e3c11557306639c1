"""Warnings that would fill the log."""

import logging

import pytest

from connectors.rare_log import MAX_KINDS, REPEAT_AFTER_S, RareLog
from tests.fakes.core import Clock

logger = logging.getLogger(__name__)


def test_a_kind_is_logged_once_a_minute_with_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RareLog(logger, clock)
    for i in range(3):
        log.warning("a", "number %d", i)
    log.warning("b", "another kind")
    clock.now_s += REPEAT_AFTER_S
    log.warning("a", "number %d", 3)
    log.warning("b", "again")
    assert caplog.messages == ["number 0", "another kind", "number 3 (2 more like this before)", "again"]


def test_so_many_kinds_are_told_apart_within_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RareLog(logger, clock)
    for i in range(10 * MAX_KINDS):
        kind = f"kind {i}"
        log.warning(kind, "number %d", i)
    assert caplog.messages == [f"number {i}" for i in range(MAX_KINDS + 1)]
    clock.now_s += REPEAT_AFTER_S
    caplog.clear()
    log.warning("kind 1000", "later")
    log.warning("kind 1001", "later")
    assert caplog.messages == ["later", "later"], "the old ones are forgotten"
