"""Scheduler and runner on a real model, stepped in one thread: every run of it is the same."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from proposers.base import HostProposer, Proposer, TargetModel, TargetView
from proposers.ngram import NgramProposer
from server.config import ModelConfig, SchedulerConfig
from server.kernels.rejection import Method
from server.kv.block_pool import BlockPool
from server.model.head import LMHead
from server.model.loader import load_model
from server.model.skinny_linears import fuse_linears
from server.model.traced_layers import trace_layers
from server.plan import StepPlan
from server.request import Request
from server.scheduler.outputs import SequenceOutput
from server.scheduler.scheduler import Scheduler
from server.worker.kv_tensors import KVGeometry, allocate_kv
from server.worker.rejection import Acceptance
from server.worker.runner import Runner
from tests.fakes.core import model_info


class Stepping:
    """Plans, launches and settles as the engine's step thread does."""

    def __init__(
        self,
        model: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        k: int = 0,
        depth: int = 0,
        capture: Sequence[int] = (),
        max_tokens: int = 128,
        block_size: int = 16,
        proposer: Proposer | HostProposer | None = None,
        method: Method = Method.STANDARD,
        load_format: Any = "auto",
        is_compiled: bool = False,
        build: Callable[[TargetView], Sequence[Proposer | HostProposer]] | None = None,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = False,
        **scheduling: Any,
    ) -> None:
        """Args: k: drafts by n-gram lookup unless there is a `proposer`, or what `build` makes for the target.
        capture: batch sizes to capture. num_blocks: usable ones; None is enough for all seats.
        is_compiled: with fused linear layers and traced decoder layers, as on CUDA.
        """
        loaded = load_model(ModelConfig(model=str(model), load_format=load_format), device, dtype)
        geometry = KVGeometry(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, block_size, dtype)
        config = SchedulerConfig(**{"max_num_batched_tokens": 2048, **scheduling})
        num_blocks = 1 + (num_blocks or config.max_num_seqs * (-(-max_tokens // block_size)))
        if proposer is None and build is None and k:
            proposer = NgramProposer(k, 1, 3, takes_last=False, device=device)
        self.is_compiled = False
        if is_compiled:
            fuse_linears(loaded.model.base_model)
            self.is_compiled = trace_layers(loaded.model, loaded.num_layers, allocate_kv(geometry, 2, device))
        self.depth = depth
        self.head = LMHead.of(loaded.model, loaded.config)
        self.model = loaded.model
        self.target = TargetModel(
            model=loaded.model,
            head=self.head,
            config=loaded.config,
            tokenizer=loaded.tokenizer,
            folder=loaded.folder,
            dtype=dtype,
            digest=loaded.weights_digest,
            block_size=block_size,
            max_num_tokens=max_tokens,
        )
        proposers: list[Proposer | HostProposer] = [] if proposer is None else [proposer]
        if build is not None:
            proposers += build(TargetView(loaded.vocab_size, device, config.max_num_seqs, self.target))
        self.runner = Runner(
            loaded.model,
            self.head,
            allocate_kv(geometry, num_blocks, device),
            num_slots=config.max_num_seqs,
            max_tokens=max_tokens,
            proposers=proposers,
            acceptance=Acceptance(method),
        )
        info = replace(
            model_info(block_size=block_size, num_blocks=num_blocks - 1, max_drafts=k),
            drafts_on_host=isinstance(proposer, HostProposer),
        )
        self.scheduler = Scheduler(
            config,
            info,
            BlockPool(num_blocks),
            enable_prefix_caching=enable_prefix_caching,
            clock=time.monotonic,
            num_lookahead_tokens=k if any(getattr(each, "writes_kv", False) for each in proposers) else 0,
        )
        self.outputs: list[SequenceOutput] = []
        self._in_flight: deque[Any] = deque()
        if capture:
            self.runner.capture(capture)

    def step(self) -> StepPlan | None:
        """Launch the next step and settle what is then too many; everything if there is none to launch."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan))
        while len(self._in_flight) > (0 if plan is None else self.depth):
            self.scheduler.update(self.runner.settle(self._in_flight.popleft()))
        self.outputs += self.scheduler.take_outputs()
        return plan

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run requests to their ends; at once, but as many as there are seats. Returns: their tokens, in order."""
        for request in requests:
            self.scheduler.add(request)
        self.outputs.clear()
        while self.scheduler.has_requests:
            self.step()
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for output in self.outputs:
            assert output.failure is None, output.error
            tokens[output.request_id] += output.token_ids
        return list(tokens.values())
