"""Score trajectories: one forward pass per row through a model's body, and only the needed positions through its head.

The body is a transformers model in this process (`HFBody`) or a vLLM engine (`vllm.py`); the head is always ours.
Letters as in `lightning_weave.types`; N needed positions of a batch, D width.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from lightning_weave.devices import free_memory, is_out_of_memory
from lightning_weave.errors import InputError, WeaveError, logits_not_finite
from lightning_weave.heads import Head, candidate_logprobs, find_head, hidden_states, separate_sampled, top_candidates
from lightning_weave.models.checkpoint import context_limit
from lightning_weave.models.packing import (
    Shared,
    enable_packing,
    is_recurrent,
    packed_positions,
    packed_states,
    padded_states,
    rope_switch,
    rotate_by_row,
)
from lightning_weave.progress import show_rows
from lightning_weave.types import Request, Response, SamplingSettings


class Sampler(Protocol):
    """Draws one response per request, in the order of the requests."""

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]: ...

    def close(self) -> None:
        """Release the model; the sampler cannot be used afterwards."""


log = logging.getLogger(__name__)
WORTH_SHARING = 0.05  # of the tokens of a batch; attention reads a shared beginning for each row, which costs something

Tokens = Sequence[int] | NDArray[np.int32]
RowCandidates = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
RowScores = tuple[NDArray[np.float32], NDArray[np.float32]]
HeadFunction = Callable[[Tensor, list["Context"]], tuple[Tensor, ...]]  # from hidden states (N, D) of a batch


@dataclass(frozen=True)
class ScoreRow:
    """One trajectory in the tokens of the model that scores it."""

    ids: NDArray[np.int32]  # prompt and response
    positions_T: NDArray[np.int64]  # index into ids of the token whose hidden state predicts decision t
    candidate_ids_TC: NDArray[np.int32]
    mapped_TC: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens of one row, and the positions whose hidden states are needed."""

    row: int
    name: str  # of the row, for messages
    ids: Tensor
    positions_T: Tensor
    whole: int  # tokens of the row, with those after the last position, which are not run


class Body(Protocol):
    """A causal language model up to its final norm, wherever it runs, and its head."""

    name: str  # of the checkpoint, for messages
    head: Head
    limit: int | None  # longest context
    embedded: int  # ids that it takes
    packs: bool  # whether it runs rows of any length without padding

    def hidden(self, batch: list[Context], upcoming: list[Context]) -> Tensor:
        """Compute the hidden states of the needed positions (N, D), row after row.

        A body in another process may compute the `upcoming` batch while the head reads this one.
        """

    def close(self) -> None:
        """Release the model; the body cannot be used afterwards."""


