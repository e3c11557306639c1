"""The admin socket and `outrider admin`, on a real server with a tiny model."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.errors import InvalidRequestError, error_from_rpc
from protos.outrider.v1 import admin_pb2 as pb
from protos.outrider.v1.admin_pb2_grpc import AdminStub
from server import cli
from server.errors import ConfigError
from server.tokenizer import Tokenizer
from tests.fakes.front import running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine
from tests.integration.real_server import RealServer, real_server
from tests.tiny_model import build_tiny_model

Outrider = Callable[..., Awaitable[int]]
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "policy": "fixed"}
PERIOD = {"method": "tests.fakes.example_proposers:PeriodConfig", "num_speculative_tokens": 3}
PARAMETERS = {
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_min_token_prob": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("admin"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
async def server(folder: Path, path: Path) -> AsyncIterator[RealServer]:
    async with real_server(folder, front={"admin_uds": str(path)}, speculative_config=[SUFFIX, PERIOD]) as running:
        yield running


@pytest.fixture
def outrider(server: RealServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """`outrider admin speculation` with arguments, on the server."""
    monkeypatch.setenv("OUTRIDER_ADMIN_UDS", str(path))

    async def run(*arguments: str) -> int:
        return await asyncio.to_thread(cli.main, ["admin", "speculation", *arguments])

    return run


async def set_speculation(path: Path, request: pb.SetSpeculationRequest) -> pb.Speculation:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        try:
            response: pb.SetSpeculationResponse = await AdminStub(channel).SetSpeculation(request)
            return response.speculation
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


class TestSocket:
    """Only its owner, and only there."""

    @pytest.fixture
    def engine(self) -> ScriptedEngine:
        return ScriptedEngine(tiny_model_info())

    @pytest.mark.parametrize("has_uds", [False, True])
    async def test_the_other_address_does_not_have_it(
        self, tokenizer: Tokenizer, engine: ScriptedEngine, path: Path, has_uds: bool
    ) -> None:
        settings = {"uds": f"{path}.main"} if has_uds else {}
        async with running_front(engine, tokenizer, admin_uds=str(path), **settings) as front:
            async with grpc.aio.insecure_channel(front.target) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await AdminStub(channel).GetSpeculation(pb.GetSpeculationRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                await AdminStub(channel).GetSpeculation(pb.GetSpeculationRequest())

    async def test_it_is_the_owner_s_and_goes(
        self, tokenizer: Tokenizer, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        path = tmp_path / "admin.sock"
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        async with running_front(engine, tokenizer, admin_uds=str(path)):
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            with pytest.raises(ConfigError, match="another server listens there"):
                async with running_front(engine, tokenizer, admin_uds=str(path)):
                    pass
            await set_speculation(path, pb.SetSpeculationRequest())
        assert not path.exists()

    async def test_it_is_no_file_and_not_the_other_socket(
        self, tokenizer: Tokenizer, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        path = tmp_path / "admin.sock"
        path.write_text("precious")
        for settings, words in (({}, "no socket"), ({"uds": str(path)}, "no socket")):
            with pytest.raises(ConfigError, match=words):
                async with running_front(engine, tokenizer, admin_uds=str(path), **settings):
                    pass
        assert path.read_text() == "precious"
        path.unlink()
        with pytest.raises(ConfigError, match="uds and admin_uds must differ"):
            async with running_front(engine, tokenizer, admin_uds=str(path), uds=str(path)):
                pass

    async def test_the_main_socket_says_that_it_is_another_one(
        self, tokenizer: Tokenizer, engine: ScriptedEngine, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with running_front(engine, tokenizer, uds=str(path)):
            assert await asyncio.to_thread(cli.main, ["admin", "speculation", "--admin-uds", str(path)]) == 1
        words = "this socket takes no admin calls; give the one of `outrider serve --admin-uds`"
        assert capsys.readouterr().err.strip() == f"outrider: unix:{path}: {words}"

    async def test_its_calls_are_told_of(self, tokenizer: Tokenizer, engine: ScriptedEngine, path: Path) -> None:
        async with running_front(engine, tokenizer, admin_uds=str(path)) as front:
            await set_speculation(path, pb.SetSpeculationRequest(enabled=False))
            with pytest.raises(InvalidRequestError):
                await set_speculation(path, pb.SetSpeculationRequest(enabled=True))
            done, refused = front.calls("SetSpeculation")
        assert {done.service, refused.service} == {"outrider.v1.Admin"}
        assert (done.status, refused.status) == ("OK", "INVALID_ARGUMENT")
        assert done.attributes["outrider.speculation.enabled"] is False


async def test_what_holds_is_shown(outrider: Outrider, capsys: pytest.CaptureFixture[str]) -> None:
    assert await outrider("--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "enabled": True,
        "num_speculative_tokens": 4,
        "max_num_speculative_tokens": 4,
        "policy": "fixed",
        "num_speculative_tokens_per_batch_size": None,
        "proposers": [
            {"method": "suffix", "parameters": PARAMETERS},
            {"method": PERIOD["method"], "parameters": {}},
        ],
    }
    assert await outrider() == 0
    shown = capsys.readouterr().out.splitlines()
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in shown[4:8]}) == 1, (
        "values stand below each other"
    )
    assert [" ".join(line.split()) for line in shown] == [
        "speculation on",
        "num_speculative_tokens 4 of 4",
        "drafts verified fixed",
        "proposer 0 suffix",
        *(f"{name} {value}" for name, value in PARAMETERS.items()),
        f"proposer 1 {PERIOD['method']}",
    ]
    assert await outrider("--num-speculative-tokens-per-batch-size", "8:0,1:4") == 0
    assert "1:4,8:0" in capsys.readouterr().out
    assert await outrider("--num-speculative-tokens", "3") == 0
    assert "1:3,8:0" in capsys.readouterr().out


async def test_only_what_is_given_changes(
    outrider: Outrider, server: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def changed(*arguments: str) -> dict[str, object]:
        assert await outrider("--json", *arguments) == 0
        return dict(json.loads(capsys.readouterr().out))

    before = await changed()
    assert await changed("--num-speculative-tokens", "2") == before | {"num_speculative_tokens": 2}
    assert (await server.client.model_info()).num_speculative_tokens == 2
    off = await changed("--off")
    assert off == before | {"num_speculative_tokens": 2, "enabled": False}
    info = await server.client.model_info()
    assert (info.speculative_method, info.num_speculative_tokens) == ("none", 0)
    assert await changed("--on", "--num-speculative-tokens", "4") == before
    assert (await server.client.model_info()).speculative_method == f"suffix,{PERIOD['method']}"

    schedule = await changed("--num-speculative-tokens-per-batch-size", "8:2,1:4")
    assert schedule == before | {"policy": None, "num_speculative_tokens_per_batch_size": {"1": 4, "8": 2}}
    assert await changed("--policy", "fixed") == before

    values = {"suffix_decoding_max_spec_factor": 2.5, "suffix_decoding_max_tree_depth": 8}
    settings = [argument for name, value in values.items() for argument in ("--set", f"{name}={value}")]
    for member in ("0", "suffix"):
        after = await changed("--member", member, *settings)
        assert after["proposers"] == [
            {"method": "suffix", "parameters": PARAMETERS | values},
            {"method": PERIOD["method"], "parameters": {}},
        ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--num-speculative-tokens", "5"],
            "--num-speculative-tokens: must be from 1 to 4, which the server was started",
        ),
        (["--num-speculative-tokens-per-batch-size", "0:3"], "at least one number of rows, from 1 on"),
        (["--num-speculative-tokens-per-batch-size", "1:33"], "from 0 to 32 drafts for each, got {1: 33}"),
        (
            ["--num-speculative-tokens-per-batch-size", "1:4,8:5"],
            "--num-speculative-tokens-per-batch-size: must have from 0 to 4 drafts, which is num_speculative_tokens,",
        ),
        (["--set", "suffix_decoding_max_tree_depth=8"], "--member: must say which of suffix, "),
        (["--member", "7", "--set", "x=1"], "--member: must be from 0 to 1, got 7"),
        (["--member", "ngram", "--set", "x=1"], "--member: must be one of suffix, "),
        (
            ["--member", "1", "--set", "period=2"],
            "--set period: cannot change while the server runs; nothing",
        ),
        (
            ["--member", "0", "--set", "suffix_decoding_max_tree_depth=0"],
            "--set suffix_decoding_max_tree_depth: must be an integer >= 1 and <= 1024, got 0",
        ),
        (
            ["--member", "0", "--set", "suffix_decoding_max_spec_factor=fast"],
            "must be a number > 0 and <= 64, got 'fast'",
        ),
    ],
)
async def test_a_refusal_names_field_and_limits_and_changes_nothing(
    outrider: Outrider, capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str], words: str
) -> None:
    await outrider("--json")
    before = capsys.readouterr().out
    assert await outrider("--off", *arguments) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"outrider: unix:{path}: ")
    assert words in error
    await outrider("--json")
    assert capsys.readouterr().out == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "--off"], "not allowed with argument"),
        (["--policy", "never"], "invalid choice: 'never'"),
        (["--policy", "auto", "--num-speculative-tokens-per-batch-size", "1:1"], "not allowed with argument"),
        (["--num-speculative-tokens", "-1"], "must be an integer of at least 1, got '-1'"),
        (["--num-speculative-tokens", str(1 << 40)], "cannot be sent: "),
        (["--num-speculative-tokens-per-batch-size", "1"], "must be ROWS:DRAFTS[,ROWS:DRAFTS...], got '1'"),
        (["--set", "depth"], "argument --set: must be NAME=VALUE, got 'depth'"),
        (["--member", "0"], "--member says whose parameters to --set, and none are given"),
    ],
)
async def test_what_is_no_change(
    outrider: Outrider, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert await outrider(*arguments) == 2
    assert words in capsys.readouterr().err


def test_without_a_socket(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    assert cli.main(["admin"]) == 2
    assert cli.main(["admin", "speculation"]) == 2
    assert cli.main(["admin", "speculation", "--admin-uds", str(path)]) == 1
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert cli.main(["admin", "speculation", "--admin-uds", str(path)]) == 1
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert first == "outrider: admin: say what to see or change: speculation"
    assert second.startswith("outrider: give --admin-uds or OUTRIDER_ADMIN_UDS")
    remedy = f"start one with `outrider serve --admin-uds {path}`"
    assert third == f"outrider: unix:{path}: there is no such socket; {remedy}"
    assert fourth == f"outrider: unix:{path}: cannot connect (Connection refused); is a server running there? {remedy}"


async def test_a_server_without_speculation(folder: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with real_server(folder, front={"admin_uds": str(path)}):
        arguments = ["admin", "speculation", "--admin-uds", str(path)]
        assert await asyncio.to_thread(cli.main, arguments) == 0
        assert await asyncio.to_thread(cli.main, [*arguments, "--off"]) == 0
        assert capsys.readouterr().out == "the server was started without speculation\n" * 2
        assert await asyncio.to_thread(cli.main, [*arguments, "--on"]) == 1
        assert "--on: the server was started without speculation, see --spec" in capsys.readouterr().err


async def test_messages_that_no_command_sends(server: RealServer, path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"policy: must be AUTO \(1\) or FIXED \(2\), got 9"):
        await set_speculation(path, pb.SetSpeculationRequest(policy=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="num_speculative_tokens: must be from 1 to 4"):
        await set_speculation(path, pb.SetSpeculationRequest(num_speculative_tokens=0))
    with pytest.raises(InvalidRequestError, match="at least one number of rows"):
        await set_speculation(path, pb.SetSpeculationRequest(num_speculative_tokens_per_batch_size=pb.DraftSchedule()))
    deep = pb.ProposerChange(index=0, parameters={"suffix_decoding_max_tree_depth": "[" * 100_000})
    with pytest.raises(InvalidRequestError, match="must be an integer"):
        await set_speculation(path, pb.SetSpeculationRequest(proposers=[deep]))
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _raw(channel)(b"\x0a\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_many_at_once_come_one_after_the_other(server: RealServer, path: Path) -> None:
    requests = [pb.SetSpeculationRequest(num_speculative_tokens=1 + i % 4) for i in range(8)]
    requests += [pb.SetSpeculationRequest(enabled=i % 2 == 0) for i in range(8)]
    states = await asyncio.gather(*(set_speculation(path, request) for request in requests))
    for request, state in zip(requests, states, strict=True):
        if request.HasField("enabled"):
            assert state.enabled == request.enabled
        else:
            assert state.num_speculative_tokens == request.num_speculative_tokens


def _raw(channel: grpc.aio.Channel) -> Any:
    """SetSpeculation from bytes to bytes."""
    return channel.unary_unary("/outrider.v1.Admin/SetSpeculation")
