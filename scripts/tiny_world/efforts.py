"""One student with effort levels against separate students on tiny worlds: tables and a figure for the docs."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.bench.statistics import Interval, ProblemMeans, compare, contrast
from lightning_weave.config import merge_tables
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.store import read_json, write_json
from tiny_world.claims import World, load_world

SEPARATE = {"u": "accuracy-only", "w": "weave-25", "x": "weave-50", "b": "weave-75"}  # level -> students of the demo
PARTS = {  # of the recipe demo-effort.toml and the demo's
    "short": ["effort", *(f"separate-{level}" for level in SEPARATE)],
    "long": ["effort-long", *SEPARATE.values()],
    "numbers": ["number"],
}
DIALS = {"short": "effort", "long": "effort-long"}
LEVELS = {  # other ways to ask for a level: what stands before the problem and before the question
    "an unknown level, `s`": ("s:", ""),
    "`u` after the word Question": ("", "u:"),
    "`b` after the word Question": ("", "b:"),
}
ASIDE = 24  # prompts of each kind on which KL between levels is measured
LENGTH = 16  # tokens of each
Policies = dict[str, list[ProblemMeans]]


@dataclass(frozen=True)
class Found:
    """What is finished of one part: means over seeds, the benchmarks of all worlds one after the other."""

    policies: Policies
    runs: list[str]
    other_ways: dict[str, list[ProblemMeans]]
    leakage: list[dict[str, float]]


def load_effort(world: World, number: int, way: str | None = None) -> Run:
    """Load the recipe of the demo with effort levels for one world and one seed; `way` asks the plain prompt so."""
    changes = tomllib.loads((files("lightning_weave.recipes") / "demo-effort.toml").read_text("utf-8"))
    if way is not None:
        before, inside = LEVELS[way]
        changes = merge_tables(changes, {"eval": {"format": f"{before}Question: {inside}{{problem}}\nAnswer:"}})
    return load_world(world, changes, number, ["machine.threads=1"], own_compositions=False)


@torch.no_grad()
def measure_leakage(run: Run) -> None:
    """Measure KL(level u || level b) per token along greedy responses: to held-out problems, and to another kind.

    The other kind has no words, such as `2+8*9=`, and was never trained on. The student before training, to which a
    level is noise, is measured as well.
    """
    path = run.directory / "leakage.json"
    if path.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(run.student.path)
    lines = Path(run.recipe.eval.benchmarks[-1].removeprefix("file:")).read_text("utf-8").splitlines()[:ASIDE]
    problems = [json.loads(line)["problem"] for line in lines]
    kinds = {"problems": [f"Question: {one}\nAnswer:" for one in problems], "other": [f"{one}=" for one in problems]}
    trained = run.stage("train", "effort").folder / "final"
    found = {}
    for name, folder in (("student", run.student.path), ("dial", trained)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for kind, texts in kinds.items():
            kls = []
            for text in texts:
                ids = tokenizer(text, return_tensors="pt")["input_ids"]
                response = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :]
                log_p = []
                for level in ("u", "b"):
                    prompt = tokenizer(f"{level}:{text}", return_tensors="pt")["input_ids"][0]
                    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
                    log_p.append(torch.log_softmax(logits, dim=-1))
                kls.append((log_p[0].exp() * (log_p[0] - log_p[1])).sum(-1).mean().item())
            found[f"{name}, {kind}"] = float(np.mean(kls))
    write_json(path, found)


def read_found(part: str, worlds: Sequence[World], seeds: int) -> Found:
    """Read the worlds and seeds in which a part is finished."""
    policies: Policies = {}
    ways: Policies = {}
    names, leakage = [], []
    for world in worlds:
        done: list[Policies] = []
        asked: list[Policies] = []
        numbers: list[str] = []
        for number in range(seeds):
            run = load_effort(world, number)
            if not run.directory.exists():
                continue
            wanted = ["base", *PARTS[part]]
            if part in DIALS:
                wanted += [f"{DIALS[part]}@{level}" for level in SEPARATE]
            else:
                wanted += [f"number@{level}" for level in range(7)]
            evaluated = _renamed(world, run)
            if not set(wanted) <= evaluated.keys():
                continue
            done.append({policy: evaluated[policy] for policy in wanted})
            numbers.append(str(number))
            if part == "short":
                others = {way: _renamed(world, load_effort(world, number, way)).get("effort") for way in LEVELS}
                if None not in others.values():
                    asked.append({way: means for way, means in others.items() if means})
                if (path := run.directory / "leakage.json").exists():
                    leakage.append(read_json(path))
        if numbers:
            names.append(f"{world.label}, seed{'s' * (len(numbers) > 1)} {', '.join(numbers)}")
        for pooled, several in ((policies, done), (ways, asked)):
            for policy in several[0] if several else ():
                pooled.setdefault(policy, []).extend(_mean([one[policy] for one in several]))
    return Found(policies, names, ways, leakage)


def _renamed(world: World, run: Run) -> Policies:
    """Read the problems of a run, under benchmarks that no other world has."""
    return {
        policy: [
            ProblemMeans(f"{world.label} {one.benchmark}", one.means.problems, one.means.accuracy, one.means.tokens)
            for one in results
        ]
        for policy, results in summaries(run).items()
    }


def _mean(seeds: Sequence[Sequence[ProblemMeans]]) -> list[ProblemMeans]:
    """Average every problem over training seeds."""
    return [
        ProblemMeans(
            same[0].benchmark,
            same[0].problems,
            np.mean([one.accuracy for one in same], axis=0),
            np.mean([one.tokens for one in same], axis=0),
            np.array([[one.accuracy.mean(), one.tokens.mean()] for one in same]) if len(same) > 1 else None,
        )
        for same in zip(*seeds, strict=True)
    ]


def _figures(means: Sequence[ProblemMeans]) -> tuple[float, float]:
    return float(np.mean([one.accuracy.mean() for one in means])), float(np.mean([one.tokens.mean() for one in means]))


def tables(found: Mapping[str, Found]) -> str:
    """Write the tables of what is there."""
    parts = []
    for part, title in (
        ("short", "200 updates in all: one dial with 200, or four students with 50 each"),
        ("long", "200 updates per level: one dial with 1,000, plain prompt included, or four students with 200 each"),
    ):
        one = found[part]
        if not one.policies:
            continue
        rows = [
            "| level | dial: accuracy, tokens | AES | separate student: accuracy, tokens | AES | dial minus student: "
            "accuracy | tokens | AES |",
            "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
        ]
        base = one.policies["base"]
        whole: list[ProblemMeans] = []
        others: list[ProblemMeans] = []
        for level, plain in SEPARATE.items():
            dial = one.policies[f"{DIALS[part]}@{level}"]
            own = one.policies[f"separate-{level}" if part == "short" else plain]
            whole, others = [*whole, *dial], [*others, *own]
            rows.append(f"| `{level}` | {_row(dial, base)} | {_row(own, base)} | {_difference(dial, own, base)} |")
        every = [*base] * len(SEPARATE)
        rows.append(f"| mean | {_row(whole, every)} | {_row(others, every)} | {_difference(whole, others, every)} |")
        rows.append(f"| none (trained as `w`) | {_row(one.policies[DIALS[part]], base)} | | | | | |")
        accuracy, tokens = _figures(base)
        parts.append(f"**{title}.** {'; '.join(one.runs)}. Base: {accuracy:.1f} %, {tokens:.1f}.\n\n" + "\n".join(rows))
        ends = [contrast(some[-len(base) :], some[: len(base)], base) for some in (whole, others)]
        texts = [f"{_interval(end.accuracy, '+.1f')} points and {_interval(end.tokens, '+.1f')} tokens" for end in ends]
        parts.append(f"From `u` to `b`: the dial {texts[0]}, separate students {texts[1]}.")
    short = found["short"]
    if short.other_ways:
        base, effort = short.policies["base"], short.policies["effort"]
        rows = ["| asked with | accuracy, tokens | AES | minus no level: accuracy | tokens | AES |"]
        rows.append("| --- | --- | ---: | ---: | ---: | ---: |")
        for way, means in short.other_ways.items():
            rows.append(f"| {way} | {_row(means, base)} | {_difference(means, effort, base)} |")
        parts.append(
            "**Asked in another way** (the dial with 200 updates, same runs; it has no chat template):\n\n"
            + "\n".join(rows)
        )
    if short.leakage:
        rows = ["| | held-out problems | `2+8*9=` |", "| --- | ---: | ---: |"]
        for name, label in (("student", "before training"), ("dial", "the dial, 200 updates")):
            kls = [np.mean([one[f"{name}, {kind}"] for one in short.leakage]) for kind in ("problems", "other")]
            rows.append(f"| {label} | {kls[0]:.3f} | {kls[1]:.3f} |")
        count = len(short.leakage)
        parts.append(
            f"**KL between the levels `u` and `b`**, nats per token along greedy responses of {LENGTH} tokens, "
            f"{ASIDE} prompts of each kind, {count} "
            f"run{'s' * (count > 1)}:\n\n" + "\n".join(rows)
        )
    if numbers := found["numbers"].policies:
        rows = ["| level | accuracy, tokens | AES | minus the level before: accuracy | tokens | AES |"]
        rows.append("| ---: | --- | ---: | ---: | ---: | ---: |")
        base, before = numbers["base"], None
        for number in range(7):
            own = numbers[f"number@{number}"]
            change = " | | " if before is None else _difference(own, before, base)
            rows.append(f"| `{number}` | {_row(own, base)} | {change} |")
            before = own
        runs = "; ".join(found["numbers"].runs)
        parts.append(f"**Numbers as levels**, 400 updates over all of them. {runs}.\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _row(means: Sequence[ProblemMeans], base: Sequence[ProblemMeans]) -> str:
    accuracy, tokens = _figures(means)
    aes = compare(means, base).average.aes
    return f"{accuracy:.1f} %, {tokens:.1f} | {_interval(aes, '.2f')}"


def _difference(one: Sequence[ProblemMeans], two: Sequence[ProblemMeans], base: Sequence[ProblemMeans]) -> str:
    change = contrast(one, two, base)
    cells = [(change.accuracy, "+.1f"), (change.tokens, "+.1f"), (change.aes, "+.2f")]
    return " | ".join(_interval(value, form) for value, form in cells)


def _interval(value: Interval, form: str) -> str:
    return f"{value.estimate:{form}} [{value.low:{form}}, {value.high:{form}}]"


def draw(found: Mapping[str, Found], path: Path) -> None:
    """Draw accuracy against tokens: each dial as a joined line, separate students and the base as points."""
    plt.rcParams["svg.hashsalt"] = "effort"
    shown = [(part, found[part]) for part in DIALS if found[part].policies]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.6), squeeze=False, sharey=True)
    titles = {"short": "200 updates in all", "long": "200 updates per level"}
    for axis, (part, one) in zip(axes[0], shown, strict=True):
        dial = [_figures(one.policies[f"{DIALS[part]}@{level}"]) for level in SEPARATE]
        own = [
            _figures(one.policies[f"separate-{level}" if part == "short" else plain])
            for level, plain in SEPARATE.items()
        ]
        base = _figures(one.policies["base"])
        axis.plot([t for _, t in dial], [a for a, _ in dial], "o-", color="#1f6feb", label="one student with levels")
        for level, (accuracy, tokens) in zip(SEPARATE, dial, strict=True):
            axis.annotate(level, (tokens, accuracy), textcoords="offset points", xytext=(5, -11), color="#1f6feb")
        axis.plot([t for _, t in own], [a for a, _ in own], "s", color="#d97706", label="separate students", mfc="none")
        axis.plot(base[1], base[0], "x", color="#57606a", label="the student before training")
        axis.set_xlabel("tokens")
        axis.set_title(titles[part], fontsize=10)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, fontsize=8, loc="lower center", ncols=len(labels) if len(shown) > 1 else 2
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None})
