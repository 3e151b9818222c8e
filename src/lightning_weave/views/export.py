"""`lweave export`: the targets of a composition as a Parquet data set, for other trainers and for analysis.

One file per shard of the cache, each written atomically: rerun it to resume. The rows also have what `rollout.from`
reads, so a data set can be the trajectories of another run.
"""

import math
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.utils import yaml_dump
from numpy.typing import NDArray

from lightning_weave.bench.definitions import KNOWN
from lightning_weave.bench.summary import Summary, half_interval
from lightning_weave.cache.block import Targets
from lightning_weave.config import dump_recipe, replicate_of, slug
from lightning_weave.directory import with_others
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import card_header
from lightning_weave.progress import Progress
from lightning_weave.report.report import run as report
from lightning_weave.report.results import results_table, summaries
from lightning_weave.report.tables import format_results, legend, markdown, not_compared
from lightning_weave.run import Run
from lightning_weave.stages.prompts import load_prompts, prompt_line, used_columns
from lightning_weave.store import Stage, make_directory, read_json, whole_directory, write_atomic, write_json
from lightning_weave.store.remote import reaching
from lightning_weave.train.data import open_targets
from lightning_weave.train.export import TAG, model_card, public_name
from lightning_weave.types import FINISH_REASONS, Prompt


