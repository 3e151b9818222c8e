"""The sampler against a slow one that runs the whole context again for every token, and against its own promises."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from small_models import ARCHITECTURES, PADDED, VOCABULARY, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.models.sampler import SYNC_EVERY, HFSampler, RefillingSampler, draw
from lightning_weave.types import Request, Response, SamplingSettings

pytestmark = pytest.mark.slow

STOP = frozenset({2, 3, 4, 5})
PLAIN = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=16, seed=42)


def some_requests(lengths: tuple[int, ...] = (1, 3, 3, 7, 12), responses: int = 2) -> list[Request]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(6, VOCABULARY, size=length).tolist() for length in lengths]
    return [Request(ids, prompt, response) for prompt, ids in enumerate(prompts) for response in range(responses)]


def slow_sample(model: Any, request: Request, settings: SamplingSettings, stop: frozenset[int]) -> Response:
    """Sample one row without cache or batch, in plain loops."""
    key = np.array([settings.seed, request.prompt * 2**32 + request.response], dtype=np.uint64)
    uniforms = np.random.Generator(np.random.Philox(key=key)).random(settings.max_tokens)
    ids: list[int] = []
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + ids])).logits[0, -1, :VOCABULARY].double().numpy()
        weights = np.exp((logits - logits.max()) / settings.temperature)
        probabilities = weights / weights.sum()
        kept, total = [], 0.0
        for token in sorted(range(VOCABULARY), key=lambda token: (-probabilities[token], token)):
            if total >= settings.top_p:
                break
            kept.append(token)
            total += probabilities[token]
        reached = 0.0
        for token in sorted(kept):
            reached += probabilities[token] / total
            if reached > uniform:
                break
        ids.append(token)
        if token in stop:
            return Response(ids, "stop")
    return Response(ids, "length")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_sampling_is_the_slow_one(architecture: str) -> None:
    model, requests = small_model(architecture), some_requests()
    drawn = HFSampler(model, STOP, VOCABULARY).sample(requests, PLAIN)
    assert drawn == [slow_sample(model, request, PLAIN, STOP) for request in requests]
    assert {response.finish for response in drawn} == {"stop", "length"}  # both ends are exercised


@pytest.mark.parametrize("kind", [HFSampler, RefillingSampler])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_neither_batch_size_nor_order_changes_a_trajectory(architecture: str, kind: type[HFSampler]) -> None:
    model, requests = small_model(architecture), some_requests()
    drawn = HFSampler(model, STOP, VOCABULARY, batch_size=64).sample(requests, PLAIN)
    assert kind(model, STOP, VOCABULARY, batch_size=4).sample(requests, PLAIN) == drawn
    backwards = kind(model, STOP, VOCABULARY, batch_size=5).sample(requests[::-1], PLAIN)
    assert backwards[::-1] == drawn


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_batch_that_is_refilled_is_full_while_anyone_waits(size: int) -> None:
    model, requests = small_model("qwen3"), some_requests(responses=6)
    sizes: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"].get_seq_length():
            sizes.append(len(kwargs["input_ids"]))

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    sampler = RefillingSampler(model, STOP, VOCABULARY, batch_size=size)
    drawn = sampler.sample(requests, PLAIN)
    assert drawn == [slow_sample(small_model("qwen3"), request, PLAIN, STOP) for request in requests]
    assert max(sizes) == size
    first_short = next((place for place, rows in enumerate(sizes) if rows < size), len(sizes))
    # Once a place stays empty nobody waits, and what is in flight ends within one response.
    assert len(sizes) - first_short <= PLAIN.max_tokens


def test_a_refilled_batch_that_runs_out_of_memory_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    model, requests = small_model("llama"), some_requests()
    expected = HFSampler(model, STOP, VOCABULARY).sample(requests, PLAIN)

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"].get_seq_length() > 8 and len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    sampler = RefillingSampler(model, STOP, VOCABULARY, batch_size=4)
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(requests, PLAIN) == expected
    assert sampler.batch_size == 2


def test_broken_logits_in_a_refilled_batch_name_the_prompt() -> None:
    model = small_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = float("nan")
    requests = [Request([3, 4, 6, 7], 0, 0), Request([3, 4, 7], 1, 0), Request([3, 33], 17, 2)]
    with pytest.raises(WeaveError, match="prompt 17, response 2"):
        RefillingSampler(model, STOP, VOCABULARY, batch_size=2).sample(requests, PLAIN)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.6), (1.3, 0.9)])
def test_temperature_and_nucleus_are_the_slow_ones(temperature: float, top_p: float) -> None:
    model, requests = small_model("llama"), some_requests()
    settings = SamplingSettings(temperature, top_p, max_tokens=16, seed=3)
    drawn = HFSampler(model, STOP, VOCABULARY).sample(requests, settings)
    assert drawn == [slow_sample(model, request, settings, STOP) for request in requests]


def test_temperature_zero_takes_the_likeliest() -> None:
    model, requests = small_model("llama"), some_requests(responses=1)
    for request, response in zip(
        requests, HFSampler(model, STOP, VOCABULARY).sample(requests, SamplingSettings(0, 1, 9, 0)), strict=True
    ):
        context = list(request.prompt_ids)
        for token in response.ids:
            assert token == int(model(torch.tensor([context])).logits[0, -1, :VOCABULARY].argmax())
            context.append(token)


def test_seed_prompt_and_response_each_change_the_draw() -> None:
    model = small_model("llama")
    ids = [9, 8, 7]
    requests = [Request(ids, 0, 0), Request(ids, 0, 1), Request(ids, 1, 0)]
    sampler = HFSampler(model, frozenset(), VOCABULARY)
    drawn = sampler.sample(requests, PLAIN) + sampler.sample(requests, SamplingSettings(1.0, 1.0, 16, 43))
    assert len({tuple(response.ids) for response in drawn}) == 6


def test_only_stop_ids_come_from_the_generation_config() -> None:
    model = small_model("qwen3")
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.1, repetition_penalty=5.0)
    prompt = [11, 12, 13]
    requests = [Request(prompt, 0, response) for response in range(6000)]
    drawn = HFSampler(model, STOP, VOCABULARY, batch_size=6000).sample(requests, SamplingSettings(1.0, 1.0, 1, 1))
    expected = model(torch.tensor([prompt])).logits[0, -1, :VOCABULARY].double().softmax(-1).numpy() * len(requests)
    seen = np.bincount([response.ids[0] for response in drawn], minlength=VOCABULARY)
    common = expected >= 5
    assert common.sum() >= 10
    pooled_seen = [*seen[common], seen[~common].sum()]
    pooled_expected = [*expected[common], expected[~common].sum()]
    assert chisquare(pooled_seen, pooled_expected).pvalue > 0.001


def test_every_stop_id_ends_a_response_and_is_kept() -> None:
    model, requests = small_model("llama"), some_requests(responses=8)
    stop = frozenset(range(2, 20))
    drawn = HFSampler(model, stop, VOCABULARY).sample(requests, PLAIN)
    assert len({response.ids[-1] for response in drawn if response.finish == "stop"} & stop) > 5
    for response in drawn:
        assert not stop & set(response.ids[:-1])
        assert (response.ids[-1] in stop) == (response.finish == "stop")
        assert response.finish == "stop" or len(response.ids) == PLAIN.max_tokens


def test_rows_that_belong_to_no_token_are_never_drawn() -> None:
    model, requests = small_model("llama"), some_requests()
    with torch.no_grad():  # the padding would win every time
        model.lm_head.weight[VOCABULARY:] = 0
        model.lm_head.weight[VOCABULARY:].add_(100 * model.lm_head.weight[:6])
    whole = HFSampler(model, frozenset(), PADDED).sample(requests, PLAIN)
    assert max(token for response in whole for token in response.ids) >= VOCABULARY
    drawn = HFSampler(model, frozenset(), VOCABULARY).sample(requests, PLAIN)
    assert max(token for response in drawn for token in response.ids) < VOCABULARY
    assert drawn == [slow_sample(model, request, PLAIN, frozenset()) for request in requests]


def test_a_response_ends_at_the_context_limit() -> None:
    model = small_model("llama", max_position_embeddings=16)
    sampler = HFSampler(model, frozenset(), VOCABULARY)
    drawn = sampler.sample(some_requests((1, 12, 15)), PLAIN)
    assert [len(response.ids) for response in drawn] == [15] * 2 + [4] * 2 + [1] * 2
    refilled = RefillingSampler(model, frozenset(), VOCABULARY, batch_size=4)
    assert refilled.sample(some_requests((1, 12, 15)), PLAIN) == drawn
    assert {response.finish for response in drawn} == {"length"}
    with pytest.raises(InputError, match="prompt 0 has 16 tokens"):
        sampler.sample(some_requests((16,)), PLAIN)
    with pytest.raises(InputError, match="empty"):
        sampler.sample([Request([], 0, 0)], PLAIN)


def test_broken_logits_name_the_prompt() -> None:
    model = small_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = float("nan")
    requests = [Request([3, 4], 0, 0), Request([3, 33], 17, 2)]
    with pytest.raises(WeaveError, match="prompt 17, response 2"):
        HFSampler(model, STOP, VOCABULARY).sample(requests, PLAIN)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_looking_less_often_changes_no_trajectory(architecture: str, size: int) -> None:
    model, requests = small_model(architecture), some_requests()
    sampler = RefillingSampler(model, STOP, VOCABULARY, size)
    expected = HFSampler(model, STOP, VOCABULARY).sample(requests, PLAIN)
    for steps in (3, 16):
        sampler.sync_every = steps
        assert sampler.sample(requests, PLAIN) == expected


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that come to Python, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
        self.count += by_mask or func.name().partition(".")[0] in waits
        return func(*args, **(kwargs or {}))


def host_waits(model: Any, tokens: int, size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the waits for rows that never stop; lists are waits that the dispatcher does not see."""
    lists: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (lists.append(tensor), tolist(tensor))[1])
    sampler = RefillingSampler(model, frozenset(), VOCABULARY, size)
    sampler.sync_every = SYNC_EVERY
    requests = [Request([9, 8, 7], 0, 0), Request([9, 8], 1, 0), Request([9], 2, 0)]
    with HostWaits() as waits:
        sampler.sample(requests, SamplingSettings(1.0, 0.9, tokens, 1))
    monkeypatch.undo()
    return waits.count + len(lists)


@pytest.mark.parametrize(("size", "batches"), [(3, 1), (2, 2)])
def test_the_host_waits_once_in_sixteen_steps(size: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen3", max_position_embeddings=128)
    short = host_waits(model, 16, size, monkeypatch)
    assert host_waits(model, 16 + 4 * SYNC_EVERY, size, monkeypatch) == short + 4 * batches


def test_running_out_of_memory_halves_the_batch_and_changes_no_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    model, requests = small_model("llama"), some_requests()
    expected = HFSampler(model, STOP, VOCABULARY).sample(requests, PLAIN)

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"].get_seq_length() > 2 and len(kwargs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    sampler = HFSampler(model, STOP, VOCABULARY)
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(requests, PLAIN) == expected
    assert sampler.batch_size == 3
    assert "the batch size is now 3" in caplog.text


def test_a_draw_at_the_edges_never_takes_a_token_without_weight() -> None:
    logits = torch.tensor([[-1e30, 0.0, -1e30, 0.0, -1e30]] * 3)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniform, 1.0, 1.0).tolist() == [1, 3, 3]
    assert draw(logits, uniform, 1.0, 0.5).tolist() == [1, 1, 1]  # equals: the lower id makes up the nucleus
