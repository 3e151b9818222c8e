"""Models by name."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Model:
    arguments: dict[str, Any]

    @classmethod
    def create_from_arg_obj(cls, arguments: dict[str, Any], others: dict[str, Any]) -> "Model":
        return cls({**arguments, **others})


def get_model(name: str) -> type[Model]:
    assert name == "hf"
    return Model
