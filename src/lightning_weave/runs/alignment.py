"""How one anchor model reads the student's trajectories: in its own tokens, after the prompt that it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.errors import InputError
from lightning_weave.models.hf import ScoreRow
from lightning_weave.prompts import encode, read_prompts, render
from lightning_weave.runs.steps import ScoredModel, Steps
from lightning_weave.tokens import TokenMap
from lightning_weave.types import Prompt


@dataclass(frozen=True)
class Alignment:
    """Everything about scoring a trajectory that needs no weights."""

    tokens: TokenMap
    limit: int | None  # longest context of the model, in its own tokens
    bos: tuple[int, ...] = ()
    native_prompts: Sequence[list[int]] | None = None  # by line of prompts.jsonl; None: the student's, projected
    masked_ids: frozenset[int] = frozenset()  # anchor tokens that a candidate may not be scored as

    @classmethod
    def open(
        cls, steps: Steps, scored: ScoredModel, limit: int | None, masked_ids: frozenset[int] = frozenset()
    ) -> "Alignment":
        """Align the tokenizer of one anchor model with the student's."""
        anchor = scored.checkpoint.tokenizer
        name = scored.checkpoint.name
        if scored.bos and anchor.bos_token_id is None:
            raise InputError(f"anchors: bos = true, but the tokenizer of {name} has no such token. Leave it out")
        try:
            tokens = TokenMap.between(steps.student.tokenizer, anchor, dict(scored.aliases))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        return cls(
            tokens,
            limit,
            (anchor.bos_token_id,) if scored.bos else (),
            _native_prompts(steps, scored, anchor) if scored.prompt == "native" else None,
            masked_ids,
        )

    def align(self, prompt: int, prompt_ids: NDArray, response_ids: NDArray, candidate_ids_TC: NDArray) -> ScoreRow:
        """Put one trajectory and its candidates into this model's tokens, each decision at the student's boundary."""
        native = self.native_prompts[prompt] if self.native_prompts is not None else []
        context = response_ids if self.native_prompts is not None else np.concatenate([prompt_ids, response_ids])
        projected, boundaries = self.tokens.project(context)
        read = [*native, *projected]
        has_bos = tuple(read[: len(self.bos)]) == self.bos  # a prompt may bring its own
        before = [] if has_bos else [*self.bos]
        ids = np.array([*before, *read], dtype=np.int32)
        first = len(context) - len(response_ids)
        positions_T = len(before) + len(native) + np.array(boundaries[first:-1], dtype=np.int64) - 1
        anchor_ids_TC, mapped_TC = self.tokens.candidate_map(torch.from_numpy(np.array(candidate_ids_TC)))
        mapped = mapped_TC.numpy() & ~np.isin(anchor_ids_TC.numpy(), list(self.masked_ids))
        usable_T = np.arange(first, len(context)) <= self.tokens.lossless_prefix(context)
        usable_T &= (positions_T >= 0) & (positions_T < (self.limit or len(ids)))
        return ScoreRow(ids, positions_T, anchor_ids_TC.numpy(), mapped & usable_T[:, None])


def _native_prompts(steps: Steps, scored: ScoredModel, anchor: Any) -> list[list[int]]:
    """Render the prompts in the post-anchor's chat template, so that both models of the pair see the same text."""
    assert scored.template is not None
    steps.store.stage(steps.prompts).require()
    speaker = scored.template.tokenizer
    if not speaker.chat_template:
        raise InputError(
            f'anchors: prompt = "native", but the tokenizer of {scored.template.name} has no chat template. '
            'Use prompt = "student"'
        )
    prompts = read_prompts(steps.prompts_file)
    return encode([_native_text(prompt, speaker, steps) for prompt in prompts], anchor, rendered=True)


def _native_text(prompt: Prompt, speaker: Any, steps: Steps) -> str:
    if not prompt.messages:
        raise InputError(
            f'anchors: prompt = "native", but the prompt {prompt.id} of rollout.from has no messages. '
            'Add them to its line, or use prompt = "student"'
        )
    return render(prompt.messages, speaker, True, steps.recipe.prompts.thinking)
