"""What a cache must hold, from scratch.

The expected numbers come from here and nowhere else: whole logits of one row at a time, and bytes spelled and projected
by loops that share no code with the package.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_weave.run import Role, Run
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Rollouts, Scores
from rounding import LOGPROB


@dataclass
class Words:
    """A saved tokenizer as bytes, read from its vocabulary by hand."""

    tokenizer: Any
    bytes_of: dict[int, bytes] = field(default_factory=dict)
    special: set[int] = field(default_factory=set)
    fallback: set[int] = field(default_factory=set)

    @classmethod
    @lru_cache(maxsize=2)
    def of(cls, folder: Path) -> "Words":
        words = cls(AutoTokenizer.from_pretrained(folder))
        letters = {char: byte for byte, char in bytes_to_unicode().items()}
        is_pieces, registered = "<0x00>" in words.vocabulary, words.tokenizer.added_tokens_decoder
        for string, id in words.vocabulary.items():
            added = registered.get(id)
            if added is not None:
                if words.tokenizer.decode([id]) == string:  # else its text is lost
                    words.bytes_of[id] = string.encode()
                if added.special:
                    words.special.add(id)
            elif is_pieces:
                byte = re.fullmatch("<0x(..)>", string)
                words.bytes_of[id] = bytes.fromhex(byte[1]) if byte else string.replace("▁", " ").encode()
                words.fallback.update({id} if byte else ())
            else:
                words.bytes_of[id] = bytes(letters[char] for char in string)
        return words

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @cached_property
    def ids(self) -> dict[tuple[bytes, bool], int]:
        """The token of each spelling. A single byte is SentencePiece's last resort, after a piece of that byte."""
        ordered = sorted(self.bytes_of, key=lambda id: (id in self.fallback, id), reverse=True)
        return {(self.bytes_of[id], id in self.special): id for id in ordered}

    def id_of(self, spelling: bytes, special: bool) -> int | None:
        return self.ids.get((spelling, special))

    def pieces(self, spelling: bytes) -> list[int]:
        try:
            return self.tokenizer.encode(spelling.decode(), add_special_tokens=False)
        except UnicodeDecodeError:  # part of a character
            if self.fallback:
                return [id for byte in spelling for id in [self.id_of(bytes([byte]), special=False)] if id is not None]
            letters = bytes_to_unicode()
            model = self.tokenizer.backend_tokenizer.model
            return [token.id for token in model.tokenize("".join(letters[byte] for byte in spelling))]


def project(ids: Iterable[int], student: Words, anchor: Words) -> tuple[list[int], list[int]]:
    """Spell each student token in anchor tokens; also how many of them stand before each student token."""
    projected: list[int] = []
    before = []
    for id in ids:
        before.append(len(projected))
        same = image(id, student, anchor)
        if same is None and id not in student.bytes_of:
            break  # nothing after it can be trusted
        projected += [same] if same is not None else anchor.pieces(student.bytes_of[id])
    return projected, before


@lru_cache(maxsize=4)
def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def all_logps(folder: Path, ids: list[int], vocabulary: int) -> torch.Tensor:
    """Every log-prob after every token of one row: no batch, no padding, no head of ours."""
    with torch.no_grad():
        logits_TV = load(folder)(torch.tensor([ids])).logits[0, :, :vocabulary]
    return torch.log_softmax(logits_TV.float(), dim=-1)


def read_cache(run: Run, role: Role | None = "post") -> list[dict[str, Any]]:
    """Read every row of rollouts, candidates and the scores of one anchor model, joined by shard and place."""
    stages: list[tuple[Stage, type]] = [(run.stage("rollout"), Rollouts), (run.stage("reference"), Candidates)]
    if role is not None:
        stages.append((run.stage("score", run.side("one", role)), Scores))
    rows = []
    for shard in range(len(run.stage("rollout").require()["shards"])):
        rollouts, candidates, *scores = (step.open(kind, shard).read() for step, kind in stages)
        for place in range(len(rollouts.prompt_R)):
            row = {
                "prompt": int(rollouts.prompt_R[place]),
                "response": int(rollouts.response_R[place]),
                "finish": int(rollouts.finish_R[place]),
                "prompt_ids": rollouts.prompt_ids[place].tolist(),
                "response_ids": rollouts.response_ids[place].tolist(),
                "ids": candidates.ids[place],
                "logp": candidates.logp[place],
                "other": candidates.other_logp[place],
                "sampled": candidates.sampled_logp[place],
            }
            for one in scores:
                row |= {"score": one.logp[place], "mapped": one.mapped[place], "mass": one.mass[place]}
            rows.append(row)
    return rows


