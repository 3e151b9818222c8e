"""Measure forgetting: python scripts/real/forgetting.py RUN DATA

Mean KL(base || policy) per token over the base's own answers to everyday instructions that have no verifier. Writes
RUN/forgetting.json; policies that are already in it are skipped.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def log_probs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Full distributions at every token of a response."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def mean_kl(base: list[torch.Tensor], policy: list[torch.Tensor]) -> float:
    """KL(base || policy) in nats, a mean over all tokens."""
    each = [(p.exp() * (p - q)).sum(dim=-1) for p, q in zip(base, policy, strict=True)]
    return float(torch.cat(each).mean())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def load(folder: Path) -> Any:
    """One model, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main(run: Path, data: Path) -> None:
    """Measure every student that is trained."""
    out = run / "forgetting.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    tokenizer = AutoTokenizer.from_pretrained(data / "smollm2")
    questions = {row["id"]: row["problem"] for row in read_rows(data / "everyday.jsonl")}
    rows = []
    for sample in read_rows(run / "eval" / "base" / "everyday" / "samples.jsonl"):
        asked = [{"role": "user", "content": questions[sample["problem"]]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, tokenizer(sample["text"], add_special_tokens=False)["input_ids"]))
    base: list[torch.Tensor] = []
    for student in sorted(run.glob("train/*/final")):
        name = student.parent.name
        if name in found:
            continue
        if not base:
            model = load(data / "smollm2")
            base = [log_probs(model, *row) for row in rows]
        model = load(student)
        found[name] = mean_kl(base, [log_probs(model, *row) for row in rows])
        print(f"{name}: {found[name]:.4f} nats per token", flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
