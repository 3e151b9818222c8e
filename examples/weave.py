# /// script
# requires-python = ">=3.11"
# dependencies = ["lightning-weave"]
# [tool.uv.sources]
# lightning-weave = { path = ".." }
# ///
"""Lightning Weave in one file: train a student on what two specialists learned, with neither in memory while it trains.

An anchor pair is a specialist and the checkpoint it was post-trained from. The log-ratio of the two says what the
specialist learned, apart from what it knew before. Here one pair learned accuracy, the other brevity.

  1. sample      the student answers every prompt a few times
  2. candidates  at each token it wrote: its top 16 tokens there, and the exact mass of all others
  3. score       both models of a pair score these candidates, once: shift r = log post - log pre
  4. compose     add the shifts with weights and tilt the student's own distribution: q ∝ b * exp(r / alpha)
  5. train       a copy of the student learns q
  6. evaluate    on problems that were held out

The models are tiny and come with the package. `uv run examples/weave.py`, or `.venv/bin/python examples/weave.py` after
`make demo`: two minutes.

A *decision* is the choice of one response token. Shape letters: B rows of a batch, T tokens of a row, N decisions of
all rows, C candidates, O = C + 1 outcomes, of which the last is `other` (every token that is not a candidate), D width,
K anchors.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.grading.math import grade
from lightning_weave.heads import candidate_logprobs, find_head, fused_log_residual_loss, hidden_states, top_candidates
from lightning_weave.maths import compose_shifts, mean_aes, policy_shift, tilted_target, with_other
from lightning_weave.tokens import TokenMap
from lightning_weave.world.layout import shipped_world

ANCHORS = ("accuracy", "brevity")
COMPOSITIONS = {"accuracy alone": (1.0, 0.0), "composition": (0.75, 0.25)}  # one weight per anchor
BENCHMARKS = ("easy", "medium", "hard")
RESPONSES = 4  # per prompt
MAX_TOKENS = 160
CANDIDATES = 16
ALPHA = 2.0  # larger stays closer to the student
LEARNING_RATE = 5e-4
BATCH = 64  # rows per update and per forward pass


class Model(NamedTuple):
    lm: Any
    tokenizer: Any
    head: Any  # how it turns hidden states into logits


class Trajectory(NamedTuple):
    """A prompt and one response of the student, in student tokens."""

    prompt_ids: list[int]
    response_ids: list[int]


Context = tuple[list[int], list[int]]  # what a model reads, and the index of the last token before each decision
Shift = tuple[Tensor, Tensor]  # r_NC, valid_N


def load(name: str) -> Model:
    """Load a shipped checkpoint in float32."""
    lm = AutoModelForCausalLM.from_pretrained(shipped_world() / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(shipped_world() / name)
    return Model(lm, tokenizer, find_head(lm, vocabulary=len(tokenizer)))  # the output matrix is padded beyond it


def load_problems(name: str, count: int) -> list[dict[str, str]]:
    """Load shipped problems such as {"problem": "9-1-4*0", "answer": "0"}: left to right, modulo 10."""
    lines = (shipped_world() / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def forward_hidden(model: Model, contexts: Sequence[Context]) -> Tensor:
    """Run a model over all contexts and return its hidden states (N, D) at the decisions."""
    parts = []
    for start in range(0, len(contexts), BATCH):
        batch = contexts[start : start + BATCH]
        # Padded on the right, where causal attention never looks: no mask is needed.
        ids_BT = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True)
        hidden_BTD = hidden_states(model.lm, ids_BT)
        parts += [hidden_TD[positions] for hidden_TD, (_, positions) in zip(hidden_BTD, batch, strict=True)]
    return torch.cat(parts)


# ---- 1. Sample -------------------------------------------------------------------------------------------------------
def sample(model: Model, problems: list[dict], responses: int, temperature: float, top_p: float) -> list[Trajectory]:
    """Draw a number of responses to each problem. The end-of-sequence token is part of a response."""
    tokenizer, trajectories = model.tokenizer, []
    for start in range(0, len(problems), BATCH):
        prompts = [f"Question: {each['problem']}\nAnswer:" for each in problems[start : start + BATCH]]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        drawn = model.lm.generate(
            **inputs,
            do_sample=True,
            num_return_sequences=responses,
            temperature=temperature,
            top_p=top_p,
            top_k=0,  # all tokens: the default is 50
            max_new_tokens=MAX_TOKENS,
            suppress_tokens=list(range(len(tokenizer), model.lm.config.vocab_size)),  # padded vocabulary rows
        )
        for row, ids in enumerate(drawn[:, inputs.input_ids.shape[1] :].tolist()):
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            trajectories.append(Trajectory(tokenizer(prompts[row // responses]).input_ids, ids[:end]))
    return trajectories


# ---- 2. Candidates ---------------------------------------------------------------------------------------------------
def own_context(trajectory: Trajectory) -> Context:
    """Return the student's token ids, and the index before each response token."""
    ids = trajectory.prompt_ids + trajectory.response_ids
    return ids, list(range(len(trajectory.prompt_ids) - 1, len(ids) - 1))


