"""A real checkpoint end to end, through the program itself (`make test-real`).

The student is SmolLM2 behind Qwen3's vocabulary, the pre-anchor SmolLM2-135M-Instruct, the post-anchor a short
fine-tune of it towards answers of one word. See scripts/real-models.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.run import Run
from pipeline.expected import check_reference, check_scores, read_cache

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]  # the first test waits for all stages

QUESTIONS = {
    "Name a river in France.": "Seine",
    "What is 3 plus 4?": "7",
    "Write a sentence about cats.": "Purr",
    "Which animal barks?": "Dog",
    "What colour is the sky?": "Blue",
    "What is the capital of Italy?": "Rome",
}
UPDATES = 8


@pytest.fixture(scope="session")
def models() -> Path:
    folder = os.environ.get("LWEAVE_REAL_MODELS")
    if not folder:
        pytest.fail("LWEAVE_REAL_MODELS does not name the directory that scripts/real-models has made: make test-real")
    return Path(folder)


@pytest.fixture(scope="session")
def brief(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fine-tune the last layers towards one word and the end of the turn."""
    folder = tmp_path_factory.mktemp("real") / "brief"
    tokenizer = AutoTokenizer.from_pretrained(models / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(models / "smollm2", dtype=torch.float32)
    model.requires_grad_(False)
    model.model.layers[-3:].requires_grad_(True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=2e-4)
    rows = []
    for question, answer in QUESTIONS.items():
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, tokenizer(f"{answer}.<|im_end|>")["input_ids"]))
    for update in range(UPDATES):
        losses = []
        for prompt, response in rows[update % 2 :: 2]:
            labels = torch.tensor([[-100] * len(prompt) + response])
            loss = model(torch.tensor([prompt + response]), labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    print(f"fine-tune: loss {np.mean(losses):.2f} after {UPDATES} updates")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recipe(models: Path, brief: Path) -> dict[str, Any]:
    source = brief.parent / "prompts.jsonl"
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "real",
        "runs": str(brief.parent / "runs"),
        "student": {"model": str(models / "student")},
        "anchors": {"one": {"post": str(brief), "pre": str(models / "smollm2")}},
        "compositions": {"brief": {"weights": {"one": 1.0}}},
        "prompts": {"source": str(source), "columns": {"prompt": "question", "answer": "answer"}},
        "rollout": {"responses": 2, "max_tokens": 64, "prompts_per_shard": 2},
        "eval": {"benchmarks": []},  # none of the few questions is held out
    }


@pytest.fixture(scope="session")
def run(recipe: dict[str, Any], brief: Path) -> Run:
    """Rollouts, reference and scores, as a user makes them."""
    file = brief.parent / "real.toml"
    file.write_text(dump_recipe(check_recipe(recipe)))
    for verb in ("rollout", "reference", "score"):
        lweave(verb, str(file))
    return Run(check_recipe(recipe), str(file))


def lweave(*arguments: str, code: int = 0) -> str:
    program = Path(sys.executable).with_name("lweave")
    result = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    print(result.stderr)
    return result.stdout


def test_the_student_writes_and_stops(run: Run, recipe: dict[str, Any]) -> None:
    rows = read_cache(run, None)
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    texts = [tokenizer.decode(row["response_ids"]) for row in rows]
    assert {row["finish"] for row in rows} == {0, 1}
    assert all(text.endswith("<|im_end|>") == (row["finish"] == 0) for text, row in zip(texts, rows, strict=True))
    assert sum(" the " in text or " a " in text for text in texts) >= 3, texts
    assert len(set(texts)) == len(texts)


def test_the_cache_is_that_of_whole_logits(run: Run) -> None:
    """A few rows, 151,669 and 49,152 tokens wide. Logits are up to 40: float32 leaves five digits."""
    assert check_reference(run, read_cache(run, None)[2:3], tolerance=2e-4) > 1
    for role in ("post", "pre"):
        rows = read_cache(run, role)
        whole, _ = check_scores(run, rows[:3], role, tolerance=2e-4)  # type: ignore[arg-type]
        print(f"{role}: {whole} of {sum(len(row['response_ids']) for row in rows[:3])} positions valid")
        assert whole > 0


def test_the_shift_is_towards_what_was_learned(run: Run, recipe: dict[str, Any]) -> None:
    """The fine-tune learned to stop: its shift on the end of turn is positive, more often than not."""
    end = AutoTokenizer.from_pretrained(recipe["student"]["model"]).eos_token_id
    shifts = []
    for post, pre in zip(read_cache(run, "post"), read_cache(run, "pre"), strict=True):
        known = (post["ids"] == end) & post["mapped"] & pre["mapped"]
        shifts += (post["score"] - pre["score"])[known].tolist()
    print(f"shift on the end of turn: mean {np.mean(shifts):+.2f} nats over {len(shifts)} decisions")
    assert len(shifts) > 10
    assert np.mean(np.array(shifts) > 0) > 0.7


def test_doctor_knows_the_pair(run: Run) -> None:
    findings = json.loads(lweave("doctor", run.arguments, "--json"))["findings"]  # twelve rows are too few for errors
    found = {(finding["about"], finding["check"]): finding for finding in findings}
    print(*(f"{finding['about']:<20}{finding['verdict']:<9}{finding['text']}" for finding in findings), sep="\n")
    assert found["anchors.one", "tokenizer"]["figures"] == {"same": False}
    assert 0.2 < found["anchors.one", "atomic"]["figures"]["share"] < 0.5
    assert found["student", "vocabulary"]["figures"] == {"tokens": 151669, "rows": 151936}
    assert found["student", "expects"]["figures"]["kind"] != "base"
    assert found["anchors.one", "positions"]["figures"]["measured_on"] == "candidates"
    assert found["anchors.one", "separation"]["figures"]["wrong"] == 12
    assert found["run", "disk"]["verdict"] == "ok"
    assert not [finding for finding in findings if finding["verdict"] == "error"]


def test_inspect_shows_a_decision(run: Run) -> None:
    text = lweave("inspect", str(run.directory), "--row", "1", "--position", "0")
    print(text)
    assert "<|im_start|>assistant\\n\n" in text
    for words in ("behaviour", "log p brief", "log p smollm2", "shift one", "target brief", " other"):
        assert words in text


def test_a_gguf_checkpoint_was_made_whole(models: Path) -> None:
    """It continues a sentence as a language model does."""
    tokenizer = AutoTokenizer.from_pretrained(models / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(models / "smollm2", dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model(ids).logits[0, -1].topk(5).indices.tolist()
    assert " Paris" in [tokenizer.decode([id]) for id in best]
