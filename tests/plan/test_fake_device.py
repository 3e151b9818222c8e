"""The real scorer and trainer at full width on a device without numbers: where tensors are, and what they take."""

import pytest

from fake_runs import Measured, Setting, measure
from lightning_weave.plan.memory import lora_parameters
from plan_table import BEGIN, END, LENGTHS, PAGE, planned, recorded, settings, shape_of, table

MEASURED = recorded()
LOOKED_AT = (  # again, in every run of the slow tests
    Setting("reference", "Qwen/Qwen3-30B-A3B", "bfloat16", layers=4),
    Setting("train", "Qwen/Qwen3-1.7B", "bfloat16", 8, checkpointing=True, layers=4),
    Setting("train", "Qwen/Qwen3-4B", "float32", layers=4),
)


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: str(one.setting))
def test_plan_predicts_what_was_measured(one: Measured) -> None:
    assert planned(one.setting, 1).loading == pytest.approx(one.loading, rel=0.1)
    for tokens, peak in one.peaks.items():
        assert planned(one.setting, tokens).total == pytest.approx(peak, rel=0.1), tokens


def test_what_was_measured_is_on_the_page() -> None:
    known = {one.setting for one in MEASURED}
    assert [one.setting for one in MEASURED] == [setting for setting in settings() if setting in known]
    assert all(set(one.peaks) == set(LENGTHS) for one in MEASURED)
    for name in ("stage", "model", "dtype", "world", "checkpointing"):  # of each, everything at least once
        assert {getattr(one, name) for one in known} == {getattr(one, name) for one in settings()}
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == table(MEASURED)


TRAINED = [one for one in MEASURED if one.setting.stage == "train" and one.setting.lora is None]
of_training = pytest.mark.parametrize("one", TRAINED, ids=lambda one: str(one.setting))


@of_training
def test_loading_takes_no_more_than_an_update(one: Measured) -> None:
    assert one.loading <= min(one.peaks.values())


@of_training
def test_nothing_whole_is_left_after_sharding(one: Measured) -> None:
    shape = shape_of(one.setting)
    world = one.setting.world
    assert one.ready == pytest.approx(4 * shape.parameters / world, rel=0.01)  # float32 masters, and no more
    largest = max(shape.width * shape.vocabulary, *(layer.parameters for layer in shape.layers))
    assert one.largest <= 4 * largest / world * 1.01


@pytest.mark.slow
def test_one_float32_gradient_of_the_head_is_held_however_many_chunks_there_are() -> None:
    """A chunk has 883 positions. A second buffer for a chunk's product would be another 1.6 GB of a 4B student."""
    (one,) = measure([Setting("head", "Qwen/Qwen3-4B", "bfloat16")], [800, 1600])
    matrix, width = one.ready, 2560
    logits, positions = 1.5 * 512 * 2**20, 1600 * (12 * width + 1000)  # a chunk, also in 16 bits; hidden states
    assert one.peaks[1600] <= matrix + 3 * matrix + logits + positions  # the sum, and it once more in 16 bits
    assert one.peaks[1600] - one.peaks[800] <= 0.1 * matrix + logits / 8 + positions


@pytest.mark.slow
def test_the_device_measures_the_same_again() -> None:
    known = {one.setting: one for one in MEASURED}
    for one in measure(LOOKED_AT, LENGTHS[:2]):
        expected = known[one.setting]
        assert one.ready == expected.ready
        assert one.peaks == {tokens: pytest.approx(expected.peaks[tokens], rel=0.01) for tokens in LENGTHS[:2]}


@pytest.mark.slow
def test_an_8b_student_with_adapters_fits_one_card_of_24_gb_at_8k_tokens() -> None:
    """With its base in bfloat16 and checkpointing, all layers; `plan` says the same."""
    (one,) = measure([Setting("train", "Qwen/Qwen3-8B-Base", "bfloat16", checkpointing=True, lora=16)], [8192])
    assert one.peaks[8192] < 0.95 * 24e9
    shape = shape_of(one.setting)
    assert one.ready == pytest.approx(2 * shape.parameters + 4 * lora_parameters(shape, 16), rel=0.01)
    assert planned(one.setting, 8192).total == pytest.approx(one.peaks[8192], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["allenai/Olmo-3-7B-Think", "google/gemma-3-4b-it"])
def test_layers_with_a_window_keep_no_square_of_a_long_row(model: str) -> None:
    """A mask of T x T would be 1 GB at 32k tokens, and three times that as the kernel reads it."""
    (one,) = measure([Setting("score", model, "bfloat16", layers=6)], [32768])
    assert one.peaks[32768] - one.ready < 4.5e9
