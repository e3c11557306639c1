"""Compiles for a Hopper GPU what the launchers would launch, on a machine without one; run as a program.

The interpreter accepts more Python than the compiler does. `TRITON_INTERPRET` must not be set.
"""

from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from server.kernels.gumbel_argmax import gumbel_argmax
from server.kernels.invariant_linear import invariant_linear
from server.kernels.invariant_mean import invariant_mean
from server.kernels.kv_write import write_kv
from server.kernels.ngram_lookup import ngram_lookup
from server.kernels.noise_kernel import uniforms
from server.kernels.paged_attention import paged_attention
from server.kernels.penalties import penalise
from server.kernels.rejection import Method, verify_drafts
from server.kernels.skinny_linear import skinny_gated_linear, skinny_linear, tile_counts
from server.kernels.token_inputs import look_up_tokens
from server.kernels.token_mask import mask_tokens
from server.kernels.truncate import truncate
from tests.fakes.drafts import draft_inputs
from tests.fakes.kernel_inputs import attention_inputs

HOPPER = GPUTarget("cuda", 90, 32)


def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands in for a launch."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        n: options.pop(n) for n in kernel.arg_names if n in options
    }
    constants = {kernel.params[i].name: values[kernel.params[i].name] for i in kernel.constexprs}
    constants |= {name: None for name, value in values.items() if value is None}
    types = {name: "constexpr" if name in constants else mangle_type(value) for name, value in values.items()}
    compiled = triton.compile(ASTSource(kernel, types, constants), target=HOPPER, options=options)
    print(kernel.__name__, len(compiled.asm["cubin"]), flush=True)


def launch_all() -> None:
    """Each kernel at least once."""
    variants: list[tuple[int, dict[str, Any]]] = [
        (2, {"sliding_window": 9, "softcap": 2.0, "sinks": torch.zeros(4)}),
        (40, {}),
        (2, {"starts": torch.zeros(3, dtype=torch.int64)}),
        (2, {"arrivals": torch.zeros(1, 4, dtype=torch.int32)}),
        (2, {"split_span": 256}),
        (40, {"split_span": 256, "sinks": torch.zeros(4)}),
    ]
    for num_query, options in variants:
        inputs = attention_inputs(
            [(500, num_query)], heads=4, kv_heads=2, head_dim=64, block_size=16, device="cpu", dtype=torch.bfloat16
        )
        bounds: dict[str, Any] = {"max_num_query": num_query, "context_bound": 500, "scaling": 1.0}
        out = torch.empty_like(inputs.query)
        paged_attention(inputs.query, inputs.layer, out, **inputs.rows(), **bounds, **options)
    key = torch.zeros(2, 2, 64)
    rows = torch.zeros(2, dtype=torch.int64)
    narrow = inputs.layer.to(torch.float8_e4m3fn)
    paged_attention(inputs.query, narrow, out, **inputs.rows(), **bounds)
    for layer in (inputs.layer, narrow):
        write_kv(layer, key, key, rows, rows)
    gumbel_argmax(torch.zeros(2, 1, 5000), rows, rows, torch.ones(2), 1)
    gumbel_argmax(torch.zeros(2, 1, 5000), rows, rows, torch.ones(2), 1, torch.arange(5000))
    uniforms(rows, rows, 4, 1)
    ngram_lookup(torch.zeros(4, 99, dtype=torch.int32), rows, rows, rows.int(), 99, torch.ones(3, dtype=torch.int32), 5)
    look_up_tokens(rows, rows, rows, rows, rows, torch.zeros(4, 99).int(), torch.zeros(4, 7).int(), 16)
    ids, ones = torch.zeros(2, 99, dtype=torch.int32), torch.ones(2)
    penalise(torch.zeros(2, 3, 5000), ids, rows, rows, rows, ones, ones, ones, torch.zeros(2, 5000, dtype=torch.int32))
    weight = torch.zeros(64, 1024, dtype=torch.bfloat16)
    for num_tokens in (2, 300):
        invariant_linear(weight[:1].expand(num_tokens, -1), weight, weight[0, :64])
    invariant_mean(key)
    # Few programs run at once on the CPU: small weights are cut as large ones are on a GPU.
    for num_tokens in (8, 16, 32, 64):
        x, bias = weight[:1].expand(num_tokens, -1).contiguous(), weight[0, :64].contiguous()
        for has_bias, num_in in ((True, 1024), (False, 1024), (False, 1000)):
            part = weight[:, :num_in].contiguous()
            residual = None if has_bias else x[:, :64]
            skinny_linear(x[:, :num_in].contiguous(), part, bias if has_bias else None, tile_counts(part), residual)
    for num_tokens, num_rows in ((2, 64), (16, 64), (16, 256), (64, 256), (65, 256)):
        skinny_gated_linear(weight[:1].expand(num_tokens, -1).contiguous(), weight.repeat(4, 1)[:num_rows])
    for method, drafter in ((Method.STANDARD, "full"), (Method.BLOCK, "reduced")):
        verify_drafts(**draft_inputs(2, 3, 5000, drafter, "cpu", torch.bfloat16), method=method)
    truncate(torch.zeros(2, 3, 9000), rows, ones, ones, rows, ones)
    for counts in (None, rows.int()):
        mask_tokens(torch.zeros(2, 3, 5000), rows, torch.zeros(2, 3, 157, dtype=torch.int32), counts)


if __name__ == "__main__":
    with patch.object(JITFunction, "run", compile_only):
        launch_all()
