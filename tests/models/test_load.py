"""Checkpoints as they are found on disk: whole, pickled, incomplete, with many ways to say stop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint, context_limit
from lightning_weave.models.hub import check_weights, resolve_model
from tiny import save_model

WORDS = ["<unk>", "</s>", "<pad>", "a", "b", "c"]
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|done|>' if m.role == 'assistant' else '<|sep|>' }}\n{% endfor %}"
)


def word_tokenizer(special: tuple[str, ...] = (), plain: tuple[str, ...] = (), template: str | None = None) -> Any:
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    small_model("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return Checkpoint(str(path)).load(dtype, torch.device("cpu"))


def stop_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    tokenizer.save_pretrained(path)
    return Checkpoint(str(path)).stop_ids


def edit_json(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **entries}))


def test_a_loaded_model_is_the_saved_one_without_gradients(checkpoint: Path) -> None:
    model, ids = load(checkpoint), torch.tensor([[3, 7, 11]])
    torch.testing.assert_close(model(ids).logits, small_model("llama")(ids).logits, rtol=0, atol=0)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert context_limit(model.config) == 64


def test_the_dtype_is_the_one_asked_for(checkpoint: Path) -> None:
    assert Checkpoint(str(checkpoint)).dtype == torch.float32
    assert load(checkpoint, torch.bfloat16).dtype == torch.bfloat16
    edit_json(checkpoint / "config.json", dtype="bfloat16")
    assert Checkpoint(str(checkpoint)).dtype == torch.bfloat16
    assert load(checkpoint).dtype == torch.float32


def test_the_dtype_is_read_from_the_weights_where_the_config_is_silent(checkpoint: Path) -> None:
    small_model("llama").half().save_pretrained(checkpoint)
    edit_json(checkpoint / "config.json", dtype=None, torch_dtype=None)
    assert Checkpoint(str(checkpoint)).dtype == torch.float16


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    torch.save(weights, checkpoint / "pytorch_model.bin")
    load(checkpoint)  # never read while there are safetensors
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"pytorch_model\.bin is pickled.*safetensors"):
        load(checkpoint)
    (checkpoint / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="no weights"):
        load(checkpoint)


def test_weights_that_lack_a_tensor_are_refused(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack 1 tensors.*up_proj"):
        load(checkpoint)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(InputError, match="tokenizer"):
        _ = Checkpoint(str(tmp_path)).tokenizer
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="LoRA adapter"):
        check_weights(tmp_path)
    with pytest.raises(InputError, match="no base_model_name_or_path"):
        load(tmp_path)


def test_names_resolve_to_directories_or_say_how_to_get_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(checkpoint)) == checkpoint
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"nobody/nothing.*hf download nobody/nothing"):
        resolve_model("nobody/nothing")
    with pytest.raises(InputError, match="no such directory"):
        resolve_model("./not/here")


def test_every_way_to_say_stop_is_heard(checkpoint: Path) -> None:
    tokenizer = word_tokenizer(special=("<|start|>", "<|done|>", "<|sep|>", "<|eot_id|>"), template=CHATML)
    edit_json(checkpoint / "config.json", eos_token_id=3, text_config={"eos_token_id": [4]})
    edit_json(checkpoint / "generation_config.json", eos_token_id=[4, 5], top_k=1)
    done, eot = tokenizer.convert_tokens_to_ids(["<|done|>", "<|eot_id|>"])
    assert stop_ids(checkpoint, tokenizer) == {1, 3, 4, 5, done, eot}


def test_an_ordinary_token_that_looks_like_an_end_of_turn_does_not_stop(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", eos_token_id=None)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    tokenizer = word_tokenizer(plain=("<|im_end|>", "<|done|>"), template=CHATML)
    assert stop_ids(checkpoint, tokenizer) == {1}


def test_a_template_that_cannot_be_rendered_is_no_obstacle(checkpoint: Path) -> None:
    tokenizer = word_tokenizer(special=("<|im_end|>",), template="{{ raise_exception('no') }}")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_ids(checkpoint, tokenizer)


def test_the_vocabulary_ends_with_the_highest_id(checkpoint: Path) -> None:
    assert Checkpoint(str(checkpoint)).vocabulary == len(WORDS)
    word_tokenizer(special=("<x>",), plain=("<y>",)).save_pretrained(checkpoint)
    assert Checkpoint(str(checkpoint)).vocabulary == len(WORDS) + 2


def test_an_edited_chat_template_is_used_at_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(save_model(tmp_path / "model", "student", "qwen3", seed=0)))
    template = tmp_path / "model/chat_template.jinja"
    turns = [{"role": "user", "content": "1+1"}]
    for text in ("old:{{ messages[0].content }}", "new:{{ messages[0].content }}"):
        template.write_text(text)
        assert checkpoint.tokenizer.apply_chat_template(turns, tokenize=False) == f"{text[:4]}1+1"