def publish(run: Run, composition: str, out: Path | None, name: str, public: bool, progress: Progress) -> None:
    """Write the directory of a student and upload it to the hub, to a private repository unless `public`."""
    if run.recipe.mark:
        raise InputError(f"--push {name}: this is a {run.recipe.mark}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"--push {name}: must be OWNER/NAME")
    folder = card(run, composition, out, progress)
    with reaching(f"hf://{name}"):
        url = HfApi().create_repo(name, private=not public, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=f"Add {run.recipe.name}/{composition}")
    progress.say(f"{url}: uploaded. Use it with: vllm serve {name}")


def card(run: Run, composition: str, out: Path | None, progress: Progress) -> Path:
    """Copy final/ with the recipe, a card that has the evaluation, and the report; all of it or nothing."""
    run = with_others(run)
    if composition not in run.recipe.compositions:
        names = ", ".join(run.recipe.compositions) or "none"
        raise InputError(f"--composition {composition}: no such composition; this run has {names}")
    stage = run.stage("train", composition)
    figures = stage.require()
    target = out or run.directory / "publish" / composition
    if target.exists():  # replace only what an earlier call has made
        readme = target / "README.md"
        has_files = all((target / name).is_file() for name in ("config.json", "recipe.toml", "README.md"))
        own = ("adapter", "report", ".eval_results")
        has_folders = target.is_dir() and any(path.is_dir() and path.name not in own for path in target.iterdir())
        if has_folders or not has_files or TAG not in readme.read_text(encoding="utf-8", errors="replace"):
            raise InputError(f"--out {target}: exists and was not made by this command. Name another directory")
    make_directory(target.parent, f"--out {target}")
    card = model_card(run, composition, figures, evaluation(run, composition), metadata(run, composition))
    with whole_directory(target) as unfinished:
        shutil.copytree(stage.folder / "final", unfinished, dirs_exist_ok=True)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        for adapter in unfinished.glob("adapter/adapter_config.json"):
            config = read_json(adapter)
            write_json(adapter, {**config, "base_model_name_or_path": public_name(config["base_model_name_or_path"])})
        (unfinished / "recipe.toml").write_text(dump_recipe(run.recipe), encoding="utf-8")
        for name, text in eval_results(run, composition).items():
            write_atomic(unfinished / ".eval_results" / name, text.encode())
        if summaries_of(run, composition)[0]:
            report([run], Progress(quiet=True), unfinished / "report")
    ready = f"ready. Publish it with: hf upload --private OWNER/NAME {shlex.quote(str(target))}"
    progress.say(f"{target}: " + (f"a {run.recipe.mark}" if run.recipe.mark else ready))
    return target


def evaluation(run: Run, composition: str) -> str:
    """Write the table of this student and its base, and how both were sampled."""
    own, mean = summaries_of(run, composition)
    if not own:
        return f"\nNot evaluated yet (`lweave eval RECIPE --only {composition}`).\n"
    shown = {name: some for name, some in summaries(run).items() if name == "base"} | {composition: mean}
    alone = ""
    if mean[0].seeds:
        results = "; ".join(f"{one.label} {one.accuracy:.1f} % in {one.tokens:,.1f} tokens" for one in own)
        alone = f"\nThe table has means. These weights, of {seed_of(run, composition, mean[0])}: {results}.\n"
    protocol = "; ".join(
        f"{result.label}: {len(result.problems)} problems, "
        + ", ".join(f"{key} {value}" for key, value in result.settings.items() if "\n" not in str(value))
        for result in own
    )
    table = results_table(shown, run.recipe.mark)
    notes = " ".join([legend(table), *not_compared(table)])
    return f"\n## Evaluation\n\n{markdown(format_results(table)).strip()}\n\n{notes}\n{alone}\n{protocol}.\n"


def summaries_of(run: Run, composition: str) -> tuple[list[Summary], list[Summary]]:
    """The results of a student, and their mean over the training seeds of its composition."""
    own = summaries(run, each_seed=True).get(composition, [])
    return own, summaries(run).get(replicate_of(composition), own)


def seed_of(run: Run, composition: str, mean: Summary) -> str:
    """Name the training seed of a student among those of a mean."""
    if not mean.seeds:
        return "one training seed"
    number = composition.partition("~")[2] or "1"
    return f"training seed {run.recipe.train_section(composition).seed}, number {number} of {len(mean.seeds)}"


def measured(run: Run, composition: str) -> Iterator[tuple[Summary, str]]:
    """The results of a student, none of a rehearsal, and what each is a mean of."""
    for result, mean in zip(*summaries_of(run, composition), strict=True) if not run.recipe.mark else ():
        error = "" if math.isnan(result.accuracy_error) else f" ± {1.96 * result.accuracy_error:.1f} (95 %)"
        note = f"mean of {result.samples} samples of {len(result.problems)} problems{error}, "
        note += seed_of(run, composition, mean)
        if mean.seeds:
            note += f" (mean of all: {mean.accuracy:.2f} ± {half_interval([mean], 'accuracy'):.1f})"
        yield result, note


def eval_results(run: Run, composition: str) -> dict[str, str]:
    """The files of .eval_results/, from which the hub shows results on benchmarks that are data sets there."""
    files = {}
    for result, note in measured(run, composition):
        if result.benchmark in KNOWN and result.benchmark not in run.recipe.eval.sources:
            dataset = {"id": KNOWN[result.benchmark].repo, "task_id": "default"}
            entry = {"dataset": dataset, "value": round(result.accuracy, 2), "notes": note}
            files[f"{result.benchmark}.yaml"] = yaml_dump([entry])
    return files


def metadata(run: Run, composition: str) -> str:
    """Write what the hub reads: the student's licence, which its descendants inherit, and the results."""
    header = card_header(run.student)
    data: dict[str, Any] = {key: header[key] for key in ("license", "license_name", "license_link") if key in header}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=KNOWN[result.benchmark].repo if result.benchmark in KNOWN else slug(result.label),
            dataset_name=result.label,
            metric_type="accuracy",
            metric_value=round(result.accuracy, 2),
            metric_name=f"accuracy in %, {note}",
        )
        for result, note in measured(run, composition)
    ]
    if results:
        data |= {"model_name": f"{run.recipe.name}-{composition}", "eval_results": results}
    return f"{ModelCardData(**data).to_yaml()}\n" if data else ""


MADE_FROM = "export.json"
CARD = """---
tags: [lightning-weave, distillation]
configs:
- config_name: default
  data_files: data/*.parquet
---
# Targets of the composition `{composition}`

{rows:,} trajectories of {student}, sampled by itself, with the distribution to train it towards at every token.
Made by `lweave export`.

| column | |
| --- | --- |
| `row`, `id`, `response` | the trajectory: its number, its prompt, which response to that |
| `prompt_ids`, `response_ids`, `finish` | its tokens as they were sampled, and why it ended: stop or length |
| `mask` | per response token: whether the student wrote it; the others of a logged run are context |
| `answer` | the expected answer, where known |
| `prompt_line` | its conversation, form and columns, for `rollout.from` |
| `kept` | per response token: whether the composition has a target there |
| `candidate_ids` | per response token: the {candidates} likeliest tokens of the student |
| `behaviour`, `behaviour_other` | the student's log-probabilities of them, and of all other tokens together |
| `target`, `target_other` | the target's; where `kept` is false they are the behaviour's |

weights {weights}, alpha {alpha:g}. A decision about response token t is made after the prompt and t response tokens.
"""


