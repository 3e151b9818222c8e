"""What doctor says, against counts made by hand and against what scoring then gives."""

import json
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lightning_weave.checks.findings import Finding, Level
from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.models.weights import find_output_matrix, untrained_rows
from lightning_weave.stages import rollout
from lightning_weave.views import doctor
from models.small_models import small_model
from pipeline.expected import Words, image, read_cache
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of


def look(recipe: dict[str, Any]) -> dict[tuple[str, str], Finding]:
    return {(finding.about, finding.check): finding for finding in doctor.examine(run_of(recipe))}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    section = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "chat": False}
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval=section)


def words(recipe: dict[str, Any]) -> tuple[Words, Words]:
    return Words.of(Path(recipe["student"]["model"])), Words.of(Path(recipe["anchors"]["one"]["post"]))


def test_before_anything_is_cached(recipe: dict[str, Any]) -> None:
    found = look(recipe)
    student, anchor = words(recipe)
    alone = [id for id in student.vocabulary.values() if image(id, student, anchor) is None]
    assert found["anchors.one", "tokenizer"].figures == {"same": False}
    assert found["anchors.one", "atomic"].figures["share"] == pytest.approx(1 - len(alone) / len(student.vocabulary))
    assert set(found["anchors.one", "special tokens"].figures["tokens"]) == {"<think>", "é!", "<|end|>", "<|pad|>"}
    vocabulary = found["student", "vocabulary"]
    assert vocabulary.figures == {"tokens": 269, "rows": 274}
    assert "5 belong to no token" in vocabulary.text
    positions = found["anchors.one", "positions"]
    assert positions.text.startswith("at most ")
    # Prompts and answers in the student's tokens: all but the first of each are decisions.
    rows = [json.loads(line) for line in Path(recipe["prompts"]["source"]).read_text().splitlines()]
    encoded = [student.tokenizer(row[key])["input_ids"] for row in rows for key in ("prompt", "answer")]
    decisions = [
        id for prompt, answer in zip(encoded[::2], encoded[1::2], strict=True) for id in [*prompt, *answer][1:]
    ]
    assert positions.figures["share"] == pytest.approx(np.mean([id not in alone for id in decisions]))
    stop = found["anchors.one", "end of turn"]
    assert stop.verdict == "warning"
    assert 'add to [anchors.one]: aliases = { "<|end|>" = "</s>" }' in stop.text
    disk = found["run", "disk"]
    assert disk.figures["positions"] == 6 * 2 * 12
    assert not (Path(recipe["runs"]) / "small").exists()


