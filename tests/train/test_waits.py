"""How often the host waits for a device: counted on one that has no numbers, with models of full width."""

import pytest

from fake_attention import attention_kernels
from fake_runs import Setting
from fake_waits import count_waits
from lightning_weave.models.sampler import SYNC_EVERY

pytestmark = pytest.mark.slow

DENSE = "Qwen/Qwen3-1.7B"
EXPERTS = "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    "setting",
    [
        Setting("train", DENSE, "float32", checkpointing=True, layers=2),
        Setting("train", DENSE, "bfloat16", layers=2),
        Setting("train", EXPERTS, "bfloat16", world=8, layers=2),
        Setting("train", DENSE, "bfloat16", layers=2, lora=16),
        Setting("train", DENSE, "bfloat16", world=8, layers=2, lora=16),
    ],
    ids=str,
)
def test_an_update_waits_for_the_device_twice_however_many_micro_batches_it_has(setting: Setting) -> None:
    """Once for what is watched and once for the norm of the gradient. Rows are packed, and come from pinned memory."""
    for waits in count_waits(setting, [1, 3]):
        assert waits == ["copy to the host", "number"]


def test_sampling_looks_at_the_device_once_in_sixteen_steps() -> None:
    short, long = count_waits(Setting("sample", DENSE, "bfloat16", layers=2), [SYNC_EVERY, 3 * SYNC_EVERY])
    assert sorted(set(short)) == ["copy from pageable memory", "copy to the host"]  # at its beginning, and its end
    assert len(long) == len(short) + 2


def test_a_batch_that_is_refilled_is_looked_at_no_more_often() -> None:
    """Two batches, one after the other; the responses of each are fetched at once."""
    asked = [SYNC_EVERY, 3 * SYNC_EVERY]
    short, long = count_waits(Setting("refill", DENSE, "bfloat16", layers=2), asked)
    assert short.count("copy to the host") == 2 * (1 + 1)
    assert long.count("copy to the host") == 2 * (3 + 1)
    assert set(short) == {"copy to the host", "copy from pageable memory"}  # as rows join and leave
    assert short.count("copy from pageable memory") == long.count("copy from pageable memory")


def test_scoring_waits_for_results_only() -> None:
    one, three = count_waits(Setting("score", DENSE, "bfloat16", layers=2), [1, 3])
    assert len(three) == 3 * len(one)
    assert set(one) == {"copy from pageable memory", "copy to the host"}


@pytest.mark.parametrize("model", [DENSE, "google/gemma-3-4b-it"])
def test_attention_is_one_kernel_per_layer_whatever_the_lengths(model: str) -> None:
    """No backend is asked for a plan per length; 16 bits, grouped queries, and sliding windows with Gemma."""
    forward, backward = (f"torch_attn._varlen_attn{part}.default" for part in ("", "_backward"))
    for kernels in attention_kernels(Setting("train", model, "bfloat16", layers=2), [[96], [64, 1100, 7], [5] * 9]):
        assert kernels == [forward] * 2 + [backward] * 2


def test_attention_in_float32_runs_row_by_row_without_a_plan_per_length() -> None:
    (kernels,) = attention_kernels(Setting("train", DENSE, "float32", layers=2), [[64, 80, 7]])
    assert {kernel.split(".")[1].removesuffix("_backward") for kernel in kernels} == {
        "_scaled_dot_product_efficient_attention"
    }
    assert len(kernels) == 2 * 2 * 3
