"""Sample more requests than a batch holds: a row that ends makes room for the next, and nobody waits for the longest.

Rows in flight have read different numbers of tokens. Columns of the shared cache before a row's own are masked for it.
That is exact for attention over all tokens and for nothing else: a model with other layers is sampled batch by batch.
Letters as in `lightning_weave.types`; R requests, N of them in flight, S steps of a response.
"""

import inspect
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lightning_weave.errors import logits_not_finite
from lightning_weave.models.attention import SPARING
from lightning_weave.models.hf_sampler import HFSampler, draw, uniforms
from lightning_weave.models.memory import is_out_of_memory
from lightning_weave.types import Request, Response, SamplingSettings


class RefillingSampler(HFSampler):
    """Sample from a causal language model on its own device, with a batch that is kept full."""

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        """Draw one response per request; which rows share a batch changes nothing but rounding."""
        responses: dict[int, Response] = {}
        todo = list(range(len(requests)))
        while len(todo) > self.batch_size and self._can_refill():
            try:
                self._refill(requests, settings, todo, responses)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink([todo[: self.batch_size]])
            todo = [row for row in todo if row not in responses]
        rest = super().sample([requests[row] for row in todo], settings)
        responses |= zip(todo, rest, strict=True)
        return [responses[row] for row in range(len(requests))]

    def _can_refill(self) -> bool:
        layers = DynamicCache(config=self.model.config).layers
        full_attention = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        masked_by_torch = self.model.config._attn_implementation in ("sdpa", SPARING)
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        return full_attention and masked_by_torch and takes_positions

    @torch.inference_mode()
    def _refill(
        self, requests: Sequence[Request], settings: SamplingSettings, todo: list[int], responses: dict[int, Response]
    ) -> None:
        """Sample what is left, in the order of their prompts' lengths; add each response when it is seen to end."""
        flight = Flight(self, requests, settings)
        waiting = deque(sorted(todo, key=lambda row: (len(requests[row].prompt_ids), row)))
        while waiting or flight.rows:
            free = self.batch_size - len(flight.rows)
            if waiting and 8 * free >= self.batch_size:  # joining copies the cache, as dropping does
                flight.join([waiting.popleft() for _ in range(min(free, len(waiting)))])
            for _ in range(self.look_every):
                flight.step()
            ended = flight.look()
            if 8 * len(ended) >= len(flight.rows):
                responses |= zip(ended, flight.responses(ended), strict=True)
                flight.drop(ended)


