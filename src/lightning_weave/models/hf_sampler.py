"""Sample with a Hugging Face model: batched, with its cache, and with random numbers that belong to the row.

Nothing is ever padded, so that recurrent layers see only real tokens. A batch holds prompts of similar length: all rows
start together with as many tokens as the shortest prompt has, and a longer prompt keeps feeding its own tokens, one
per step, where the others already sample.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_weave.devices import has_float64
from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.models.load import context_limit
from lightning_weave.models.memory import free_memory, is_out_of_memory
from lightning_weave.types import Request, Response, SamplingSettings

LOOK_EVERY = 16  # steps: on a device with a queue of its own, every look empties the queue
log = logging.getLogger(__name__)


# From requests, what each has answered so far, and the model's logits to the logits to draw from.
Tilt = Callable[[list[Request], list[list[int]], Tensor], Tensor]


class HFSampler:
    """Sample from a causal language model on its own device."""

    def __init__(
        self,
        model: Any,
        stop: frozenset[int],
        vocabulary: int,
        batch_size: int = 64,
        on_tokens: Callable[[int], None] | None = None,
        tilt: Tilt | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.batch_size = batch_size
        self.on_tokens = on_tokens
        self.tilt = tilt
        # Rows that have ended are dropped as soon as it is known. To know it costs nothing on a CPU.
        self.look_every = 1 if model.device.type == "cpu" else LOOK_EVERY
        self.limit = context_limit(model.config)
        self.stop = stop
        is_stop_V = torch.zeros(vocabulary, dtype=torch.bool)
        is_stop_V[[token for token in sorted(stop) if token < vocabulary]] = True
        self.is_stop_V = is_stop_V.to(model.device)

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request; which rows share a batch changes nothing but rounding."""
        responses: dict[int, Response] = {}
        pending = _batches(requests, self.batch_size, spread=settings.max_tokens // 4)
        while pending:
            drawn = self._try_batch([requests[row] for row in pending[0]], settings)
            if drawn is None:
                pending = self._shrink(pending)
                continue
            responses.update(zip(pending[0], drawn, strict=True))
            pending = pending[1:]
        return [responses[row] for row in range(len(requests))]

    def close(self) -> None:
        """Let go of the model, and give its memory back."""
        self.model = None
        free_memory()

    def _try_batch(self, batch: list[Request], settings: SamplingSettings) -> list[Response] | None:
        """Sample one batch; None when it does not fit in memory."""
        try:
            return self._sample_batch(batch, settings)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _shrink(self, pending: list[list[int]]) -> list[list[int]]:
        """Halve the batch size, and what is still to do along with it."""
        free_memory()
        failed = len(pending[0])
        if failed == 1:
            raise WeaveError("not even one row fits in memory. Use a smaller dtype, a larger device or fewer tokens")
        self.batch_size = (failed + 1) // 2
        log.warning("out of memory with %d rows: the batch size is now %d", failed, self.batch_size)
        return [batch[at : at + self.batch_size] for batch in pending for at in range(0, len(batch), self.batch_size)]

    @torch.inference_mode()
    def _sample_batch(self, batch: list[Request], settings: SamplingSettings) -> list[Response]:
        device = self.model.device
        room = [self.room(request, settings) for request in batch]
        starts = [len(request.prompt_ids) for request in batch]
        longest = max(start + most for start, most in zip(starts, room, strict=True))
        start_B = torch.tensor(starts, device=device)
        end_B = start_B + torch.tensor(room, device=device)  # moves forward where a row stops
        uniform_BS = uniforms(batch, settings.seed, max(room), device)
        tokens_BT = _prompt_tokens(batch, longest).to(device)
        first = min(starts)
        cache, logits_NV = self._prefill(tokens_BT[:, :first])
        rows_N = torch.arange(len(batch), device=device)  # those still in the batch
        broken_N = torch.zeros_like(rows_N, dtype=torch.bool)
        drawn = torch.zeros((), dtype=torch.long, device=device)  # since the last look
        for position in range(first, longest):
            step_N = position - start_B[rows_N]  # negative while the prompt is not over
            uniform_N = uniform_BS[rows_N, step_N.clamp(0, max(room) - 1)]
            logits_NV = self._tilted(logits_NV, batch, rows_N, step_N, tokens_BT[:, :position])
            open_N = end_B[rows_N] > position
            broken_N = broken_N | (open_N & ~logits_NV.max(dim=-1).values.isfinite())
            sampled_N = draw(logits_NV, uniform_N, settings.temperature, settings.top_p)
            token_N = torch.where(step_N < 0, tokens_BT[rows_N, position], sampled_N)
            tokens_BT[rows_N, position] = token_N
            stopped_N = self.is_stop_V[token_N] & (step_N >= 0)
            last_N = torch.where(stopped_N, position + 1, end_B[rows_N])
            drawn = drawn + ((step_N >= 0) & open_N).sum()
            end_B[rows_N] = torch.minimum(end_B[rows_N], last_N)
            if (position + 1 - first) % self.look_every == 0 or position + 1 == longest:
                places = self._look(end_B[rows_N] > position + 1, broken_N, drawn, batch, rows_N)
                drawn = torch.zeros_like(drawn)
                if not places:
                    break
                if 8 * (len(rows_N) - len(places)) >= len(rows_N):  # dropping copies the cache: worth it for an eighth
                    places_N = torch.tensor(places, device=device)
                    rows_N = rows_N[places_N]
                    token_N = token_N[places_N]
                    broken_N = broken_N[places_N]
                    cache.reorder_cache(places_N)
            logits_NV = self.forward(token_N[:, None], cache)
        return self.responses(tokens_BT.tolist(), starts, end_B.tolist())

    def _look(
        self, going_N: Tensor, broken_N: Tensor, drawn: Tensor, batch: list[Request], rows_N: Tensor
    ) -> list[int]:
        """Give the unfinished rows of the batch. The one place of a step where the host waits for the device."""
        *flags, count = torch.cat([going_N.long(), broken_N.long(), drawn[None]]).tolist()
        if self.on_tokens is not None:
            self.on_tokens(count)
        going = flags[: len(rows_N)]
        broken = flags[len(rows_N) :]
        if any(broken):
            raise logits_not_finite(batch[int(rows_N[broken.index(1)])].name, self.model.name_or_path)
        return [row for row, goes in enumerate(going) if goes]

    def room(self, request: Request, settings: SamplingSettings) -> int:
        """Count the tokens that a response may have."""
        length = len(request.prompt_ids)
        if length == 0:
            raise InputError(f"prompt {request.prompt} is empty. A model needs at least one token")
        if self.limit is not None and length >= self.limit:
            raise InputError(
                f"prompt {request.prompt} has {length} tokens, which leaves no room in the model's {self.limit}. "
                "Lower the length filter of the prompts"
            )
        return settings.max_tokens if self.limit is None else min(settings.max_tokens, self.limit - length)

    def _prefill(self, prompts_BT: Tensor) -> tuple[DynamicCache, Tensor]:
        """Run each distinct prompt once and give every row its copy of the state."""
        distinct, row_to_distinct_B = torch.unique(prompts_BT, dim=0, return_inverse=True)
        cache = DynamicCache(config=self.model.config)
        logits_NV = self.forward(distinct, cache)
        cache.reorder_cache(row_to_distinct_B)  # index_select, in every kind of layer: it repeats as well as drops
        return cache, logits_NV[row_to_distinct_B]

    def forward(self, ids_NT: Tensor, cache: DynamicCache, **places: Tensor) -> Tensor:
        """Read tokens, and give the logits after the last; `places` are masks and positions that are not the usual."""
        output = self.model(input_ids=ids_NT, past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
        return output.logits[:, -1, : self.vocabulary]

    def _tilted(
        self, logits_NV: Tensor, batch: list[Request], rows_N: Tensor, step_N: Tensor, tokens_BT: Tensor
    ) -> Tensor:
        """Apply the tilt to the rows whose prompt has ended."""
        if self.tilt is None:
            return logits_NV
        deciding = (step_N >= 0).nonzero()[:, 0]
        if len(deciding) == 0:
            return logits_NV
        rows = rows_N[deciding].tolist()
        responses = [tokens_BT[row, len(batch[row].prompt_ids) :].tolist() for row in rows]
        tilted = self.tilt([batch[row] for row in rows], responses, logits_NV[deciding])
        return logits_NV.float().index_copy(0, deciding, tilted)

    def responses(self, tokens: list[list[int]], starts: list[int], ends: list[int]) -> list[Response]:
        """Cut the responses out of rows of tokens."""
        rows = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
        return [Response(ids, "stop" if ids[-1] in self.stop else "length") for ids in rows]


def draw(logits_NV: Tensor, uniform_N: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw one token per row by the inverse of its cumulative distribution; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits_NV.argmax(dim=-1)
    scaled_NV = (logits_NV.to(_widest(logits_NV.device)) - logits_NV.max(dim=-1, keepdim=True).values) / temperature
    weight_NV = scaled_NV.exp()
    if top_p < 1:
        weight_NV = _nucleus(weight_NV, top_p)
    cumulative_NV = weight_NV.cumsum(dim=-1)
    target_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    token_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)  # right: a token of no weight is never drawn
    return token_N1[:, 0].clamp(max=logits_NV.shape[-1] - 1)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float64 if has_float64(device) else torch.float32


def _nucleus(weight_NV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens that reach top_p, in their own places; of equals the lower id comes first."""
    sorted_NV, order_NV = weight_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    outside_NV = before_NV >= top_p * weight_NV.sum(dim=-1, keepdim=True)
    outside_NV[:, 0] = False
    return torch.zeros_like(weight_NV).scatter(1, order_NV, sorted_NV.masked_fill(outside_NV, 0))


def _batches(requests: Sequence[Request], size: int, spread: int) -> list[list[int]]:
    """Group rows by length of prompt, up to `size` rows whose lengths differ by `spread` at most."""
    lengths = [len(request.prompt_ids) for request in requests]
    batches: list[list[int]] = []
    for row in sorted(range(len(requests)), key=lambda row: (lengths[row], row)):
        if not batches or len(batches[-1]) == size or lengths[row] - lengths[batches[-1][0]] > spread:
            batches.append([])
        batches[-1].append(row)
    return batches


def uniforms(requests: Sequence[Request], seed: int, steps: int, device: torch.device) -> Tensor:
    """Give each (seed, prompt, response) its own stream, one number per step."""
    keys = [np.array([seed, request.prompt << 32 | request.response], dtype=np.uint64) for request in requests]
    streams = np.stack([np.random.Generator(np.random.Philox(key=key)).random(steps) for key in keys])
    return torch.from_numpy(streams).to(_widest(device)).to(device)


def _prompt_tokens(batch: list[Request], length: int) -> Tensor:
    tokens_BT = torch.zeros(len(batch), length, dtype=torch.long)
    for row, request in enumerate(batch):
        tokens_BT[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    return tokens_BT
