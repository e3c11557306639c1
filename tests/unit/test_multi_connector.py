"""Several connectors as one: who loads, when a block is saved, and who is told what."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from connectors.base import BlockLoad, BlockSave, Connector, ConnectorContext, Finished, KVCaches, KVGroup, KVRequest
from connectors.multi import MultiConfig, MultiMetadata, MultiScheduler, MultiWorker
from server.errors import ConfigError
from server.kv_handle import KVHandle
from tests.fakes.scripted_connector import BUILT, ScriptedScheduler, ScriptedWorker

BLOCK_SIZE = 16
REQUEST = KVRequest(seq_id=7, request_id="r", num_tokens=81, hashes=[bytes([i]) * 32 for i in range(5)])
EVERYTHING = 5 * BLOCK_SIZE
LOAD = BlockLoad(seq_id=7, block_ids=(1, 2), hashes=tuple(REQUEST.hashes[:2]))
SAVES = (BlockSave(3, b"x" * 32), BlockSave(4, b"y" * 32))
HANDLE = KVHandle("tcp", "engine", "host:1", "lease", 32, (1, 2), BLOCK_SIZE, "fingerprint")


def ask(*members: ScriptedScheduler, num_times: int = 1, num_computed: int = 0) -> tuple[MultiScheduler, int | None]:
    """The last of so many answers."""
    multi = MultiScheduler(members, BLOCK_SIZE)
    answers = [multi.get_num_new_matched_tokens(REQUEST, num_computed) for _ in range(num_times)]
    assert all(answer is None for answer in answers[:-1])
    return multi, answers[-1]


class TestWhoLoads:
    @pytest.mark.parametrize(
        ("answers", "winner"), [((0, 32, 64), 2), ((32, 64, 64), 1), ((16, 0, 0), 0), ((64, None, 64), 0)]
    )
    def test_the_first_of_those_that_have_most(self, answers: tuple[int | None, ...], winner: int) -> None:
        members = [ScriptedScheduler(*([answer] * 2)) for answer in answers]
        members[1].answers[1:] = [0] if answers[1] is None else []
        multi, count = ask(*members, num_times=2 if None in answers else 1)
        assert count == max(answer or 0 for answer in answers)
        multi.update_state_after_alloc(LOAD)
        assert [member.loads for member in members] == [[LOAD] if i == winner else [] for i in range(3)]

    def test_the_others_hear_that_nothing_is_left(self) -> None:
        """A peer lets go of the blocks that its node holds."""
        members = [ScriptedScheduler(16), ScriptedScheduler(32), ScriptedScheduler(0)]
        multi, _ = ask(*members)
        multi.update_state_after_alloc(LOAD)
        assert [member.asked for member in members] == [[0, EVERYTHING], [0], [0, EVERYTHING]]
        assert all(member.cancelled == [] for member in members)

    def test_who_has_answered_little_is_not_asked_again(self) -> None:
        quick, slow = ScriptedScheduler(16), ScriptedScheduler(None, None, 32)
        _, count = ask(quick, slow, num_times=3)
        assert (count, len(quick.asked), len(slow.asked)) == (32, 1, 3)

    def test_the_one_with_most_has_answered_just_now(self) -> None:
        """Between its answer and the load others may have been told to forget it."""
        quick, slow = ScriptedScheduler(64, None, 48), ScriptedScheduler(None, 32)
        multi, count = ask(quick, slow, num_times=3)
        assert (count, len(quick.asked), len(slow.asked)) == (48, 3, 2)
        multi.update_state_after_alloc(LOAD)
        assert quick.loads == [LOAD]

    def test_one_that_has_less_by_now_leaves_it_to_the_next(self) -> None:
        quick, slow = ScriptedScheduler(64, 0), ScriptedScheduler(None, 32)
        multi, count = ask(quick, slow, num_times=2)
        assert count == 32
        multi.update_state_after_alloc(LOAD)
        assert slow.loads == [LOAD]

    def test_answers_hold_for_what_they_were_asked(self) -> None:
        quick, slow = ScriptedScheduler(64, 48), ScriptedScheduler(None, 0)
        multi, _ = ask(quick, slow)
        assert multi.get_num_new_matched_tokens(REQUEST, BLOCK_SIZE) == 48
        assert (quick.asked, slow.asked) == ([0, BLOCK_SIZE], [0, BLOCK_SIZE])

    def test_cancelled_with_all(self) -> None:
        members = [ScriptedScheduler(16), ScriptedScheduler(None, 32)]
        multi, _ = ask(*members)
        multi.cancel(REQUEST.seq_id)
        assert [member.cancelled for member in members] == [[7], [7]]
        assert multi.get_num_new_matched_tokens(REQUEST, 0) == 32
        assert len(members[0].asked) == 2, "what it had said is forgotten"

    def test_there_is_something_to_ask_if_one_loads(self) -> None:
        saver, loader = ScriptedScheduler(wants_loads=False), ScriptedScheduler()
        assert MultiScheduler([saver, loader], BLOCK_SIZE).wants_loads
        assert not MultiScheduler([saver, saver], BLOCK_SIZE).wants_loads


class TestHandingOn:
    def test_by_the_first_that_can(self) -> None:
        members = [ScriptedScheduler(), ScriptedScheduler(handle=HANDLE), ScriptedScheduler(handle=HANDLE)]
        assert MultiScheduler(members, BLOCK_SIZE).request_finished(REQUEST, [1, 2]) == HANDLE
        assert [member.num_finished for member in members] == [1, 1, 0]

    def test_by_none(self) -> None:
        assert MultiScheduler([ScriptedScheduler()], BLOCK_SIZE).request_finished(REQUEST, [1, 2]) is None


class TestMetadata:
    def test_none_for_nothing(self) -> None:
        assert MultiScheduler([ScriptedScheduler()], BLOCK_SIZE).build_connector_meta() is None

    def test_everybody_gets_their_own(self) -> None:
        members = [ScriptedScheduler(), ScriptedScheduler()]
        members[1].metadata = "begin"
        metadata = MultiScheduler(members, BLOCK_SIZE).build_connector_meta()
        assert metadata == MultiMetadata((None, "begin"), ())
        workers = [ScriptedWorker(), ScriptedWorker()]
        MultiWorker(workers, 2).start_load_kv(metadata)
        assert [worker.heard for worker in workers] == [[], ["begin"]]

    def test_it_is_forgotten(self) -> None:
        multi, _ = ask(ScriptedScheduler(32))
        multi.update_state_after_alloc(LOAD)
        assert multi.build_connector_meta() == MultiMetadata((None,), ((7, 0),))
        assert multi.build_connector_meta() is None


class TestWhatHasFinished:
    def started(self, *members: ScriptedScheduler) -> tuple[MultiWorker, list[ScriptedWorker]]:
        multi, _ = ask(*members)
        multi.update_state_after_alloc(LOAD)
        if multi.wants_saves:
            multi.save(SAVES)
        workers = [ScriptedWorker() for _ in members]
        worker = MultiWorker(workers, sum(member.wants_saves for member in members))
        worker.start_load_kv(multi.build_connector_meta() or pytest.fail("there is something to do"))
        return worker, workers

    def test_a_load_is_its_members(self) -> None:
        worker, (first, second) = self.started(ScriptedScheduler(0), ScriptedScheduler(32))
        first.finished = Finished(loaded=(7,))
        assert not worker.get_finished()
        second.finished = Finished(loaded=(7,), complete=(1,))
        second.errors = frozenset({2})
        assert worker.get_finished() == Finished(loaded=(7,), complete=(1,))
        assert worker.get_block_ids_with_load_errors() == {2}
        second.finished = Finished(loaded=(7,))
        assert not worker.get_finished(), "it is reported once"

    def test_a_block_is_saved_when_all_have_reported_it(self) -> None:
        takers = [ScriptedScheduler(32), ScriptedScheduler(), ScriptedScheduler(wants_saves=False)]
        worker, (first, second, _) = self.started(*takers)
        assert [taker.saves for taker in takers] == [list(SAVES), list(SAVES), []]
        first.finished = Finished(saved=(3, 4))
        assert not worker.get_finished()
        second.finished = Finished(saved=(4,))
        assert worker.get_finished().saved == (4,)
        second.finished = Finished(saved=(3,))
        assert worker.get_finished().saved == (3,)
        first.finished = second.finished = Finished(saved=(3, 3))
        assert worker.get_finished().saved == (3, 3), "it may be offered again, while it is being saved, too"

    def test_nobody_wants_saves(self) -> None:
        members = [ScriptedScheduler(32, wants_saves=False), ScriptedScheduler(wants_saves=False)]
        assert not MultiScheduler(members, BLOCK_SIZE).wants_saves

    def test_leases_are_anybodys(self) -> None:
        workers = [ScriptedWorker(), ScriptedWorker()]
        workers[0].finished, workers[1].finished = Finished(released=("a",)), Finished(released=("b",))
        assert MultiWorker(workers, 0).get_finished() == Finished(released=("a", "b"))


def test_everybody_hears_of_steps_and_of_layers_whoever_asks_for_them() -> None:
    workers = [ScriptedWorker(), ScriptedWorker(is_layerwise=True)]
    multi = MultiWorker(workers, 2)
    group = KVGroup("target", "00", torch.zeros(2, 1, 1, BLOCK_SIZE, 2))
    multi.register_kv_caches(KVCaches((group,), BLOCK_SIZE))
    multi.wait_for_layer_load(0)
    multi.save_kv_layer(1)
    multi.wait_for_save()
    begin, end = f"blocks of {BLOCK_SIZE}", "wait for saves"
    assert workers[0].heard == [begin, end]
    assert workers[1].heard == [begin, "wait for layer 0", "save layer 1", end]
    assert multi.is_layerwise
    assert not MultiWorker(workers[:1], 1).is_layerwise


def test_blocks_are_announced_to_whoever_wants_to_know() -> None:
    members = [ScriptedScheduler(), ScriptedScheduler(wants_announcements=True)]
    multi = MultiScheduler(members, BLOCK_SIZE)
    assert multi.wants_announcements
    multi.announce(SAVES)
    assert [member.announced for member in members] == [[], list(SAVES)]
    assert not MultiScheduler(members[:1], BLOCK_SIZE).wants_announcements


def test_one_that_breaks_at_shutdown_keeps_nobody_running() -> None:
    workers = [ScriptedWorker(breaks_at_shutdown=True), ScriptedWorker()]
    with pytest.raises(RuntimeError, match="broken"):
        MultiWorker(workers, 2).shutdown(60)
    assert [worker.heard for worker in workers] == [["shutdown within 60 s"]] * 2


class TestBuilding:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        BUILT.clear()
        yield
        BUILT.clear()

    def build(self, *members: dict[str, Any], **context: Any) -> Connector:
        choices = [{"kv_connector": "tests.fakes.scripted_connector:ScriptedConfig", **member} for member in members]
        settings = MultiConfig.model_validate({"connectors": choices})
        return settings.build(
            ConnectorContext(
                name="multi",
                engine_id="engine",
                block_size=BLOCK_SIZE,
                fingerprint="00",
                notify=lambda: None,
                clock=time.monotonic,
                **context,
            )
        )

    def test_each_may_what_it_was_told(self) -> None:
        self.build({"kv_role": "kv_consumer"}, {"kv_role": "kv_producer"}, {})
        contexts = [context for context, _ in BUILT]
        assert [(context.is_producer, context.is_consumer) for context in contexts] == [
            (False, True),
            (True, False),
            (True, True),
        ]
        assert {context.name for context in contexts} == {"tests.fakes.scripted_connector:ScriptedConfig"}

    def test_but_no_more_than_the_node(self) -> None:
        self.build({"kv_role": "kv_both"}, is_consumer=False)
        assert [(context.is_producer, context.is_consumer) for context, _ in BUILT] == [(True, False)]

    def test_one_that_cannot_be_built_ends_the_others(self) -> None:
        with pytest.raises(ConfigError, match="no such device"):
            self.build({}, {"kv_connector_extra_config": {"can_be_built": False}})
        assert [worker.heard for _, worker in BUILT] == [["shutdown within 0 s"]]


def test_a_load_may_take_as_long_as_with_the_slowest() -> None:
    class Patient(ScriptedScheduler):
        load_timeout_s = 60.0

    assert MultiScheduler([Patient(), ScriptedScheduler()], BLOCK_SIZE).load_timeout_s == 60.0