@pytest.mark.slow
def test_a_cached_run_is_measured(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    found = look(recipe)
    post, pre = read_cache(run, "post"), read_cache(run, "pre")
    mapped = np.concatenate([one["mapped"] & two["mapped"] for one, two in zip(post, pre, strict=True)])
    positions = found["anchors.one", "positions"]
    assert positions.figures == {
        "share": mapped.all(axis=1).mean(),
        "positions": len(mapped),
        "measured_on": "candidates",
    }
    ids = np.concatenate([row["ids"] for row in post])
    counts = {id: int((ids == id).sum()) for id in np.unique(ids[~mapped])}
    student, _ = words(recipe)
    breaking = found["anchors.one", "breaking tokens"].figures["tokens"]
    expected = {student.tokenizer.convert_ids_to_tokens(int(id)).replace("Ġ", " "): n for id, n in counts.items()}
    assert sorted(breaking.values(), reverse=True) == sorted(expected.values(), reverse=True)[:10]
    assert {text for text in ("hat", " the", "<|end|>") if text in expected} <= set(breaking)
    cut = found["rollout", "truncated"].figures
    assert cut["share"] == pytest.approx(np.mean([row["finish"] == 1 for row in post]))
    assert cut["tokens"] == pytest.approx(np.mean([len(row["response_ids"]) for row in post]))
    ends = [(one["mapped"] & two["mapped"])[-1].all() for one, two in zip(post, pre, strict=True) if one["finish"] == 0]
    assert found["anchors.one", "end of turn"].figures["masked"] == pytest.approx(1 - np.mean(ends))
    disk = found["run", "disk"].figures
    assert disk["positions"] == len(mapped)
    shards = [shard for shard in run.directory.rglob("*.safetensors") if "grades" not in shard.parent.name]
    by_position = {"response_ids", "ids", "logp", "other_logp", "sampled_logp", "mapped", "mass"}
    arrays = [array for shard in shards for name, array in load_file(shard).items() if name in by_position]
    assert disk["bytes"] == sum(array.nbytes for array in arrays)
    assert disk["written"] == sum(shard.stat().st_size for shard in shards)


@pytest.mark.slow
def test_unscored_candidates_say_the_same_as_scores(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    scored = look(recipe)
    for name in ("post", "pre"):
        for path in (run.directory / "score" / name).iterdir():
            path.unlink()
    unscored = look(recipe)
    for check in ("positions", "end of turn", "breaking tokens"):
        assert unscored["anchors.one", check] == scored["anchors.one", check]
    assert ("anchors.one", "separation") not in unscored


@pytest.mark.slow
def test_the_alias_line_does_what_it_promises(recipe: dict[str, Any]) -> None:
    recipe["reference"]["candidates"] = 9
    recipe["rollout"] |= {"responses": 8, "max_tokens": 24}
    make_cache(recipe)
    finding = look(recipe)["anchors.one", "end of turn"]
    assert finding.verdict == "warning"
    assert finding.figures["alias"] in finding.text
    recipe["anchors"]["one"] |= tomllib.loads(finding.figures["alias"])
    make_cache(recipe)
    after = look(recipe)["anchors.one", "end of turn"]
    assert after.figures["masked"] == pytest.approx(finding.figures["masked_with_alias"])
    assert after.figures["masked"] < finding.figures["masked"]
    assert "alias" not in after.figures


@pytest.mark.slow
def test_a_warning_needs_more_than_five_percent(recipe: dict[str, Any]) -> None:
    recipe["anchors"]["one"]["validity"] = "candidate"
    recipe["rollout"] |= {"responses": 8, "max_tokens": 24}
    student, anchor = words(recipe)
    run = make_cache(recipe)
    ends = [row["response_ids"][-1] for row in read_cache(run) if row["finish"] == 0]
    unseen = [row["response_ids"][-1] not in row["ids"][-1] for row in read_cache(run) if row["finish"] == 0]
    unmapped = [image(id, student, anchor) is None for id in ends]
    finding = look(recipe)["anchors.one", "end of turn"]
    share = np.mean([lost or hidden for lost, hidden in zip(unmapped, unseen, strict=True)])
    assert finding.figures["masked"] == pytest.approx(share)
    assert (finding.verdict == "warning") == (share > 0.05)


@pytest.mark.slow
def test_the_same_tokenizer_has_nothing_to_say(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "llama", "qwen3", "student")
    make_cache(recipe)
    found = look(recipe)
    assert found["anchors.one", "tokenizer"].figures == {"same": True}
    for check in ("tokenizer", "atomic", "positions", "special tokens", "end of turn", "bos"):
        assert found["anchors.one", check].verdict == "ok", check
    assert ("anchors.one", "breaking tokens") not in found


def test_rollouts_of_another_recipe_are_not_looked_at(recipe: dict[str, Any]) -> None:
    rollout.rollout(run_of(recipe), QUIET)
    assert look(recipe)["anchors.one", "positions"].figures["measured_on"] == "rollouts"
    recipe["rollout"]["seed"] = 3
    finding = look(recipe)["anchors.one", "positions"]
    assert finding.figures["measured_on"] == "prompts"
    assert "rollout/ is missing" in finding.text


def test_gemma_wants_a_bos(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "gemma3", "pieces")
    finding = look(recipe)["anchors.one", "bos"]
    assert finding.verdict == "warning"
    assert "gemma3_text models break" in finding.text
    assert "Set bos = true in [anchors.one]" in finding.text
    recipe["anchors"]["one"]["bos"] = True
    assert look(recipe)["anchors.one", "bos"].verdict == "ok"


def test_what_is_missing_is_said_and_the_rest_still_checked(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["anchors"]["gone"] = {"post": str(tmp_path / "gone"), "pre": recipe["anchors"]["one"]["pre"]}
    recipe["anchors"]["twin"] = {"post": recipe["anchors"]["one"]["pre"], "pre": recipe["anchors"]["one"]["pre"]}
    recipe["compositions"]["all"] = {"weights": {"one": 0.5, "gone": 0.5}}
    recipe["compositions"]["two"] = {"weights": {"one": 0.5, "twin": 0.5}}
    recipe["prompts"]["chat"] = True
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    tokenizer.chat_template = None
    (Path(recipe["student"]["model"]) / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(recipe["student"]["model"])
    found = look(recipe)
    assert found["anchors.gone.post", "checkpoint"].verdict == "error"
    assert "no such directory" in found["anchors.gone.post", "checkpoint"].text
    assert "same model" in found["anchors.twin", "checkpoints"].text
    assert found["anchors.one", "atomic"].verdict == "ok"
    assert found["student", "chat template"].verdict == "error"
    assert found["prompts", "prompts"].verdict == "error"  # none can be rendered
    assert "chat = false" in found["student", "chat template"].text
    assert ("compositions.all", "positions") not in found


def test_native_prompts_without_a_template_are_said(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "pieces")
    recipe["anchors"]["one"]["prompt"] = "native"
    assert look(recipe)["anchors.one", "chat template"].verdict == "error"


def test_dtypes_are_read_from_the_checkpoint(recipe: dict[str, Any]) -> None:
    folder = Path(recipe["anchors"]["one"]["post"])
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert look(recipe)["anchors.one.post", "dtype"].figures["saved"] == "bfloat16"


@pytest.mark.slow
def test_untrained_rows_are_reported_where_candidates_meet_them(recipe: dict[str, Any]) -> None:
    folder = Path(recipe["anchors"]["one"]["pre"])
    anchor = AutoTokenizer.from_pretrained(folder)
    stop = anchor.convert_tokens_to_ids("<|stop|>")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][anchor.pad_token_id] = weights["lm_head.weight"][stop] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    recipe["reference"]["candidates"] = 60
    run = make_cache(recipe)
    finding = look(recipe)["anchors.one", "untrained rows"]
    assert set(finding.figures["tokens"]) == {"<|stop|>", "<pad>"}
    student, _ = words(recipe)
    own = student.id_of(b"<|stop|>", True)
    touched = np.concatenate([(row["ids"] == own).any(axis=1) for row in read_cache(run)])
    assert finding.figures["share"] == pytest.approx(touched.mean())
    assert finding.verdict == "warning"


def test_the_alias_line_knows_an_untrained_end(recipe: dict[str, Any]) -> None:
    folder = Path(recipe["anchors"]["one"]["pre"])
    anchor = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][anchor.eos_token_id] *= 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    finding = look(recipe)["anchors.one", "end of turn"]
    assert "that row looks untrained" in finding.text
    recipe["anchors"]["one"] |= tomllib.loads(finding.figures["alias"])
    assert recipe["anchors"]["one"]["untrained"] == "keep"
    make_cache(recipe)  # without that word it would be refused


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_rows_that_matter_are_read(tmp_path: Path, tied: bool) -> None:
    """From one file or several, tied or not: the same rows as in the loaded matrix."""
    model = small_model("qwen3" if tied else "llama", vocab_size=4000, tie_word_embeddings=tied)
    head = model.get_output_embeddings().weight.data
    head[3990] = head[3991] * 2
    head[17] *= 1e-5
    head[3800] = head[3801] + 0.1 * head[3802]
    special = [17, 18, 3800, 3801, *range(3985, 4000), 5000]
    assert untrained_rows(head, special) == {17, 3990, 3991}
    for size in ("5GB", "100KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        matrix = find_output_matrix(tmp_path / size)
        assert matrix is not None
        assert matrix.shape[0] == 4000
        assert untrained_rows(matrix, special) == {17, 3990, 3991}
        torch.testing.assert_close(matrix.read(slice(5, 99)), head[5:99])
    assert (tmp_path / "100KB" / "model.safetensors.index.json").exists()
    assert find_output_matrix(tmp_path) is None


def test_no_other_weights_are_read(recipe: dict[str, Any]) -> None:
    for model in (recipe["student"]["model"], *recipe["anchors"]["one"].values()):
        path = Path(model) / "model.safetensors"
        kept = {
            name: tensor
            for name, tensor in load_file(path).items()
            if name in ("lm_head.weight", "model.embed_tokens.weight")
        }
        save_file(kept, path, metadata={"format": "pt"})
    assert look(recipe)["anchors.one", "atomic"].verdict == "ok"


@pytest.mark.parametrize(("validity", "candidates"), [("candidate", 200), ("position", 30)])
def test_separation_is_that_of_all_pairs(
    recipe: dict[str, Any], tmp_path: Path, validity: str, candidates: int
) -> None:
    """Own trajectories, some right and some wrong; the area under the curve counted pair by pair."""
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    rows = []
    for n in range(12):
        for response in range(3):
            text = "ab " * (n % 4) + rf"\boxed{{{n if (n + response) % 3 else n + 1}}}"
            ids = {"prompt_ids": tokenizer(f"q{n}?")["input_ids"], "response_ids": tokenizer(text)["input_ids"]}
            rows.append({**ids, "answer": str(n)} if n < 10 else ids)
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["rollout"] |= {"from": str(tmp_path / "own.jsonl"), "responses": 3}
    recipe["reference"]["candidates"] = candidates
    recipe["anchors"]["one"]["validity"] = validity
    run = make_cache(recipe)
    figures = look(recipe)["anchors.one", "separation"].figures
    shifts, right, lengths = [], [], []
    for post, pre in zip(read_cache(run, "post"), read_cache(run, "pre"), strict=True):
        if post["prompt"] >= 10:
            continue
        total = 0.0
        for t, token in enumerate(post["response_ids"]):
            mapped = post["mapped"][t] & pre["mapped"][t]
            if mapped.all() or validity == "candidate":
                total += sum((post["score"][t] - pre["score"][t])[mapped & (post["ids"][t] == token)])
        shifts.append(total)
        lengths.append(len(post["response_ids"]))
        right.append((post["prompt"] + post["response"]) % 3 != 0)
    assert len(set(shifts)) > (10 if validity == "candidate" else 3)
    good, bad = ([shift for shift, ok in zip(shifts, right, strict=True) if ok is wanted] for wanted in (True, False))
    wins = [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    assert figures["right"] == 20
    assert figures["wrong"] == 10
    assert figures["auc"] == pytest.approx(np.mean(wins))
    assert figures["length_correlation"] == pytest.approx(spearmanr(shifts, lengths).statistic, abs=1e-6)


def test_the_command_prints_lines_or_json(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(dump_recipe(check_recipe(recipe)))
    plain = CliRunner().invoke(app, ["doctor", str(path)])
    assert plain.exit_code == 0, plain.output
    assert "anchors.one\n" in plain.stdout
    assert "  warning  end of turn: " in plain.stdout
    parsed = json.loads(CliRunner().invoke(app, ["doctor", str(path), "--json"]).stdout)
    checks = {(finding["about"], finding["check"]): finding for finding in parsed["findings"]}
    assert checks["anchors.one", "end of turn"]["verdict"] == "warning"
    assert checks["anchors.one", "atomic"]["figures"]["share"] > 0.9
    assert {finding["verdict"] for finding in parsed["findings"]} == {"ok", "note", "warning"}


def test_findings_are_shown_by_section_and_those_with_an_error_first() -> None:
    out = StringIO()
    verdicts: dict[str, Level] = {"anchors.x.post": "ok", "run": "ok", "compositions.a": "error", "student": "warning"}
    verdicts |= {"anchors.b": "ok", "anchors.x": "ok"}
    doctor.show([Finding(about, "check", verdict, "text") for about, verdict in verdicts.items()], Console(file=out))
    *lines, counts = out.getvalue().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        *("compositions.a", "student", "anchors.x", "anchors.x.post", "anchors.b", "run")
    ]
    assert counts == "4 ok, 0 notes, 1 warning, 1 error"


def test_tokens_cannot_write_to_the_terminal() -> None:
    out = StringIO()
    finding = Finding("student", "stop tokens", "note", "[bold]x[/bold] [link=y]")
    doctor.show([finding], Console(file=out, width=40))
    assert "[bold]x[/bold] [link=y]" in out.getvalue()


def test_a_terminal_gets_long_lines_under_one_another_and_a_pipe_one_line() -> None:
    finding = Finding(
        "student", "stop tokens", "note", "a few words that need " + 3 * "more room than there is " + "end"
    )
    shown = {}
    for terminal in (True, False):
        out = StringIO()
        doctor.show([finding], Console(file=out, width=40, force_terminal=terminal, color_system=None))
        shown[terminal] = out.getvalue().splitlines()[1:-1]
    assert shown[False] == [f"  note     stop tokens: {finding.text}"]
    first, *others = shown[True]
    assert first.startswith("  note     stop tokens: a few")
    assert len(others) > 2
    assert all(line.startswith(11 * " ") and len(line) <= 40 for line in others)
