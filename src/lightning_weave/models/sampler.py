"""Sample with a transformers model, batch by batch or with continuous batching.

With continuous batching the next request takes the place of a row that ends. The running rows have different lengths:
columns of the shared cache before a row's own are masked for it. That is exact for full attention only, so a model with
other layers is sampled batch by batch, as is one whose rotary embedding depends on the length of the row.
Letters as in `lightning_weave.types`; B rows of a batch, R requests, N rows that are running, S steps of a response.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lightning_weave.devices import free_memory, has_float64, is_out_of_memory
from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.models.checkpoint import context_limit
from lightning_weave.models.packing import EFFICIENT, rope_switch
from lightning_weave.progress import show_rows
from lightning_weave.types import Request, Response, SamplingSettings

SYNC_EVERY = 16  # steps: every synchronisation with a GPU empties its queue
log = logging.getLogger(__name__)

# From requests, the response so far of each, and the model's logits to the logits to sample from.
Tilt = Callable[[list[Request], list[list[int]], Tensor], Tensor]


class HFSampler:
    """Samples from a causal language model on its own device, batch by batch."""

    def __init__(
        self, model: Any, stop: frozenset[int], vocabulary: int, batch_size: int = 64, tilt: Tilt | None = None
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.batch_size = batch_size
        self.tilt = tilt
        # Rows that have ended are dropped when the host learns of it, which costs nothing on a CPU.
        self.sync_every = 1 if model.device.type == "cpu" else SYNC_EVERY
        self.limit = context_limit(model.config)
        self.rope_switch = rope_switch(model.config)
        self.stop = stop
        is_stop_V = torch.zeros(vocabulary, dtype=torch.bool)
        is_stop_V[[token for token in sorted(stop) if token < vocabulary]] = True
        self.is_stop_V = is_stop_V.to(model.device)

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request; which rows share a batch changes nothing but rounding."""
        responses: dict[int, Response] = {}
        lengths = [len(request.prompt_ids) for request in requests]
        pending: list[list[int]] = []  # rows by length of prompt, which differ by a quarter of the response at most
        for row in sorted(range(len(requests)), key=lambda row: (lengths[row], row)):
            is_full = not pending or len(pending[-1]) == self.batch_size
            if is_full or lengths[row] - lengths[pending[-1][0]] > settings.max_tokens // 4:
                pending.append([])
            pending[-1].append(row)
        while pending:
            sampled = None
            try:
                sampled = self._sample_batch([requests[row] for row in pending[0]], settings)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if sampled is None:  # only now is the memory of the failed batch free
                pending = self._shrink(pending)
                continue
            responses.update(zip(pending[0], sampled, strict=True))
            pending = pending[1:]
            show_rows(len(responses), len(requests))
        return [responses[row] for row in range(len(requests))]

    def close(self) -> None:
        """Release the model and free its memory."""
        self.model = None
        free_memory()

    def _shrink(self, pending: list[list[int]]) -> list[list[int]]:
        """Halve the batch size, and split the pending batches accordingly."""
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
        rooms = [self.max_new_tokens(request, settings) for request in batch]
        starts = [len(request.prompt_ids) for request in batch]
        first = min(starts)
        longest = max(start + room for start, room in zip(starts, rooms, strict=True))
        start_B = torch.tensor(starts, device=device)
        end_B = start_B + torch.tensor(rooms, device=device)  # moves forward if a row stops
        uniform_BS = uniforms(batch, settings.seed, max(rooms), device)
        prompts = [torch.tensor(request.prompt_ids) for request in batch]
        tokens_BT = pad(pad_sequence(prompts, batch_first=True), (0, longest - max(starts))).to(device)
        # Each distinct beginning runs once; reordering the cache repeats rows as well as dropping them.
        distinct_DT, distinct_B = torch.unique(tokens_BT[:, :first], dim=0, return_inverse=True)
        cache = DynamicCache(config=self.model.config)
        logits_DV = self.forward(distinct_DT, cache)
        cache.reorder_cache(distinct_B)
        logits_NV = logits_DV[distinct_B]
        rows_N = torch.arange(len(batch), device=device)  # those that are still running
        broken_N = torch.zeros_like(rows_N, dtype=torch.bool)
        for position in range(first, longest):
            step_N = position - start_B[rows_N]  # negative within the prompt
            uniform_N = uniform_BS[rows_N, step_N.clamp(0, max(rooms) - 1)]
            if self.tilt is not None and len(deciding := (step_N >= 0).nonzero()[:, 0]):
                rows = rows_N[deciding].tolist()
                so_far = [tokens_BT[row, starts[row] : position].tolist() for row in rows]
                tilted = self.tilt([batch[row] for row in rows], so_far, logits_NV[deciding])
                logits_NV = logits_NV.float().index_copy(0, deciding, tilted)
            open_N = end_B[rows_N] > position
            broken_N = broken_N | (open_N & ~logits_NV.max(dim=-1).values.isfinite())
            sampled_N = draw(logits_NV, uniform_N, settings.temperature, settings.top_p)
            token_N = torch.where(step_N < 0, tokens_BT[rows_N, position], sampled_N)
            tokens_BT[rows_N, position] = token_N
            stopped_N = self.is_stop_V[token_N] & (step_N >= 0)
            last_N = torch.where(stopped_N, position + 1, end_B[rows_N])
            end_B[rows_N] = torch.minimum(end_B[rows_N], last_N)
            if (position + 1 - first) % self.sync_every == 0 or position + 1 == longest:
                # The only synchronisation with the device in a step.
                running, broken = torch.stack([end_B[rows_N] > position + 1, broken_N]).tolist()
                if any(broken):
                    raise logits_not_finite(batch[int(rows_N[broken.index(True)])].name, self.model.name_or_path)
                kept = [place for place, runs in enumerate(running) if runs]
                if not kept:
                    break
                if 8 * (len(rows_N) - len(kept)) >= len(rows_N):  # dropping copies the cache: worth it for an eighth
                    kept_N = torch.tensor(kept, device=device)
                    rows_N = rows_N[kept_N]
                    token_N = token_N[kept_N]
                    broken_N = broken_N[kept_N]
                    cache.reorder_cache(kept_N)
            if position == self.rope_switch:  # from here on all keys are rotated by other frequencies
                cache = DynamicCache(config=self.model.config)
                logits_NV = self.forward(tokens_BT[rows_N, : position + 1], cache)
            else:
                logits_NV = self.forward(token_N[:, None], cache)
        return self.responses(tokens_BT.tolist(), starts, end_B.tolist())

    def max_new_tokens(self, request: Request, settings: SamplingSettings) -> int:
        """Return how long a response may be."""
        length = len(request.prompt_ids)
        if length == 0:
            raise InputError(f"prompt {request.prompt} is empty. A model needs at least one token")
        if self.limit is not None and length >= self.limit:
            raise InputError(
                f"prompt {request.prompt} has {length} tokens, which leaves no room in the model's {self.limit}. "
                "Lower the length filter of the prompts"
            )
        return settings.max_tokens if self.limit is None else min(settings.max_tokens, self.limit - length)

    def forward(self, ids_NT: Tensor, cache: DynamicCache, **places: Tensor) -> Tensor:
        """Compute the logits after the last token; `places` are masks and positions that are not the default."""
        output = self.model(input_ids=ids_NT, past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
        return output.logits[:, -1, : self.vocabulary]

    def responses(self, tokens: list[list[int]], starts: list[int], ends: list[int]) -> list[Response]:
        """Cut the responses out of rows of tokens."""
        rows = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
        return [Response(ids, "stop" if ids[-1] in self.stop else "length") for ids in rows]


def draw(logits_NV: Tensor, uniform_N: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw one token per row by the inverse of its cumulative distribution; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits_NV.argmax(dim=-1)
    dtype = torch.float64 if has_float64(logits_NV.device) else torch.float32
    scaled_NV = (logits_NV.to(dtype) - logits_NV.max(dim=-1, keepdim=True).values) / temperature
    weight_NV = scaled_NV.exp()
    if top_p < 1:  # keep the fewest likeliest tokens that reach top_p; of equals the lower id comes first
        sorted_NV, order_NV = weight_NV.sort(dim=-1, descending=True, stable=True)
        before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
        outside_NV = before_NV >= top_p * weight_NV.sum(dim=-1, keepdim=True)
        outside_NV[:, 0] = False
        weight_NV = torch.zeros_like(weight_NV).scatter(1, order_NV, sorted_NV.masked_fill(outside_NV, 0))
    cumulative_NV = weight_NV.cumsum(dim=-1)
    target_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    token_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)  # right: a token of no weight is never drawn
    return token_N1[:, 0].clamp(max=logits_NV.shape[-1] - 1)


def uniforms(requests: Sequence[Request], seed: int, steps: int, device: torch.device) -> Tensor:
    """Draw each (seed, prompt, response)'s own stream of random numbers, one per step."""
    keys = [np.array([seed, request.prompt << 32 | request.response], dtype=np.uint64) for request in requests]
    streams = np.stack([np.random.Generator(np.random.Philox(key=key)).random(steps) for key in keys])
    return torch.from_numpy(streams).to(torch.float64 if has_float64(device) else torch.float32).to(device)


class RefillingSampler(HFSampler):
    """Samples with continuous batching where the model allows it."""

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request; which rows share a batch changes nothing but rounding."""
        responses: dict[int, Response] = {}
        todo = list(range(len(requests)))
        layers = DynamicCache(config=self.model.config).layers
        full_attention = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        masked_by_torch = self.model.config._attn_implementation in ("sdpa", EFFICIENT)
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        refills = full_attention and masked_by_torch and takes_positions and self.rope_switch is None
        while len(todo) > self.batch_size and refills:
            try:
                running = RunningRows(self, requests, settings)
                waiting = deque(sorted(todo, key=lambda row: (len(requests[row].prompt_ids), row)))  # shortest first
                while waiting or running.rows:
                    free = self.batch_size - len(running.rows)
                    if waiting and 8 * free >= self.batch_size:  # adding rows copies the cache, as dropping does
                        running.add([waiting.popleft() for _ in range(min(free, len(waiting)))])
                    for _ in range(self.sync_every):
                        running.step()
                    ended = running.synchronize()
                    if 8 * len(ended) >= len(running.rows):
                        responses |= zip(ended, running.drop(ended), strict=True)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink([todo[: self.batch_size]])
            todo = [row for row in todo if row not in responses]
        rest = super().sample([requests[row] for row in todo], settings)
        responses |= zip(todo, rest, strict=True)
        return [responses[row] for row in range(len(requests))]


class RunningRows:
    """The rows that are sampled together, and the cache that they share."""

    cache: DynamicCache | None
    logits_NV: Tensor | None

    def __init__(self, sampler: HFSampler, requests: Sequence[Request], settings: SamplingSettings) -> None:
        self.sampler = sampler
        self.requests = requests
        self.settings = settings
        self.device = sampler.model.device
        room = [sampler.max_new_tokens(request, settings) for request in requests]
        self.room_R = torch.tensor(room, device=self.device)
        self.uniform_RS = uniforms(requests, settings.seed, max(room), self.device)
        self.tokens_RS = torch.zeros_like(self.uniform_RS, dtype=torch.long)
        self.count_R = torch.zeros_like(self.room_R)  # tokens drawn
        self.ended_R = torch.zeros_like(self.room_R, dtype=torch.bool)
        self.broken_R = torch.zeros_like(self.ended_R)
        self._set_rows([], masked=[], cache=None, logits_NV=None)

    def _set_rows(
        self, rows: list[int], masked: list[int], cache: DynamicCache | None, logits_NV: Tensor | None
    ) -> None:
        self.rows = rows
        self.masked = masked  # columns of the cache before each row's own
        self.cache = cache
        self.logits_NV = logits_NV
        self.rows_N = torch.tensor(rows, device=self.device)  # copied to the device once, not in every step
        self.masked_N = torch.tensor(masked, device=self.device)

    def add(self, rows: list[int]) -> None:
        """Run the prompts of new rows, each distinct one once, and join their caches with the others'."""
        caches = [] if self.cache is None else [(self.cache, self.masked)]
        logits = [] if self.logits_NV is None else [self.logits_NV]
        all_rows = list(self.rows)
        for ids in dict.fromkeys(tuple(self.requests[row].prompt_ids) for row in rows):
            same = [row for row in rows if tuple(self.requests[row].prompt_ids) == ids]
            cache = DynamicCache(config=self.sampler.model.config)
            logits_1V = self.sampler.forward(torch.tensor([ids], device=self.device), cache)
            cache.batch_repeat_interleave(len(same))
            caches.append((cache, [0] * len(same)))
            logits.append(logits_1V.expand(len(same), -1))
            all_rows += same
        length = max(cache.get_seq_length() for cache, _ in caches)
        missing = [length - cache.get_seq_length() for cache, _ in caches]
        for layers in zip(*(cache.layers for cache, _ in caches), strict=True):
            # Padded on the left to the same length.
            keys = [pad(layer.keys, (0, 0, columns, 0)) for layer, columns in zip(layers, missing, strict=True)]
            values = [pad(layer.values, (0, 0, columns, 0)) for layer, columns in zip(layers, missing, strict=True)]
            layers[0].keys = torch.cat(keys)
            layers[0].values = torch.cat(values)
        masked = [each + columns for (_, own), columns in zip(caches, missing, strict=True) for each in own]
        self._set_rows(all_rows, masked, caches[0][0], torch.cat(logits))

    def step(self) -> None:
        """Draw a token for every row that has not ended, and run the model on it."""
        assert self.cache is not None, "no rows"
        assert self.logits_NV is not None, "no rows"
        rows_N = self.rows_N
        open_N = ~self.ended_R[rows_N]
        step_N = self.count_R[rows_N].clamp(max=self.uniform_RS.shape[1] - 1)
        self.broken_R[rows_N] |= open_N & ~self.logits_NV.max(dim=-1).values.isfinite()
        uniform_N = self.uniform_RS[rows_N, step_N]
        token_N = draw(self.logits_NV, uniform_N, self.settings.temperature, self.settings.top_p)
        self.tokens_RS[rows_N, step_N] = torch.where(open_N, token_N, self.tokens_RS[rows_N, step_N])
        self.count_R[rows_N] += open_N.long()
        self.ended_R[rows_N] |= self.sampler.is_stop_V[token_N] | (self.count_R[rows_N] == self.room_R[rows_N])
        length = self.cache.get_seq_length()
        position_N = length - self.masked_N
        if self.sampler.limit is not None:  # for rows that have ended and are still here
            position_N = position_N.clamp(max=self.sampler.limit - 1)
        # Transformers uses a mask of four dimensions unchanged; with two it would synchronise to see if all are true.
        mask_N11T = torch.arange(length + 1, device=self.device) >= self.masked_N[:, None, None, None]
        self.logits_NV = self.sampler.forward(
            token_N[:, None], self.cache, attention_mask=mask_N11T, position_ids=position_N[:, None]
        )

    def synchronize(self) -> list[int]:
        """Return the rows that have ended. The only synchronisation with the device in a step."""
        ended_N = self.ended_R[self.rows_N]
        broken_N = self.broken_R[self.rows_N]
        ended, broken = torch.stack([ended_N, broken_N]).tolist()
        if any(broken):
            raise logits_not_finite(self.requests[self.rows[broken.index(True)]].name, self.sampler.model.name_or_path)
        return [row for row, has_ended in zip(self.rows, ended, strict=True) if has_ended]

    def drop(self, ended: list[int]) -> list[Response]:
        """Remove rows, and the columns of the cache that no other row uses; returns their responses."""
        assert self.cache is not None, "no rows"
        assert self.logits_NV is not None, "no rows"
        ended_N = torch.tensor(ended, device=self.device)
        counted = torch.cat([self.count_R[ended_N, None], self.tokens_RS[ended_N]], dim=1).tolist()
        tokens, counts = [ids for _, *ids in counted], [count for count, *_ in counted]
        responses = self.sampler.responses(tokens, [0] * len(ended), counts)
        kept = [place for place, row in enumerate(self.rows) if row not in set(ended)]
        if not kept:
            self._set_rows([], masked=[], cache=None, logits_NV=None)
            return responses
        unused = min(self.masked[place] for place in kept)
        masked = [self.masked[place] - unused for place in kept]
        kept_N = torch.tensor(kept, device=self.device)
        for layer in self.cache.layers:
            layer.keys = layer.keys[kept_N][:, :, unused:]
            layer.values = layer.values[kept_N][:, :, unused:]
        self._set_rows([self.rows[place] for place in kept], masked, self.cache, self.logits_NV[kept_N])
        return responses
