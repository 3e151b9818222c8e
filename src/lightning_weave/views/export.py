"""`lweave export`: the targets of a composition as a Parquet data set, for other trainers and for analysis.

One file per shard of the cache, each written whole: rerun it to resume. Beside the targets the rows have what
`rollout.from` reads, so a data set can be taken back.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lightning_weave.cache.targets import Targets
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Step, make_directory, read_json, write_atomic, write_json
from lightning_weave.train.targets import TargetReader, open_targets
from lightning_weave.types import FINISH_REASONS, Prompt

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
| `answer` | the expected answer, where known |
| `kept` | per response token: whether the composition has a target there |
| `candidate_ids` | per response token: the {candidates} likeliest tokens of the student |
| `behaviour`, `behaviour_other` | the student's log-probabilities of them, and of all other tokens together |
| `target`, `target_other` | the target's; where `kept` is false they are the behaviour's |

weights {weights}, alpha {alpha:g}. A decision about response token t is made after the prompt and t response tokens.
"""


def run(steps: Steps, composition: str, out: Path, progress: Progress) -> Path:
    """Write what is missing of the data set."""
    reader = open_targets(steps, composition)
    made_from = _describe(steps, composition, reader)
    _check_target(out, made_from)
    make_directory(out / "data", f"--out {out}")
    write_json(out / MADE_FROM, made_from)
    prompts = read_prompts(steps.prompts_file)
    shards = reader.cache.rows.shards
    files = [out / "data" / f"train-{shard:05d}-of-{shards:05d}.parquet" for shard in range(shards)]
    pending = [shard for shard, file in enumerate(files) if not file.exists()]
    with progress.bar("export", len(pending), "shard") as bar:
        for shard in pending:
            table = _table(reader(reader.cache.shard_rows(shard)), prompts)
            buffer = pa.BufferOutputStream()
            pq.write_table(table, buffer, compression="zstd")
            write_atomic(files[shard], buffer.getvalue().to_pybytes())
            bar.advance()
    write_atomic(out / "README.md", CARD.format(**made_from).encode())
    snippet = f'datasets.load_dataset("parquet", data_files="{out}/data/*.parquet", split="train")'
    progress.say(f"{out}: {len(reader.cache):,} rows. Read it with: {snippet}")
    return out


def _describe(steps: Steps, name: str, reader: TargetReader) -> dict[str, Any]:
    """Say what the data set is made from; its fingerprint changes with anything that changes a number in it."""
    trained = steps.train(name)
    settings = {key: value for key, value in trained.settings.items() if key not in ("train", "objective")}
    step = Step(f"export/{name}", {**settings, "alpha": reader.alpha}, trained.inputs)
    return {
        "composition": name,
        "student": steps.recipe.student.model,
        "weights": dict(steps.recipe.compositions[name].weights),
        "alpha": reader.alpha,
        "candidates": steps.recipe.reference.candidates,
        "rows": len(reader.cache),
        "fingerprint": step.fingerprint,
    }


def _check_target(out: Path, made_from: Mapping[str, Any]) -> None:
    """Continue only what an earlier call has begun, from the same cache with the same weights."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MADE_FROM).is_file():
        raise InputError(f"{out}: exists and was not made by this command. Name another directory")
    if read_json(out / MADE_FROM).get("fingerprint") != made_from["fingerprint"]:
        raise InputError(f"{out}: holds targets of another cache or composition. Name another directory")


def _table(targets: Targets, prompts: Sequence[Prompt]) -> pa.Table:
    block = targets.block
    rollouts = block.rollouts
    of_row = [prompts[number] for number in rollouts.prompt_R.tolist()]
    offsets = rollouts.response_ids.offsets
    prompt_ids = pa.ListArray.from_arrays(_int32(rollouts.prompt_ids.offsets), _int32(rollouts.prompt_ids.flat))

    def each(values_P: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(_int32(offsets), values_P)

    return pa.table(
        {
            "row": pa.array(block.number_R, pa.int64()),
            "id": pa.array([prompt.id for prompt in of_row], pa.string()),
            "response": pa.array(rollouts.response_R, pa.int32()),
            "finish": pa.array([FINISH_REASONS[reason] for reason in rollouts.finish_R.tolist()], pa.string()),
            "answer": pa.array([prompt.answer for prompt in of_row], pa.string()),
            "prompt_ids": prompt_ids,
            "response_ids": each(_int32(rollouts.response_ids.flat)),
            "kept": each(pa.array(targets.valid_P)),
            "candidate_ids": each(_rows(block.candidates.ids.flat.astype(np.int32))),
            "behaviour": each(_rows(targets.log_b_PO[:, :-1])),
            "behaviour_other": each(pa.array(targets.log_b_PO[:, -1])),
            "target": each(_rows(targets.log_q_PO[:, :-1])),
            "target_other": each(pa.array(targets.log_q_PO[:, -1])),
        }
    )


def _rows(values_PC: NDArray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values_PC).ravel()), values_PC.shape[1])


def _int32(values: NDArray) -> pa.Array:
    return pa.array(np.ascontiguousarray(values, dtype=np.int32))
