"""`lweave train` from a finished cache to a model directory that others can load."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.config import check_recipe
from lightning_weave.errors import CorruptData, InputError, Mismatch, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import damaged_files, read_json, read_lines
from lightning_weave.store.ledger import read_ledger
from rounding import assert_same_weights
from train.cached import VOCABULARY, make_run
from train.computed import train_and_see


class Heard(Progress):
    """Remembers what was said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def folder(run: Run, name: str = "both") -> Path:
    return run.directory / "train" / name


def weights(run: Run, name: str = "both") -> dict[str, torch.Tensor]:
    return load_file(folder(run, name) / "final" / "model.safetensors")


def mean_kl(rows: list[dict[str, Any]]) -> float:
    """Over an epoch, since every update has other rows."""
    return float(np.mean([row["reverse_kl"] for row in rows]))


def with_train(run: Run, **settings: Any) -> Run:
    recipe = run.recipe.model_dump(by_alias=True, exclude_none=True)
    return Run(check_recipe({**recipe, "train": recipe["train"] | settings}), run.arguments)


@pytest.mark.slow
def test_final_is_a_whole_model_directory_nearer_to_its_target(tmp_path: Path) -> None:
    refused = {"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 2]}  # transformers will not write this
    student = {"dtype": torch.bfloat16, "generation": refused}
    run = make_run(tmp_path, student=student, train={"epochs": 8, "learning_rate": 1e-2, "validation": 0.2})
    progress = Heard()
    make_students(run, progress)

    final = folder(run) / "final"
    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(run.student.path).get_vocab()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (final / name).read_bytes() == (run.student.path / name).read_bytes()

    rows = list(read_lines(folder(run) / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert mean_kl(rows[-3:]) < 0.6 * mean_kl(rows[:3])
    assert rows[-1]["validation_reverse_kl"] > 0
    assert {"loss", "forward_kl", "total_variation", "kept", "covered_mass", "grad_norm", "memory"} <= rows[0].keys()

    manifest = read_json(folder(run) / "manifest.json")
    assert 0 < manifest["export_kl"] < 1e-2, "bfloat16 rounds a little"
    assert manifest["zero_shift_loss"] < 1e-9
    assert damaged_files(run.stage("train", "both").folder) == {}
    card = (final / "README.md").read_text()
    for fact in ("| long | 0.5 | 0.25 |", "| alpha | 2 |", run.stage("reference").fingerprint, "learning_rate = 0.01"):
        assert fact in card
    # Every row was seen in every epoch, and the ledger counted each of its tokens.
    assert sum(row["tokens"] for row in read_ledger(run.directory)) == sum(row["tokens"] for row in rows)

    said = len(progress.said)
    make_students(run, progress)
    assert len(progress.said) == said, "a composition that is done is left alone"
    shutil.rmtree(final)
    before = rows
    make_students(run, progress)
    assert "resuming from update 24" in " ".join(progress.said), "the last checkpoint is enough to export again"
    assert list(read_lines(folder(run) / "metrics.jsonl")) == before
    assert damaged_files(run.stage("train", "both").folder) == {}


@pytest.mark.slow
def test_an_endpoint_is_the_single_anchor_run_bit_for_bit(tmp_path: Path) -> None:
    def patchy(anchor: str, row: int, decisions: int) -> np.ndarray:
        return np.arange(decisions) % 3 != ("long", "short").index(anchor)

    compositions = {
        "alone": {"weights": {"long": 1.0}},
        "endpoint": {"weights": {"short": 0.0, "long": 1.0}},
        "both": {"weights": {"short": 0.1, "long": 0.9}},
    }
    run = make_run(tmp_path, valid=patchy, compositions=compositions)
    make_students(run, Progress(quiet=True))
    alone, endpoint, both = (weights(run, name) for name in compositions)
    assert all(torch.equal(endpoint[key], tensor) for key, tensor in alone.items())
    assert not all(torch.equal(both[key], tensor) for key, tensor in alone.items())


@pytest.mark.slow
def test_a_low_rank_run_is_merged_on_export(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    run = make_run(tmp_path, train={"lora": lora, "learning_rate": 1e-2, "epochs": 6, "checkpoint_every": 5})
    make_students(run, Progress(quiet=True))
    student = load_file(run.student.path / "model.safetensors")
    trained = weights(run)
    assert trained.keys() == student.keys()
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, student[name])}
    assert moved == {name for name in student if "q_proj" in name or "down_proj" in name}
    rows = list(read_lines(folder(run) / "metrics.jsonl"))
    assert mean_kl(rows[-3:]) < 0.9 * mean_kl(rows[:3])
    # The merged weights are the student that training saw.
    model = AutoModelForCausalLM.from_pretrained(folder(run) / "final")
    assert model.dtype == torch.float32
    for targets in (["no_such_layer"], ["q_proj", "no_such_layer"]):
        with pytest.raises(InputError, match=r"train\.lora\.targets: no layer is called 'no_such_layer'"):
            make_students(with_train(run, lora={"targets": targets}), Progress(quiet=True))


@pytest.mark.slow
def test_every_way_to_compute_gives_the_same_student(tmp_path: Path) -> None:
    run = make_run(tmp_path, student={"tie_word_embeddings": False})
    make_students(run, Progress(quiet=True))
    expected, updates = weights(run), len(list(read_lines(folder(run) / "metrics.jsonl")))
    shutil.rmtree(folder(run).resolve())
    make_students(with_train(run, gradient_checkpointing=True, token_budget=7), Progress(quiet=True))
    assert_same_weights(weights(run), expected, updates=updates, learning_rate=1e-3, apart=1e-5)
    shutil.rmtree(folder(run).resolve())
    # Compute in bfloat16 with float32 masters: one process, sharded over itself.
    make_students(with_train(run, dtype="bfloat16"), Progress(quiet=True))
    student = load_file(run.student.path / "model.safetensors")
    moved = sum((tensor - student[name]).abs().sum() for name, tensor in expected.items())
    apart = sum((tensor - expected[name]).abs().sum() for name, tensor in weights(run).items())
    assert 0 < apart < 0.3 * moved
    assert any((tensor != tensor.bfloat16()).any() for tensor in weights(run).values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_the_same_student(tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=2, train={"epochs": 1, "learning_rate": 1e-3})
    expected = train_and_see(run, "both", Progress(quiet=True))
    shutil.rmtree(folder(run).resolve())
    found = train_and_see(with_train(run, compile=True), "both", Progress(quiet=True))
    for one, other in zip(expected.figures, found.figures, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    updates = len(expected.figures)
    # A tenth of a step.
    assert_same_weights(found.weights, expected.weights, updates=updates, learning_rate=1e-3, apart=1e-4)


@pytest.mark.slow
def test_a_head_that_is_no_plain_product_is_trained_and_it_is_said_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, student={"family": "gemma3", "final_logit_softcapping": 4.0})
    progress = Heard()
    make_students(run, progress)
    assert sum("head has a soft cap: the plain loss is used" in said for said in progress.said) == 1
    rows = list(read_lines(folder(run) / "metrics.jsonl"))
    assert mean_kl(rows[3:]) < mean_kl(rows[:3])


@pytest.mark.slow
def test_disagreement_stops_the_run_unless_it_is_allowed(tmp_path: Path) -> None:
    run = make_run(tmp_path, train={"agreement": 1e-30})
    with pytest.raises(Mismatch, match=r"over 1e-30 \(train.agreement\)(.|\n)*train.agreement = false"):
        make_students(run, Progress(quiet=True))
    assert not (folder(run) / "final").exists()
    progress = Heard()
    make_students(with_train(run, agreement=False), progress)
    assert any("trainer and cache" in said for said in progress.said)
    assert (folder(run) / "final").exists()


@pytest.mark.slow
def test_trackers_get_every_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, train={"trackers": ["tensorboard"]})
    make_students(run, Progress(quiet=True))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder(run) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 7))
    with pytest.raises(InputError, match=r"train\.trackers: wandb is not installed"):
        make_students(with_train(run, trackers=["wandb"], epochs=1), Progress(quiet=True))


