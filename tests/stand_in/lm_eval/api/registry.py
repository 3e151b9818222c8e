"""Models by name."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Model:
    arguments: dict[str, Any]
    tokenizer: Any = None

    @classmethod
    def create_from_arg_obj(cls, arguments: dict[str, Any], others: dict[str, Any]) -> "Model":
        from transformers import AutoTokenizer

        return cls({**arguments, **others}, AutoTokenizer.from_pretrained(arguments["pretrained"]))


def get_model(name: str) -> type[Model]:
    assert name == "hf"
    return Model