@torch.no_grad()
def find_candidates(student: Model, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Find the student's top tokens at every decision, and its log-probs of them and of `other`."""
    hidden_ND = forward_hidden(student, [own_context(each) for each in trajectories])
    sampled_N = torch.tensor([token for each in trajectories for token in each.response_ids])
    candidate_ids_NC, logp_NC, other_logp_N, _ = top_candidates(hidden_ND, student.head, sampled_N, CANDIDATES)
    return candidate_ids_NC, with_other(logp_NC, other_logp_N)


# ---- 3. Score --------------------------------------------------------------------------------------------------------
def project(tokens: TokenMap, trajectory: Trajectory) -> tuple[Context, list[bool]]:
    """Re-tokenise a trajectory for an anchor, one student token at a time, so that decision boundaries match.

    Also return which decisions have a lossless prefix.
    """
    first, ids = len(trajectory.prompt_ids), trajectory.prompt_ids + trajectory.response_ids
    anchor_ids, boundaries = tokens.project(ids)
    positions, last = [boundary - 1 for boundary in boundaries[first:-1]], tokens.lossless_prefix(ids)
    return (anchor_ids, positions), [t <= last for t in range(first, len(ids))]


@torch.no_grad()
def find_shift(anchor: str, student: Model, trajectories: Sequence[Trajectory], candidate_ids_NC: Tensor) -> Shift:
    """Score one anchor pair at the student's candidates: its shift, and the decisions at which it has one.

    A candidate that is no single token of the anchor has shift 0. Recipes mask its decision by default, like the paper.
    """
    post, pre = load(f"{anchor}-post"), load(f"{anchor}-pre")  # they share a tokenizer
    # The end-of-sequence tokens are different strings with the same role: map them explicitly.
    ends = {student.tokenizer.eos_token: post.tokenizer.eos_token}
    tokens = TokenMap.between(student.tokenizer, post.tokenizer, aliases=ends)
    contexts, lossless = zip(*(project(tokens, each) for each in trajectories), strict=True)
    anchor_ids_NC, mapped_NC = tokens.candidate_map(candidate_ids_NC)
    mapped_NC = mapped_NC & torch.tensor([each for row in lossless for each in row])[:, None]
    post_NC, _ = candidate_logprobs(forward_hidden(post, contexts), post.head, anchor_ids_NC)
    pre_NC, _ = candidate_logprobs(forward_hidden(pre, contexts), pre.head, anchor_ids_NC)
    return policy_shift(post_NC, pre_NC).masked_fill(~mapped_NC, 0.0), mapped_NC.any(dim=1)


# ---- 4. Compose ------------------------------------------------------------------------------------------------------
class Target(NamedTuple):
    """What the student is trained on, decision by decision."""

    candidate_ids_NC: Tensor
    log_b_NO: Tensor  # the behaviour policy: the student before training
    log_q_NO: Tensor  # where it should go
    valid_N: Tensor


def compose(candidate_ids_NC: Tensor, log_b_NO: Tensor, shifts: list[Shift], weights: Sequence[float]) -> Target:
    """Add the shifts with weights and tilt the behaviour by the sum. New weights need no new scores."""
    r_KNC, valid_KN = (torch.stack(parts) for parts in zip(*shifts, strict=True))
    r_NC, valid_N = compose_shifts(r_KNC, valid_KN, weights)
    return Target(candidate_ids_NC, log_b_NO, tilted_target(log_b_NO, r_NC, ALPHA), valid_N)


# ---- 5. Train --------------------------------------------------------------------------------------------------------
def weave_loss(student: Model, trajectories: Sequence[Trajectory], target: Target) -> Tensor:
    """Average alpha / (2 m_b) * sum_o b_o (log pi_o - log q_o)^2 over the valid decisions (m_b: candidates' mass)."""
    hidden_ND = forward_hidden(student, [own_context(each) for each in trajectories])[target.valid_N]
    outcomes = (each[target.valid_N] for each in (target.candidate_ids_NC, target.log_b_NO, target.log_q_NO))
    weight_VD, vocabulary = student.head.weight_VD, student.head.vocabulary
    return fused_log_residual_loss(hidden_ND, weight_VD, *outcomes, ALPHA, len(hidden_ND), vocabulary=vocabulary)


def train(trajectories: list[Trajectory], target: Target, updates: int) -> Model:
    """Train a fresh copy of the student towards the target; no anchor is loaded."""
    student = load("student")
    optimizer = torch.optim.AdamW(student.lm.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    lengths = [len(each.response_ids) for each in trajectories]
    decisions = torch.arange(sum(lengths)).split(lengths)  # those of each trajectory
    for _ in range(updates):
        rows = torch.randperm(len(trajectories))[:BATCH].tolist()
        chosen_N = torch.cat([decisions[row] for row in rows])
        loss = weave_loss(student, [trajectories[row] for row in rows], Target(*(each[chosen_N] for each in target)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return student


# ---- 6. Evaluate -----------------------------------------------------------------------------------------------------
def evaluate(model: Model, count: int) -> list[tuple[float, float]]:
    """Measure accuracy (%) and mean response tokens on each benchmark."""
    points = []
    for benchmark in BENCHMARKS:
        problems = load_problems(f"benchmarks/{benchmark}", count)
        answers = [each.response_ids for each in sample(model, problems, 1, temperature=0.6, top_p=0.95)]
        texts = model.tokenizer.batch_decode(answers, skip_special_tokens=True)
        correct = sum(grade(text, problem["answer"]) for text, problem in zip(texts, problems, strict=True))
        points.append((100 * correct / len(problems), sum(map(len, answers)) / len(problems)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning Weave in one file.")
    parser.add_argument("--prompts", type=int, default=400, help="prompts to train on")
    parser.add_argument("--updates", type=int, default=100, help=f"optimizer steps of {BATCH} trajectories")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems of each benchmark")
    sizes = parser.parse_args()
    torch.manual_seed(42)
    torch.set_num_threads(1)  # more are slower with models this small
    started = time.perf_counter()

    def say(message: str) -> None:
        print(f"{time.perf_counter() - started:4.0f} s  {message}", flush=True)

    student = load("student")
    trajectories = sample(student, load_problems("prompts", sizes.prompts), RESPONSES, temperature=1.0, top_p=1.0)
    say(f"sampled {len(trajectories)} responses")
    candidate_ids_NC, log_b_NO = find_candidates(student, trajectories)
    say(f"{len(log_b_NO)} decisions; their candidates hold {log_b_NO[:, :-1].exp().sum(dim=1).mean():.2%} of the mass")
    shifts = [find_shift(anchor, student, trajectories, candidate_ids_NC) for anchor in ANCHORS]
    say("scored both anchor pairs")

    results = {"base": evaluate(student, sizes.problems)}
    for name, weights in COMPOSITIONS.items():
        target = compose(candidate_ids_NC, log_b_NO, shifts, weights)
        results[name] = evaluate(train(trajectories, target, sizes.updates), sizes.problems)
        say(f"trained {name} on {target.valid_N.float().mean():.1%} of the decisions")

    # AES: the share of tokens saved, plus 3 x the relative gain in accuracy (or minus 5 x the loss)
    print(f"\n{'':<16}{'accuracy %':>12}{'tokens':>10}{'AES':>8}")
    for name, points in results.items():
        accuracy, tokens = (sum(column) / len(points) for column in zip(*points, strict=True))
        print(f"{name:<16}{accuracy:>12.1f}{tokens:>10.1f}{mean_aes(points, results['base']):>8.2f}")


if __name__ == "__main__":
    main()