def check_reference(run: Run, rows: list[dict[str, Any]], tolerance: float = LOGPROB) -> int:
    """Hold every number of the reference against whole logits; returns the number of positions."""
    path, count = Path(run.recipe.student.model), run.recipe.reference.candidates
    vocabulary = len(AutoTokenizer.from_pretrained(path))
    for row in rows:
        start = len(row["prompt_ids"])
        logp_TV = all_logps(path, row["prompt_ids"] + row["response_ids"], vocabulary)[start - 1 : -1]
        assert len(logp_TV) == len(row["response_ids"]) == len(row["ids"])
        for t, token in enumerate(row["response_ids"]):
            ids = row["ids"][t].tolist()
            assert len(set(ids)) == count
            best = logp_TV[t].topk(count).values
            rest = torch.ones(vocabulary, dtype=torch.bool)
            rest[ids] = False
            _close(row["logp"][t], logp_TV[t][ids], tolerance)
            _close(row["logp"][t], best, tolerance)
            _close(row["other"][t], torch.logsumexp(logp_TV[t][rest], dim=0), tolerance)
            _close(row["sampled"][t], logp_TV[t][token], tolerance)
    return sum(len(row["response_ids"]) for row in rows)


def check_scores(
    run: Run,
    rows: list[dict[str, Any]],
    role: Role,
    *,
    prompts: Mapping[int, list[int]] | None = None,  # the anchor's own prompts, instead of the student's projected
    bos: tuple[int, ...] = (),
    aliases: Mapping[int, int] | None = None,
    limit: int | None = None,
    tolerance: float = LOGPROB,
) -> tuple[int, int]:
    """Hold every number of one anchor model against whole logits; returns positions with all and with no candidate."""
    path = run.anchor("one", role).path
    student, anchor = Words.of(Path(run.recipe.student.model)), Words.of(path)
    whole = nothing = 0
    for row in rows:
        start = 0 if prompts else len(row["prompt_ids"])
        context = row["response_ids"] if prompts else row["prompt_ids"] + row["response_ids"]
        projected, before = project(context, student, anchor)
        head = [*bos, *(prompts[row["prompt"]] if prompts else [])]
        fed = [*head, *projected][: limit or None]
        logp_TV = all_logps(path, fed, len(anchor.vocabulary)) if fed else torch.zeros(0)
        for t in range(len(row["response_ids"])):
            seen = start + t < len(before)
            last = len(head) + before[start + t] - 1 if seen else 0  # the last anchor token before the decision
            images = [(aliases or {}).get(id, image(id, student, anchor)) for id in row["ids"][t].tolist()]
            mapped = [to is not None and seen and 0 <= last < len(fed) for to in images]
            assert row["mapped"][t].tolist() == mapped
            expected = [logp_TV[last][to].item() if known else 0.0 for to, known in zip(images, mapped, strict=True)]
            _close(row["score"][t], torch.tensor(expected), tolerance)
            _close(row["mass"][t], torch.tensor(expected)[mapped].exp().sum(), tolerance)
            whole, nothing = whole + all(mapped), nothing + (not any(mapped))
    return whole, nothing


def image(id: int, student: Words, anchor: Words) -> int | None:
    """The one anchor token of a candidate. In the same vocabulary even a token without spelling is itself."""
    if student.vocabulary == anchor.vocabulary:
        return id
    return anchor.id_of(student.bytes_of[id], id in student.special) if id in student.bytes_of else None


def _close(found: Any, expected: torch.Tensor, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected.numpy(), atol=tolerance, rtol=0)