class Flight:
    """The rows that are sampled together."""

    def __init__(self, sampler: HFSampler, requests: Sequence[Request], settings: SamplingSettings) -> None:
        self.sampler = sampler
        self.requests = requests
        self.settings = settings
        self.device = sampler.model.device
        room = [sampler.room(request, settings) for request in requests]
        self.room_R = torch.tensor(room, device=self.device)
        self.uniform_RS = uniforms(requests, settings.seed, max(room), self.device)
        self.tokens_RS = torch.zeros_like(self.uniform_RS, dtype=torch.long)
        self.count_R = torch.zeros_like(self.room_R)  # tokens drawn
        self.ended_R = torch.zeros_like(self.room_R, dtype=torch.bool)
        self.broken_R = torch.zeros_like(self.ended_R)
        self.told = 0  # tokens that progress has heard of
        self.rows: list[int] = []  # those in flight
        self.masked: list[int] = []  # columns of the cache before each row's own
        self._settle()
        self.cache: DynamicCache | None = None
        self.logits_NV: Tensor | None = None

    def join(self, rows: list[int]) -> None:
        """Read the prompts of new rows, each distinct one once, and put their caches beside the others."""
        caches = [] if self.cache is None else [(self.cache, self.masked)]
        logits = [] if self.logits_NV is None else [self.logits_NV]
        for ids in dict.fromkeys(tuple(self.requests[row].prompt_ids) for row in rows):
            same = [row for row in rows if tuple(self.requests[row].prompt_ids) == ids]
            cache = DynamicCache(config=self.sampler.model.config)
            logits_1V = self.sampler.forward(torch.tensor([ids], device=self.device), cache)
            cache.batch_repeat_interleave(len(same))
            caches.append((cache, [0] * len(same)))
            logits.append(logits_1V.expand(len(same), -1))
            self.rows += same
        length = max(cache.get_seq_length() for cache, _ in caches)
        self.masked = [each + length - cache.get_seq_length() for cache, masked in caches for each in masked]
        self.cache = caches[0][0]
        for layers in zip(*(cache.layers for cache, _ in caches), strict=True):
            layers[0].keys = torch.cat([_widened(layer.keys, length) for layer in layers])
            layers[0].values = torch.cat([_widened(layer.values, length) for layer in layers])
        self.logits_NV = torch.cat(logits)
        self._settle()

    def _settle(self) -> None:
        """Tell the device who is in flight, once and not in every step."""
        self.rows_N = torch.tensor(self.rows, device=self.device)
        self.masked_N = torch.tensor(self.masked, device=self.device)

    def step(self) -> None:
        """Draw a token for every row that has not ended, and read it."""
        assert self.cache is not None, "rows have joined"
        assert self.logits_NV is not None, "rows have joined"
        rows_N = self.rows_N
        open_N = ~self.ended_R[rows_N]
        step_N = self.count_R[rows_N].clamp(max=self.uniform_RS.shape[1] - 1)
        self.broken_R[rows_N] |= open_N & ~self.logits_NV.max(dim=-1).values.isfinite()
        uniform_N = self.uniform_RS[rows_N, step_N]
        token_N = draw(self.logits_NV, uniform_N, self.settings.temperature, self.settings.top_p)
        self.tokens_RS[rows_N, step_N] = torch.where(open_N, token_N, self.tokens_RS[rows_N, step_N])
        self.count_R[rows_N] += open_N.long()
        self.ended_R[rows_N] |= self.sampler.is_stop_V[token_N] | (self.count_R[rows_N] == self.room_R[rows_N])
        self.logits_NV = self._read(token_N)

    def _read(self, token_N: Tensor) -> Tensor:
        assert self.cache is not None
        length = self.cache.get_seq_length()
        position_N = length - self.masked_N
        if self.sampler.limit is not None:  # of a row that has ended and is still here
            position_N = position_N.clamp(max=self.sampler.limit - 1)
        # With all four dimensions, transformers takes it as it is; of two it would ask the device whether all are true.
        mask_N11T = torch.arange(length + 1, device=self.device) >= self.masked_N[:, None, None, None]
        return self.sampler.forward(
            token_N[:, None], self.cache, attention_mask=mask_N11T, position_ids=position_N[:, None]
        )

    def look(self) -> list[int]:
        """Give the rows that have ended. The one place of a step where the host waits for the device."""
        ended_N = self.ended_R[self.rows_N]
        broken_N = self.broken_R[self.rows_N]
        flags = torch.cat([ended_N.long(), broken_N.long(), self.count_R.sum()[None]])
        *flags_2N, count = flags.tolist()
        if self.sampler.on_tokens is not None:
            self.sampler.on_tokens(count - self.told)
        self.told = count
        broken = [row for row, flag in zip(self.rows, flags_2N[len(self.rows) :], strict=True) if flag]
        if broken:
            raise logits_not_finite(self.requests[broken[0]].name, self.sampler.model.name_or_path)
        return [row for row, flag in zip(self.rows, flags_2N, strict=False) if flag]

    def drop(self, ended: list[int]) -> None:
        """Take rows out, and with them the columns that nobody else has."""
        assert self.cache is not None, "rows have joined"
        assert self.logits_NV is not None, "rows have joined"
        places = [place for place, row in enumerate(self.rows) if row not in set(ended)]
        self.rows = [self.rows[place] for place in places]
        if not places:
            self.cache = None
            self.logits_NV = None
            self.masked = []
            return
        unused = min(self.masked[place] for place in places)
        self.masked = [self.masked[place] - unused for place in places]
        self._settle()
        places_N = torch.tensor(places, device=self.device)
        self.logits_NV = self.logits_NV[places_N]
        for layer in self.cache.layers:
            layer.keys = layer.keys[places_N][:, :, unused:]
            layer.values = layer.values[places_N][:, :, unused:]

    def responses(self, rows: list[int]) -> list[Response]:
        """Give what rows have drawn; the host waits for all of them at once."""
        rows_N = torch.tensor(rows, device=self.device)
        counted = torch.cat([self.count_R[rows_N, None], self.tokens_RS[rows_N]], dim=1).tolist()
        return self.sampler.responses([ids for _, *ids in counted], [0] * len(rows), [count for count, *_ in counted])


def _widened(states_NHTD: Tensor, length: int) -> Tensor:
    return pad(states_NHTD, (0, 0, length - states_NHTD.shape[2], 0))