@pytest.mark.slow
def test_a_checkpoint_of_another_recipe_is_not_continued_and_a_broken_one_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, train={"checkpoint_every": 2})
    make_students(run, Progress(quiet=True))
    progress = Heard()
    other = with_train(run, learning_rate=2e-3)
    make_students(other, progress)
    assert not any("resuming" in said for said in progress.said)
    kept = sorted((folder(run) / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["000004", "000006"]
    (folder(run) / "manifest.json").unlink()
    next(kept[-1].glob("*.distcp")).write_bytes(b"")
    with pytest.raises(CorruptData, match=r"000006: this checkpoint cannot be read .* resumes from the one before"):
        make_students(other, Progress(quiet=True))
    shutil.rmtree(kept[-1])
    make_students(other, progress)
    assert "resuming from update 4" in " ".join(progress.said)


def test_wrong_wishes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    quiet = Progress(quiet=True)
    with pytest.raises(InputError, match="'nobody': no such composition; this recipe has both"):
        make_students(run, quiet, ["nobody"])
    with pytest.raises(InputError, match=rf"reverse-kl-full.*set reference\.candidates = {VOCABULARY}"):
        make_students(with_train(run, objective="reverse-kl-full"), quiet)
    with pytest.raises(InputError, match=r'train\.dtype = "float16"'):
        make_students(with_train(run, dtype="float16"), quiet)
    assert json.loads((run.student.path / "config.json").read_text())["vocab_size"] > VOCABULARY


@pytest.mark.slow
def test_a_full_disk_is_said_and_costs_nothing_that_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_weave.train import export

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = make_run(tmp_path, train={"epochs": 1})
    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "copyfile", full)
        with pytest.raises(WeaveError, match=r"final: cannot be written .*No space left on device.*train again"):
            make_students(run, Progress(quiet=True))
    progress = Heard()
    make_students(run, progress)
    assert "resuming from update 3" in " ".join(progress.said)
    assert damaged_files(run.stage("train", "both").folder) == {}
