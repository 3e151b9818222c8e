"""What `make test-paper` has in place of the real hub: doubles and made-up rows under the paper's own names."""

import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hub import Hub
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.double import make_double

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZERS = {  # specials, the last of them ends a turn; words of several letters
    "qwen": (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("Question", " the", " answer", "12")),
    "deepseek": (("<｜begin▁of▁sentence｜>", "<|im_start|>", "<｜end▁of▁sentence｜>"), ("Quest", "ion", " the")),
    "olmo": (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("Question", " that", " answers")),
}
STUDENT = "Qwen/Qwen3-4B-Thinking-2507"
PAIRS = {  # post -> pre
    "Kwai-Klear/Klear-Reasoner-8B": "Qwen/Qwen3-8B-Base",
    "pixas/DECS_1.5B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "XiaomiMiMo/MiMo-7B-RL-0530": "XiaomiMiMo/MiMo-7B-Base",
}
OTHERS = {  # checkpoints of the student's own shape, post-trained elsewhere
    "Qwen/Qwen3-4B-Instruct-2507": STUDENT,
    "apple/SimpleSD-4B-thinking": STUDENT,
    "taki555/Qwen3-4B-Thinking-2507-Art": STUDENT,
    "xl-zhao/PromptCoT-2.0-SelfPlay-4B": STUDENT,
}
ALONE = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", STUDENT, "Qwen/Qwen3.5-4B", "allenai/Olmo-3-7B-Think")
PINNED = {
    "Kwai-Klear/Klear-Reasoner-8B": "ce412688b6181fc2fe2e51a3e86c60f08c08b7dc",
    "Qwen/Qwen3-8B-Base": "49e3418fbbbca6ecbdf9608b4d22e5a407081db4",
    "pixas/DECS_1.5B": "3a4a92d47e3dda584e03e2d08f8164189af6bea6",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "ad9f0ae0864d7fbcd1cd905e3c6c5b069cc8b562",
}
CODE_DATA = "f6c935197e097ab144d5517a62cc498e0209e060"
SEES = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MIMO = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class MiMoConfig(Qwen2Config):
    model_type = "mimo"

class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
"""


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that can spell anything."""
    specials, words = TOKENIZERS[kind]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = {}
    for word in words:
        pieces = [by_bytes.pre_tokenize_str(letter)[0][0] for letter in word]
        merges |= {("".join(pieces[:length]), pieces[length]): None for length in range(1, len(pieces))}
    tokens = sorted({*pre_tokenizers.ByteLevel.alphabet(), *("".join(pair) for pair in merges)})
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = by_bytes
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[-1], pad_token=specials[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.chat_template = CHATML.replace("<|im_end|>", specials[-1])
    return tokenizer


def push_models(hub: Hub, place: Path) -> None:
    """Serve a double of every model of the paper, made of its own configuration with a small vocabulary."""
    lines = {name: (name,) for name in ALONE} | {pre: (pre,) for pre in PAIRS.values()}
    lines |= {name: (before, name) for name, before in (PAIRS | OTHERS).items()}
    for name in lines:
        _save_original(name, place / "originals" / name)
    for name, line in lines.items():
        trusted = name.startswith("XiaomiMiMo/")
        lineage = [Checkpoint(str(place / "originals" / one), trust_remote_code=trusted) for one in line]
        make_double(lineage, place / "doubles" / name)
        double = {file.name: file.read_bytes() for file in (place / "doubles" / name).iterdir()}
        hub.push_files(name, double, PINNED.get(name))


def _save_original(name: str, folder: Path) -> None:
    shipped = files("lightning_weave.plan") / "configs" / f"{OTHERS.get(name, name).replace('/', '--')}.json"
    config = json.loads(shipped.read_text(encoding="utf-8"))
    families = {"allenai": "olmo", "pixas": "deepseek", "deepseek-ai": "deepseek"}
    tokenizer = make_tokenizer(families.get(name.partition("/")[0], "qwen"))
    tokenizer.save_pretrained(folder)
    ids = {"vocab_size": -(-len(tokenizer) // 16) * 16, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    if "text_config" in config:  # as the real one lies on the hub, with a part that sees
        config["text_config"] |= ids
        config |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": SEES}
    else:
        config |= ids
    if config["model_type"] == "mimo":
        config["auto_map"] = {"AutoConfig": "own.MiMoConfig", "AutoModelForCausalLM": "own.MiMoForCausalLM"}
        (folder / "own.py").write_text(MIMO)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))


def push_data(hub: Hub) -> None:
    """Serve the prompts and the five benchmarks in the form of the real ones, with rows made up here."""
    questions = [f"Let x = {n} and y = {3 * n + 1}. Find x + y, then multiply by {n % 7 + 2}." for n in range(60)]
    answers = [str((4 * n + 1) * (n % 7 + 2)) for n in range(60)]
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"content": question, "role": "user"}],
            "reward_model": {"ground_truth": json.dumps([answer]), "style": "rule"},
            "data_source": "math",
        }
        for question, answer in zip(questions[:40], answers, strict=False)
    ]
    _push(hub, "Skywork/Skywork-OR1-RL-Data", {"data/math-00000-of-00001.parquet": _parquet(rows)})
    rows = [
        {
            "prompt": [{"content": f"Write a program that reads n and prints n plus {n}.", "role": "user"}],
            "hash": f"{n:08x}",
            "ability": "code",
        }
        for n in range(40)
    ]
    _push(hub, "Kwai-Klear/KlearReasoner-CodeSub-15K", {"default/train/0000.parquet": _parquet(rows)}, CODE_DATA)
    for name, identity, first in (
        ("HuggingFaceH4/aime_2024", "id", 100),
        ("MathArena/aime_2025", "problem_idx", 200),
        ("MathArena/hmmt_feb_2025", "problem_idx", 300),
    ):
        rows = [
            {identity: n, "problem": f"Find the remainder when {n + first}^2 is divided by 1000.", "answer": str(n)}
            for n in range(1, 31)
        ]
        _push(hub, name, {"data/train-00000-of-00001.parquet": _parquet(rows)})
    releases = {"test5.jsonl": _contests(279, "2024-11-02", 3000), "test6.jsonl": _contests(131, "2025-02-15", 4000)}
    _push(hub, "livecodebench/code_generation_lite", releases)


def _push(hub: Hub, name: str, content: Mapping[str, bytes], commit: str | None = None) -> None:
    hub.push_files(f"datasets/{name}", {"README.md": b"Made up.\n", **content}, commit)


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def _contests(count: int, day: str, first: int) -> bytes:
    tests = json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])
    rows = [
        {
            "question_title": f"Problem {n}",
            "question_content": f"Read n and print n + {n}, {day} of contest {n // 4}.",
            "platform": "atcoder",
            "question_id": str(n),
            "contest_id": f"c{n // 4}",
            "contest_date": f"{day}T00:00:00",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": tests,
            "private_test_cases": tests,
            "metadata": "{}",
        }
        for n in range(first, first + count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
