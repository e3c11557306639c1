"""What the interpreter runs must also compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.fakes.kernel_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {
        "attention_kernel",
        "merge_kernel",
        "_write_kernel",
        "_part_kernel",
        "_pick_kernel",
        "_match_kernel",
        "_copy_kernel",
        "_count_kernel",
        "_penalise_kernel",
        "_linear_kernel",
        "_look_up_kernel",
        "_mask_kernel",
        "_add_spans_kernel",
        "_skinny_kernel",
        "_gate_kernel",
        "_mean_kernel",
        "_part_softmax_kernel",
        "_uniform_kernel",
        "_accept_kernel",
        "_residual_mass_kernel",
        "_weigh_kernel",
        "_survey_kernel",
        "_search_kernel",
        "_apply_kernel",
    }