def run(run: Run, composition: str, out: Path, progress: Progress) -> Path:
    """Write the files of the data set that are missing."""
    reader = open_targets(run, composition)
    trained = run.stage("train", composition)
    settings = {key: value for key, value in trained.settings.items() if key not in ("train", "objective")}
    data = Stage(run.directory, f"export/{composition}", {**settings, "alpha": reader.alpha}, trained.inputs)
    made_from = {
        "composition": composition,
        "student": run.recipe.student.model,
        "weights": dict(run.recipe.compositions[composition].weights),
        "alpha": reader.alpha,
        "candidates": run.recipe.reference.candidates,
        "rows": len(reader.cache),
        "fingerprint": data.fingerprint,  # changes with anything that changes a number in the data set
    }
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (out / MADE_FROM).is_file():
            raise InputError(f"{out}: exists and was not made by this command. Name another directory")
        if read_json(out / MADE_FROM).get("fingerprint") != data.fingerprint:
            raise InputError(f"{out}: holds targets of another cache or composition. Name another directory")
    make_directory(out / "data", f"--out {out}")
    write_json(out / MADE_FROM, made_from)
    prompts = load_prompts(run, used_columns(run.recipe))
    shards = reader.cache.rows.shards
    files = [out / "data" / f"train-{shard:05d}-of-{shards:05d}.parquet" for shard in range(shards)]
    pending = [shard for shard, file in enumerate(files) if not file.exists()]
    with progress.bar("export", len(pending), "shard") as bar:
        for shard in pending:
            buffer = pa.BufferOutputStream()
            pq.write_table(_table(reader(reader.cache.shard_rows(shard)), prompts), buffer, compression="zstd")
            write_atomic(files[shard], buffer.getvalue().to_pybytes())
            bar.advance()
    write_atomic(out / "README.md", CARD.format(**made_from).encode())
    snippet = f'datasets.load_dataset("parquet", data_files="{out}/data/*.parquet", split="train")'
    progress.say(f"{out}: {len(reader.cache):,} rows. Read it with: {snippet}")
    return out


def _table(targets: Targets, prompts: Sequence[Prompt]) -> pa.Table:
    block = targets.block
    rollouts = block.rollouts
    numbers = rollouts.prompt_R.tolist()
    of_row = [prompts[number] for number in numbers]

    def int32(values: NDArray) -> pa.Array:
        return pa.array(np.ascontiguousarray(values, dtype=np.int32))

    def per_token(values: NDArray) -> pa.Array:
        """One list for each row, of values or of lists of as many as there are candidates."""
        flat = pa.array(np.ascontiguousarray(values).ravel())
        inner = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        return pa.ListArray.from_arrays(int32(rollouts.response_ids.offsets), inner)

    return pa.table(
        {
            "row": pa.array(block.number_R, pa.int64()),
            "id": pa.array([prompt.id for prompt in of_row], pa.string()),
            "response": pa.array(rollouts.response_R, pa.int32()),
            "finish": pa.array([FINISH_REASONS[reason] for reason in rollouts.finish_R.tolist()], pa.string()),
            "answer": pa.array([prompt.answer for prompt in of_row], pa.string()),
            "prompt_line": pa.array([prompt_line(number, prompts[number]) for number in numbers], pa.string()),
            "prompt_ids": pa.ListArray.from_arrays(int32(rollouts.prompt_ids.offsets), int32(rollouts.prompt_ids.flat)),
            "response_ids": per_token(rollouts.response_ids.flat.astype(np.int32)),
            "mask": per_token(block.decided_P),
            "kept": per_token(targets.valid_P),
            "candidate_ids": per_token(block.candidates.ids.flat.astype(np.int32)),
            "behaviour": per_token(targets.log_b_PO[:, :-1]),
            "behaviour_other": per_token(targets.log_b_PO[:, -1]),
            "target": per_token(targets.log_q_PO[:, :-1]),
            "target_other": per_token(targets.log_q_PO[:, -1]),
        }
    )
