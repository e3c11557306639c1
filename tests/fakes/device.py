"""The device that the worker's tests run on."""

import os

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
"""As `--device` takes it; read before settings from outside are cleared."""
PREFILL_DEVICE = os.environ.get("OUTRIDER_TEST_PREFILL_DEVICE", DEVICE)
"""That of server processes that hand on, where it is another one."""


def few_batch_sizes(max_num_seqs: int) -> list[int]:
    """What engines capture on CUDA: a bucket that fills up, some that are padded; all would take longer than tests."""
    return sorted({*(size for size in (1, 4, 16) if size < max_num_seqs), max_num_seqs})
