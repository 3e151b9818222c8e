"""Small checkpoints of real architectures with tokenizers that differ, and recipes over them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_weave.config import check_recipe
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import run as flow
from models.small_models import small_model
from tokens.samples import byte_level, sentencepiece

QUIET = Progress(quiet=True)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz0123456789.,?![]<>/|", "\n"]


def student_tokenizer() -> Any:
    """Byte-level, with pieces that only it has, half a character, two stops, and `é!`, which has no spelling."""
    merges = ["t h", "th e", "_ the", "h a", "ha t", "a n", "æ ĺ", "a b"]
    tokenizer = byte_level(merges, added=("<think>", "é!"), special=("<|end|>", "<|stop|>", "<|pad|>"))
    tokenizer.eos_token, tokenizer.pad_token = "<|end|>", "<|pad|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_tokenizer() -> Any:
    """Byte-level too, with other merges and ids, its own stop and begin tokens, and the student's `<|stop|>`."""
    tokenizer = byte_level(["a b", "ab c", "t h", "th e"], special=("</s>", "<s>", "<|stop|>", "<pad>"))
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token = "</s>", "<s>", "<pad>"
    tokenizer.chat_template = "<s>" + TEMPLATE.replace("[me]", "[it]")
    return tokenizer


def piece_tokenizer() -> Any:
    """SentencePiece-like, with byte fallback."""
    tokenizer = sentencepiece([*LETTERS, "th", "the", "an"], special=("<unk>", "<bos>", "<eos>"))
    tokenizer.eos_token, tokenizer.bos_token = "<eos>", "<bos>"
    return tokenizer


TOKENIZERS = {"student": student_tokenizer, "bytes": byte_tokenizer, "pieces": piece_tokenizer}


def save_checkpoint(
    folder: Path, architecture: str, tokenizer: str, seed: int, limit: int = 64, stops: int = 1, padding: int = 5
) -> Path:
    """Save a random model; with many `stops`, responses end often."""
    made = TOKENIZERS[tokenizer]()
    eos = made.eos_token_id
    model = small_model(
        architecture, seed, vocab_size=len(made) + padding, max_position_embeddings=limit, eos_token_id=eos
    )
    if stops > 1:
        model.generation_config.eos_token_id = [eos, *range(40, 40 + stops - 1)]
        model.generation_config.top_k = 1
        model.generation_config.do_sample = True
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int = 6) -> Path:
    words = ["the hat", "an ab abc", "是 that", "e", "<think> the the 是", "what is 1+2? the answer"]
    rows = [{"prompt": f"{words[n % len(words)]}{n}", "answer": str(n), "id": f"p{n}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_recipe(root: Path, student: str, anchor: str, tokenizer: str, **changes: Any) -> dict[str, Any]:
    """A student, one anchor pair, and a composition. `changes` go into the sections of that name."""
    root.mkdir(parents=True, exist_ok=True)
    stops = changes.pop("stops", 12)
    limit = changes.pop("anchor_limit", 64)
    recipe: dict[str, Any] = {
        "name": "small",
        "runs": str(root / "runs"),
        "student": {"model": str(save_checkpoint(root / "student", student, "student", 1, stops=stops))},
        "anchors": {
            "one": {
                "post": str(save_checkpoint(root / "post", anchor, tokenizer, 2, limit)),
                "pre": str(save_checkpoint(root / "pre", anchor, tokenizer, 3, limit)),
            }
        },
        "compositions": {"only": {"weights": {"one": 1.0}}},
        "prompts": {
            "source": str(save_prompts(root / "prompts.jsonl")),
            "columns": {"prompt": "prompt", "answer": "answer", "id": "id"},
            "format": "plain",
            "chat": False,
        },
        "rollout": {"responses": 2, "max_tokens": 12, "prompts_per_shard": 4, "batch_size": 3},
        "reference": {"candidates": 4},
        "score": {"token_budget": 90},
        "eval": {"benchmarks": []},
        "machine": {"threads": 1},
    }
    for section, values in changes.items():
        recipe.setdefault(section, {}).update(values)
    return recipe


def run_of(recipe: Mapping[str, Any]) -> Run:
    return Run(check_recipe(recipe), "small.toml")


def make_cache(recipe: Mapping[str, Any]) -> Run:
    run = run_of(recipe)
    flow.make_cache(run, QUIET)
    return run
