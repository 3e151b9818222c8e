"""Measure a model before anything is trained: accuracy of greedy answers, and how long they took.

python scripts/real/measure.py gym MODEL OUT: small problems of reasoning-gym, which must be installed.
python scripts/real/measure.py shots MODEL PROBLEMS OUT: a base model on our problems, after four worked examples.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_weave.config import Grading
from lightning_weave.grading.graders import grade_answer
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.sampler import HFSampler
from lightning_weave.prompts.render import encode, render
from lightning_weave.types import Request, SamplingSettings

# Settings small enough for the student, and whether the answer is a number.
GYM: dict[str, tuple[dict[str, Any], bool]] = {
    "basic_arithmetic": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, True),
    "calendar_arithmetic": ({"tasks": ["is_leap_year"]}, False),
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, True),
    "coin_flip": ({"min_trials": 2, "max_trials": 3}, True),
    "family_relationships": ({"min_family_size": 4, "max_family_size": 4}, False),
    "gcd": ({"max_value": 20}, True),
    "gsm_symbolic": ({}, True),
    "lcm": ({"max_value": 12}, True),
    "leg_counting": ({"min_animals": 1, "max_animals": 1, "max_instances": 3}, True),
    "letter_counting": ({"min_words": 2, "max_words": 3}, True),
    "products": ({"min_digits": 1, "max_digits": 1}, True),
    "simple_equations": ({"min_terms": 2, "max_terms": 2, "max_value": 9}, True),
    "spell_backward": ({"min_word_len": 3, "max_word_len": 3}, False),
    "syllogism": ({}, False),
}
EACH = 12
SHOTS = """\
Question: Kim has 3 pens and gets 4 more. How many pens does Kim have now?
Answer: 3 + 4 = 7

Question: What is 21 + 17?
Answer: 38

Question: What is 5 times 9?
Answer: 45

Question: What is twice 31?
Answer: 62

"""


def answers(checkpoint: Checkpoint, prompts: Sequence[list[int]], stop: frozenset[int], max_tokens: int) -> list[str]:
    """Greedy answers."""
    model = checkpoint.load(torch.float32, torch.device("cpu"))
    sampler = HFSampler(model, stop, checkpoint.vocabulary, batch_size=96)
    asked = [Request(ids, number, 0) for number, ids in enumerate(prompts)]
    found = sampler.sample(asked, SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=0))
    return [checkpoint.tokenizer.decode(response.ids, skip_special_tokens=True) for response in found]


def last_number(text: str) -> str:
    """The number that the verifier takes as the answer."""
    return grade_answer(Grading(kind="numeric"), text, "0")[0] or ""


def last_word(text: str) -> str:
    """The last word, without punctuation."""
    return (re.findall(r"[A-Za-z-]+", text) or [""])[-1]


def gym(model: str, out: Path) -> None:
    """Share of right answers by task."""
    import reasoning_gym

    checkpoint = Checkpoint(model)
    tasks = {
        name: reasoning_gym.create_dataset(name, size=EACH, seed=1, **settings) for name, (settings, _) in GYM.items()
    }
    entries = [(name, entry) for name, task in tasks.items() for entry in task]
    texts = [render([{"role": "user", "content": entry["question"]}], checkpoint.tokenizer) for _, entry in entries]
    said = answers(checkpoint, encode(texts, checkpoint.tokenizer, rendered=True), checkpoint.stop_ids, 64)
    right = dict.fromkeys(GYM, 0)
    for (name, entry), text in zip(entries, said, strict=True):
        answer = last_number(text) if GYM[name][1] else last_word(text)
        right[name] += tasks[name].score_answer(answer=answer, entry=entry) == 1.0
    out.write_text(json.dumps({"problems": EACH, "right": right}, indent=1))


def shots(model: str, problems: Path, out: Path) -> None:
    """Accuracy on our problems, one line per answer."""
    checkpoint = Checkpoint(model)
    rows = [json.loads(line) for line in problems.read_text("utf-8").splitlines()]
    texts = [f"{SHOTS}Question: {row['problem']}\nAnswer:" for row in rows]
    lines = frozenset(id for text, id in checkpoint.tokenizer.get_vocab().items() if text.startswith("\n"))
    began = time.monotonic()
    prompts = encode(texts, checkpoint.tokenizer, rendered=False)
    said = answers(checkpoint, prompts, checkpoint.stop_ids | lines, 24)
    right = [
        grade_answer(Grading(kind="numeric"), text, row["answer"])[1] for row, text in zip(rows, said, strict=True)
    ]
    kinds = sorted({row["kind"] for row in rows})
    by_kind = {kind: sum(ok for ok, row in zip(right, rows, strict=True) if row["kind"] == kind) for kind in kinds}
    note = {"problems": len(rows), "right": sum(right), "by_kind": by_kind, "seconds": time.monotonic() - began}
    out.write_text(json.dumps(note | {"first": said[:8]}, indent=1))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "gym":
        gym(arguments[0], Path(arguments[1]))
    else:
        shots(arguments[0], *map(Path, arguments[1:]))
