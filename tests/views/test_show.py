"""The resolved recipe says of every value where it came from, and means the same by itself."""

from pathlib import Path

from lightning_weave.config import load_recipe
from lightning_weave.views import keys as show

BASE = """
name = "base"
[student]
model = "m"
[anchors."v1.5"]
post = "a"
pre = "b"
aliases = { "<|im_end|>" = "</s>" }
[compositions.only]
weights = { "v1.5" = 1.0 }
[prompts]
system = "Answer\\nbriefly."
"""
OVER = '[train]\nlora = { rank = 4 }\n[prompts]\nchat = true\n[anchors."v1.5"]\naliases = { "<end>" = "</s>" }\n'


def test_every_value_has_its_source_and_the_text_is_the_recipe(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("base.toml", "over.toml")]
    for file, text in zip(files, (BASE, OVER), strict=True):
        Path(file).write_text(text)
    sets = ["train.epochs=3", 'compositions.only.weights."v1.5"=1.0', "eval.budgets=[1, 2]"]
    said = show.show(files, sets)
    source = {line.partition(" = ")[0]: line.rpartition("  # ")[2] for line in said.splitlines() if " = " in line}
    assert source["epochs"] == source['"v1.5"'] == source["budgets"] == "--set"
    assert source["rank"] == source['"<end>"'] == files[1]
    assert source["model"] == source["post"] == files[0]
    assert source["candidates"] == source["learning_rate"] == "default"
    assert said.count("# as prompts.system") == said.count("# as prompts.chat") == 1
    assert '[anchors."v1.5".aliases]' in said
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(said)
    assert load_recipe([resolved]) == load_recipe(files, sets)