class HFBody:
    """A transformers model on its own device, in its own dtype.

    Rows are packed where the model keeps them apart. Then a beginning that rows have in common, such as the prompt of
    several responses, is read once if that saves enough. Elsewhere rows are padded on the right with tokens that
    nothing before them can see, in recurrent layers as in attention, so no mask is needed.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        rotate_by_row(model)
        self.model = model
        self.name = model.name_or_path
        self.limit = context_limit(model.config)
        self.embedded = model.get_input_embeddings().num_embeddings
        self.head = find_head(model, vocabulary)
        # With longrope, two rows may read the same prompt in two ways.
        self.packs = rope_switch(model.config) is None and enable_packing(model, vocabulary)

    def hidden(self, batch: list[Context], upcoming: list[Context]) -> Tensor:
        rows, device = [context.ids for context in batch], self.model.device
        lengths, whole = [len(ids) for ids in rows], [context.whole for context in batch]
        ids_E = torch.cat(rows)
        ends = np.cumsum([0, *lengths[:-1]]).tolist()
        needed_N = torch.cat([end + context.positions_T for end, context in zip(ends, batch, strict=True)])
        if not self.packs:
            return padded_states(self.model, ids_E.to(device), lengths, whole)[needed_N.to(device)]
        positions_E, shared = packed_positions(lengths), Shared.from_rows(rows)
        if is_recurrent(self.model) or len(shared.first_T) > (1 - WORTH_SHARING) * len(ids_E):
            hidden_ED = packed_states(self.model, ids_E.to(device), positions_E.to(device), lengths, whole)
            return hidden_ED[needed_N.to(device)]
        ids_T, positions_T = (all_E[shared.first_T].to(device) for all_E in (ids_E, positions_E))
        needed_N = shared.place_E[needed_N]
        shared = Shared(shared.place_E.to(device), shared.first_T.to(device))
        return packed_states(self.model, ids_T, positions_T, lengths, whole, shared)[needed_N.to(device)]

    def close(self) -> None:
        """Do nothing: the model is freed with its last user."""


class GrowingBody(HFBody):
    """A transformers model that keeps keys and values: a row that it has read up to its last token runs that alone.

    Rows of one length share a cache, so it needs no mask. All other rows are run as a whole, each distinct one once.
    """

    def __init__(self, body: HFBody) -> None:
        vars(self).update(vars(body))
        self._known: dict[bytes, tuple[DynamicCache, int]] = {}  # rows of the last batch -> cache and place there

    def hidden(self, batch: list[Context], upcoming: list[Context]) -> Tensor:
        known, self._known = self._known, {}  # should memory run out, nothing is known
        hidden: list[Tensor] = []
        by_length = sorted(range(len(batch)), key=lambda place: len(batch[place].ids))
        for length, places in groupby(by_length, key=lambda place: len(batch[place].ids)):
            contexts = [batch[place] for place in places]
            assert all(context.positions_T.tolist() == [length - 1] for context in contexts)
            ids_NT = torch.stack([context.ids for context in contexts]).to(self.model.device)
            found = [known.get(context.ids[:-1].numpy().tobytes(), (None, 0)) for context in contexts]
            cache, place_N = found[0][0], torch.tensor([place for _, place in found], device=ids_NT.device)
            if cache is not None and all(one is cache for one, _ in found):
                cache.reorder_cache(place_N)
                hidden_NTD = hidden_states(self.model, ids_NT[:, -1:], past_key_values=cache, use_cache=True)
            else:
                distinct_DT, place_N = torch.unique(ids_NT, dim=0, return_inverse=True)
                cache = DynamicCache(config=self.model.config)
                hidden_NTD = hidden_states(self.model, distinct_DT, past_key_values=cache, use_cache=True)[place_N]
                cache.reorder_cache(place_N)
            hidden.append(hidden_NTD[:, -1])
            if rope_switch(self.model.config) is None:  # a longer row may have other keys
                self._known |= {one.ids.numpy().tobytes(): (cache, place) for place, one in enumerate(contexts)}
        return torch.cat(hidden)[np.argsort(by_length)]


class Scorer:
    """Scores with a causal language model. Rows that begin alike, or of similar length, share a batch.

    The maths of the head is float32.
    """

    def __init__(self, body: Body, token_budget: int = 16384) -> None:
        self.body = body
        self.head = body.head
        self.limit = body.limit
        self.close = body.close
        self.token_budget = token_budget  # tokens of a batch

    @classmethod
    def from_model(cls, model: Any, vocabulary: int, token_budget: int = 16384) -> "Scorer":
        """Score with a transformers model in this process."""
        return cls(HFBody(model, vocabulary), token_budget)

    def candidates(
        self,
        rows: Sequence[tuple[Tokens, Tokens]],
        count: int,
        names: Sequence[str] | None = None,
        given: Sequence[NDArray[np.int32]] | None = None,
    ) -> list[RowCandidates]:
        """Find each decision's likeliest tokens: ids_TC, logp_TC, other_logp_T and the sampled token's logp_T.

        A row is (prompt ids, response ids); `names` are what messages call the rows. If candidates are `given` (ids_TC
        of each row), these are scored instead of the likeliest.
        """
        contexts = []
        names = names if names is not None else [f"row {row}" for row in range(len(rows))]
        for row, (prompt, response) in enumerate(rows):
            self._check_ids(names[row], response, self.head.vocabulary)
            positions_T = np.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
            contexts += self._context(row, names[row], np.concatenate([prompt, response]), positions_T)

        def through_head(hidden_ND: Tensor, batch: list[Context]) -> tuple[Tensor, ...]:
            sampled = torch.cat([torch.from_numpy(np.array(rows[context.row][1])) for context in batch])
            sampled_N = sampled.long().to(hidden_ND.device)
            if given is None:
                ids_NC, *logps = top_candidates(hidden_ND, self.head, sampled_N, count)
            else:
                ids_NC = torch.from_numpy(np.concatenate([given[context.row] for context in batch])).long()
                wanted_NA = torch.cat([ids_NC.to(sampled_N.device), sampled_N[:, None]], dim=1)
                logp_NA, rest_N = candidate_logprobs(hidden_ND, self.head, wanted_NA)
                logps = list(separate_sampled(logp_NA, rest_N, wanted_NA))
            return ids_NC.int(), *(logp.float() for logp in logps)

        empty = np.zeros((0, count), np.float32)
        results: list[RowCandidates] = [(empty.astype(np.int32), empty, empty[:, 0], empty[:, 0]) for _ in rows]
        for row, arrays in self._run(contexts, through_head).items():
            results[row] = (arrays[0], arrays[1], arrays[2], arrays[3])
        return results

    def score(self, rows: Sequence[ScoreRow], names: Sequence[str] | None = None) -> list[RowScores]:
        """Compute logp_TC of the mapped candidates (0 elsewhere) and mass_T, the model's total probability on them."""
        contexts = []
        masks = [row.mapped_TC.any(axis=1) for row in rows]
        names = names if names is not None else [f"row {row}" for row in range(len(rows))]
        for index, row in enumerate(rows):
            self._check_ids(names[index], row.candidate_ids_TC[row.mapped_TC], self.head.vocabulary)
            contexts += self._context(index, names[index], row.ids, row.positions_T[masks[index]])

        def through_head(hidden_ND: Tensor, batch: list[Context]) -> tuple[Tensor, ...]:
            mapped = np.concatenate([rows[context.row].mapped_TC[masks[context.row]] for context in batch])
            ids = np.concatenate([rows[context.row].candidate_ids_TC[masks[context.row]] for context in batch])
            ids_NC = torch.from_numpy(np.where(mapped, ids, 0)).long().to(hidden_ND.device)
            logp_NC, _ = candidate_logprobs(hidden_ND, self.head, ids_NC)
            mapped_NC = torch.from_numpy(mapped).to(hidden_ND.device)
            mass_N = (logp_NC.exp() * mapped_NC).sum(dim=-1)
            return logp_NC.float().masked_fill(~mapped_NC, 0), mass_N.float()

        results: list[RowScores] = [
            (np.zeros(row.mapped_TC.shape, np.float32), np.zeros(len(row.mapped_TC), np.float32)) for row in rows
        ]
        for index, (logp_TC, mass_T) in self._run(contexts, through_head).items():
            results[index][0][masks[index]] = logp_TC
            results[index][1][masks[index]] = mass_T
        return results

    def _context(self, row: int, name: str, ids: Tokens, positions_T: NDArray[np.int64]) -> list[Context]:
        """Cut a row after its last needed position; a row without any is not run at all."""
        if len(positions_T) == 0:
            return []
        if positions_T.min() < 0 or positions_T.max() >= len(ids):
            raise InputError(f"{name}: the prompt is empty. Every prompt needs at least one token")
        inputs = np.asarray(ids)[: positions_T.max() + 1]
        self._check_ids(name, inputs, self.body.embedded)
        if self.limit is not None and len(inputs) > self.limit:
            model = f" ({self.body.name})" if self.body.name else ""
            raise InputError(
                f"{name}: {len(inputs)} tokens are more than the {self.limit} of the model that scores them{model}. "
                "Leave out or shorten such rows"
            )
        inputs_T, positions_T = inputs.astype(np.int64), positions_T.astype(np.int64)
        return [Context(row, name, torch.from_numpy(inputs_T), torch.from_numpy(positions_T), len(ids))]

    def _check_ids(self, name: str, ids: Tokens, size: int) -> None:
        outside = [token for token in (np.min(ids, initial=0), np.max(ids, initial=0)) if not 0 <= token < size]
        if outside:
            raise InputError(
                f"{name}: token id {outside[0]} is not in the model's vocabulary of {size}. "
                "Were these tokens made with another tokenizer?"
            )

    @torch.inference_mode()
    def _run(self, contexts: list[Context], through_head: HeadFunction) -> dict[int, tuple[NDArray, ...]]:
        """Run every context: packed, those that begin alike together; else the longest first, with little padding."""
        results: dict[int, tuple[NDArray, ...]] = {}
        if self.body.packs:
            pending = sorted(contexts, key=lambda context: context.ids.tolist())
        else:
            pending = sorted(contexts, key=lambda context: (-len(context.ids), context.row))
        while pending:
            batch = self._first_batch(pending)
            upcoming = self._first_batch(pending[len(batch) :])
            arrays: list[NDArray] | None = None
            try:
                arrays = [array.cpu().numpy() for array in through_head(self.body.hidden(batch, upcoming), batch)]
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if arrays is None:  # only now is the memory of the failed batch free
                free_memory()
                tokens = sum(len((one if self.body.packs else batch[0]).ids) for one in batch)
                if len(batch) == 1:
                    raise WeaveError(
                        f"{batch[0].name}: its {tokens} tokens alone do not fit in memory. Use a smaller dtype, a "
                        "larger device, or leave out long rows"
                    )
                self.token_budget = tokens // 2
                log.warning("out of memory with %d tokens: the token budget is now %d", tokens, self.token_budget)
                continue
            ends = np.cumsum([len(context.positions_T) for context in batch])[:-1]
            for context, *parts in zip(batch, *(np.split(array, ends) for array in arrays), strict=True):
                if not all(np.isfinite(part).all() for part in parts):
                    raise logits_not_finite(context.name, self.body.name)
                results[context.row] = tuple(parts)
            pending = pending[len(batch) :]
            show_rows(len(results), len(contexts))
        return results

    def _first_batch(self, contexts: list[Context]) -> list[Context]:
        """Take contexts until the token budget is full, at least one; without packing each is padded to the first."""
        tokens = 0
        for count, context in enumerate(contexts):
            tokens += len(context.ids if self.body.packs else contexts[0].ids)
            if count and tokens > self.token_budget:
                return contexts[:count]
        return contexts
