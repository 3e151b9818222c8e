"""The reference of keys is complete, true to the models, and the page in docs is what the command prints."""

import json
import tomllib
from pathlib import Path

import pytest

from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.views import keys
from lightning_weave.views.keys import recipe_keys

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"


def test_every_key_has_a_meaning_and_an_example_that_is_toml() -> None:
    for key in recipe_keys():
        assert key.meaning, f"{key.name}: give its field a description"
        assert tomllib.loads(key.example)[key.name.rpartition(".")[2]] is not None, key.name
        assert not key.example.endswith("= ?"), f"{key.name}: give its field an example"


def test_the_examples_of_plain_sections_make_a_recipe() -> None:
    sections: dict = {"student": {"model": "m"}, "name": "r"}
    for key in recipe_keys():
        *path, last = key.name.split(".")
        if path and path[0] in ("engine", "rollout", "reference", "score", "train", "checks", "machine"):
            table = sections
            for part in path:
                table = table.setdefault(part, {})
            table[last] = tomllib.loads(key.example)[last]
    assert check_recipe(sections).train.lora is not None


def test_one_section_can_be_asked_for() -> None:
    said = keys.run("train.lora")
    assert said.startswith("train.lora.rank  (integer; default 16)\n")
    assert said.count("train.lora.") == 5
    assert keys.run("prompts.columns").count("prompts.columns.") == 3, "an inline table is opened when asked for"
    assert "prompts.columns.id" not in keys.run("prompts")
    with pytest.raises(InputError, match=r"train.lorra: no such key.*Did you mean train.lora\?"):
        keys.run("train.lorra")


def test_the_schema_knows_the_sections_and_no_key_that_a_recipe_has_not() -> None:
    schema = json.loads(keys.schema())
    assert {"student", "anchors", "train"} <= schema["properties"].keys()
    joint = schema["$defs"]["Joint"]["properties"]
    assert "routes" not in joint, "weights by tag are written in weights"
    assert set(joint["weights"]["additionalProperties"]["type"]) == {"number", "object"}


def test_the_page_is_what_the_command_prints() -> None:
    assert PAGE.read_text() == keys.markdown(), "write it again: lweave recipe keys --markdown > docs/keys.md"


def test_there_are_about_as_many_keys_as_people_can_survey() -> None:
    assert sum(key.listed for key in recipe_keys()) <= 120
