"""Put the results of runs into docs/appendix/real-models.md and README.md: python scripts/real/page.py RUN [RUN ...]

The runs differ only in the training seed. Only the lines between the markers are replaced. The page lists the results
that are still missing.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pandas import DataFrame
from safetensors.numpy import load_file

from lightning_weave.bench.statistics import Contrast, Interval, ProblemMeans, contrast
from lightning_weave.bench.summary import read_summary
from lightning_weave.report.figures import PolicyKind, frontier, policy_hues, save
from lightning_weave.stages.costs import read_spent

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS: dict[str, PolicyKind] = {
    "base": "base",
    "brief": "single",
    "right": "single",
    "weave-25": "composition",
    "weave-50": "composition",
    "weave-75": "composition",
    "mixture-50": "baseline",
    "naive-50": "baseline",
    "system-prompt": "baseline",
    "specialist": "other",
    "hinted": "single",
    "shots": "single",
    "hinted-brief": "composition",
    "all-three": "composition",
    "by-task": "composition",
}
RESAMPLES = 10_000
UNTRAINED = ("base", "system-prompt", "specialist")  # the same in every run
BRIEF_SHARE = {"right": 0.0, "weave-25": 0.25, "weave-50": 0.5, "weave-75": 0.75, "brief": 1.0}
# One policy, another, what is claimed of the first, and the sign of that. Written before anything was evaluated.
QUESTIONS = (
    ("brief", "base", "tokens", -1, "*brief* is shorter than the base"),
    ("right", "base", "accuracy", 1, "*right* is more accurate than the base"),
    ("weave-50", "base", "aes", 1, "`weave-50` has a higher AES than the base"),
    ("weave-50", "right", "tokens", -1, "`weave-50` is shorter than *right*"),
    ("weave-50", "brief", "accuracy", 1, "`weave-50` is more accurate than *brief*"),
    ("weave-50", "mixture-50", "aes", 1, "`weave-50` has a higher AES than `mixture-50`"),
    ("weave-50", "naive-50", "aes", 1, "`weave-50` has a higher AES than `naive-50`"),
    ("weave-50", "system-prompt", "accuracy", 1, "`weave-50` is more accurate than the system prompt alone"),
)


@dataclass(frozen=True)
class Policy:
    """One policy on one benchmark: means over training seeds, and of each of them."""

    means: ProblemMeans
    seeds: list[ProblemMeans]
    cut_off: float = 0.0  # share of answers at the token limit


def read_policies(runs: Sequence[Path], benchmark: str, names: Sequence[str] = tuple(KINDS)) -> dict[str, Policy]:
    """Every policy that is evaluated, its problems averaged over the runs that have it."""
    found = {}
    for name in names:
        files = [run / "eval" / name / benchmark / "summary.json" for run in runs]
        seeds = [read_summary(file) for file in files[: 1 if name in UNTRAINED else None] if file.exists()]
        if seeds:
            means = [seed.means for seed in seeds]
            found[name] = Policy(average(means), means, float(np.mean([seed.truncated for seed in seeds])))
    return found


def average(seeds: Sequence[ProblemMeans]) -> ProblemMeans:
    """Average every problem over seeds."""
    first = seeds[0]
    assert all(one.problems == first.problems for one in seeds)
    accuracy = np.mean([one.accuracy for one in seeds], axis=0)
    return ProblemMeans(first.benchmark, first.problems, accuracy, np.mean([one.tokens for one in seeds], axis=0))


def against(one: Policy, two: Policy, base: Policy) -> Contrast:
    """The first minus the second, on the same problems drawn together."""
    return contrast([one.means], [two.means], [base.means], RESAMPLES)


def shown(interval: Interval, digits: int = 1) -> str:
    """An estimate with its interval."""
    return f"{interval.estimate:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def verdict(interval: Interval, sign: int) -> str:
    """Whether an interval lies on the claimed side of zero."""
    low, high = sorted((sign * interval.low, sign * interval.high))
    return "holds" if low > 0 else "does not hold" if high < 0 else "within noise"


def results(policies: Mapping[str, Policy]) -> Iterator[str]:
    """One row per policy."""
    yield "| policy | seeds | accuracy, % | by seed | against base | tokens | against base | cut off, % | AES |"
    yield "| --- | ---: | ---: | --- | --- | ---: | --- | ---: | --- |"
    for name, policy in policies.items():
        accuracy, tokens = policy.means.accuracy.mean(), policy.means.tokens.mean()
        if name in UNTRAINED:
            seeds, each = "–", ""
        else:
            seeds, each = str(len(policy.seeds)), ", ".join(f"{one.accuracy.mean():.1f}" for one in policy.seeds)
        cells = ["", "", ""]
        if name != "base":
            found = against(policy, policies["base"], policies["base"])
            cells = [shown(found.accuracy), shown(found.tokens), shown(found.aes, 2)]
        row = [name, seeds, f"{accuracy:.1f}", each, cells[0], f"{tokens:.1f}", cells[1], f"{100 * policy.cut_off:.0f}"]
        yield f"| {' | '.join([*row, cells[2]])} |"


def answers(policies: Mapping[str, Policy]) -> Iterator[str]:
    """The questions that were written down first, and what came out."""
    yield "| expected | verdict | first minus second |"
    yield "| --- | --- | --- |"
    for one, two, quantity, sign, claim in QUESTIONS:
        if one not in policies or two not in policies:
            yield f"| {claim} | not measured | |"
            continue
        interval = getattr(against(policies[one], policies[two], policies["base"]), quantity)
        figures = shown(interval, 2 if quantity == "aes" else 1)
        yield f"| {claim} | **{verdict(interval, sign)}** | {quantity} {figures} |"


def read_samples(run: Path, policy: str) -> dict[str, dict[str, Any]]:
    """The answers of a policy to the trained kinds, by problem; none where it is not evaluated."""
    file = run / "eval" / policy / "same" / "samples.jsonl"
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    return {row["problem"]: row for row in rows}


def ended(run: Path) -> Iterator[str]:
    """Accuracy where neither the base nor the policy was cut off: what is not just ending in time."""
    base = read_samples(run, "base")
    yield "| policy | problems | base right, % | policy right, % |"
    yield "| --- | ---: | ---: | ---: |"
    for name in KINDS:
        own = read_samples(run, name)
        both = [id for id in own if "length" not in (own[id]["finish"], base[id]["finish"])]
        if both and name != "base":
            rights = [100 * sum(rows[id]["correct"] for id in both) / len(both) for rows in (base, own)]
            yield f"| {name} | {len(both)} | {rights[0]:.1f} | {rights[1]:.1f} |"


def draw(policies: Mapping[str, Policy], out: Path) -> None:
    """The frontier as SVG; bars are standard errors over problems."""
    points = {
        name: {
            "kind": KINDS[name],
            "accuracy": float(one.means.accuracy.mean()),
            "tokens": float(one.means.tokens.mean()),
            "accuracy_error": _error(one.means.accuracy),
            "tokens_error": _error(one.means.tokens),
            "family": "brief and right" if name in BRIEF_SHARE else "",
            "share": BRIEF_SHARE.get(name, 0.0),
        }
        for name, one in policies.items()
    }
    with TemporaryDirectory() as folder:
        save(frontier(DataFrame.from_dict(points, orient="index"), policy_hues(policies)), Path(folder))
        shutil.copyfile(Path(folder) / "frontier.svg", out)


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def forgetting(run: Path) -> Iterator[str]:
    """KL to the base and length on the everyday instructions."""
    known = json.loads((run / "forgetting.json").read_text()) if (run / "forgetting.json").exists() else {}
    everyday = read_policies([run], "everyday")
    yield "| policy | KL(base ‖ policy), nats per token | tokens |"
    yield "| --- | ---: | --- |"
    for name in KINDS:
        kl = "0" if name == "base" else f"{known[name]:.4f}" if name in known else ""
        tokens = ""
        if name in everyday:
            tokens = f"{everyday[name].means.tokens.mean():.1f}"
            if name != "base" and "base" in everyday:
                tokens += f", {shown(against(everyday[name], everyday['base'], everyday['base']).tokens)} against base"
        if kl or tokens:
            yield f"| {name} | {kl} | {tokens} |"


def cases(run: Path, data: Path) -> Iterator[str]:
    """The first problem in the order of the file for each rule; only the first seed."""
    rules = {
        "Base wrong, weave-50 right and shorter": (
            "base",
            "weave-50",
            lambda a, b: not a["correct"] and b["correct"] and b["tokens"] < a["tokens"],
        ),
        "Brief wrong, weave-50 right": ("brief", "weave-50", lambda a, b: not a["correct"] and b["correct"]),
        "Base right, weave-50 wrong": ("base", "weave-50", lambda a, b: a["correct"] and not b["correct"]),
    }
    problems = [json.loads(line) for line in (data / "same.jsonl").read_text("utf-8").splitlines()]
    for title, (one, two, rule) in rules.items():
        first, second = read_samples(run, one), read_samples(run, two)
        if not first or not second:
            continue
        for problem in problems:
            a, b = first[problem["id"]], second[problem["id"]]
            if rule(a, b):
                yield f"**{title}.** {problem['problem']} ({problem['answer']})\n"
                yield from (
                    f"- *{name}*, {row['tokens']} tokens: {_quoted(row['text'])}" for name, row in ((one, a), (two, b))
                )
                yield ""
                break
        else:
            yield f"**{title}.** No problem.\n"


def _quoted(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', '')[:300]}`"


def costs(runs: Sequence[Path]) -> Iterator[str]:
    """Seconds of one core by stage, from the ledgers."""
    rows = [row for run in runs for row in read_spent(run).kept]
    yield "| stage | minutes | tokens | tokens/s |"
    yield "| --- | ---: | ---: | ---: |"
    for stage in ("rollout", "reference", "score", "train", "eval"):
        own = [row for row in rows if row["stage"] == stage]
        seconds, tokens = sum(row["device_seconds"] for row in own), sum(row["tokens"] for row in own)
        yield f"| {stage} | {seconds / 60:.1f} | {tokens:,} | {tokens / max(seconds, 1e-9):.0f} |"
    last = rows[-1]
    with_ = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    yield f"\n{last['device']}, {last['threads']} thread(s) per process; {with_}."


def doses(run: Path) -> Iterator[str]:
    """The alpha that the budget gave each composition."""
    yield "| composition | alpha |"
    yield "| --- | ---: |"
    for name in KINDS:
        manifest = run / "train" / name / "manifest.json"
        if manifest.exists() and (alpha := json.loads(manifest.read_text()).get("alpha")):
            yield f"| {name} | {alpha:.3g} |"


def gym(data: Path) -> Iterator[str]:
    """What the student alone could do of reasoning-gym; nothing where that was not measured."""
    file = data / "gym.json"
    if not file.exists():
        return
    found = json.loads(file.read_text())
    yield "\n## Problems of others\n"
    yield f"The student alone on tasks of reasoning-gym at small settings, {found['problems']} problems each:\n"
    yield "| task | right |"
    yield "| --- | ---: |"
    yield from (f"| {task} | {right} |" for task, right in sorted(found["right"].items(), key=lambda one: -one[1]))


def family(run: Path, data: Path) -> Iterator[str]:
    """What the model of another family can do, and how much of its view survives its tokenizer."""
    file = data / "gemma.json"
    if not file.exists():
        return
    found = json.loads(file.read_text())
    by_kind = ", ".join(f"{kind} {right}" for kind, right in found["by_kind"].items())
    share = 100 * found["right"] / found["problems"]
    yield "\n## Another family\n"
    yield f"Gemma-3-270m, a base model, after four worked examples: {found['right']} of {found['problems']} right "
    yield f"({share:.1f} %; {by_kind})."
    shards = sorted(run.glob("score/gemma*/*.safetensors"))
    if not shards:
        return
    mapped = np.concatenate([load_file(shard)["mapped"] for shard in shards])
    spent = [row for row in read_spent(run).kept if row["stage"] == "score" and row["name"].startswith("gemma")]
    minutes = sum(row["device_seconds"] for row in spent) / 60
    yield f"Of the 16 candidates {100 * mapped.mean():.1f} % are one token of Gemma's 262,144 as well; at "
    yield f"{100 * mapped.all(axis=1).mean():.1f} % of the decisions all of them are. "
    yield f"Both sides were scored in {minutes:.1f} minutes."


def put(path: Path, text: str, name: str = "real") -> None:
    """Replace the text between the markers."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    assert end, f"{path} has no markers {name}"
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


def page(runs: Sequence[Path], data: Path) -> str:
    """Everything between the markers of the page."""
    same, other = (read_policies(runs, name) for name in ("same", "other"))
    lacking = [name for name in KINDS if name not in same]
    parts = [
        *(
            ["Not there yet, and left out: " + ", ".join(lacking) + ". `make real` resumes with them.\n"]
            if lacking
            else []
        ),
        "## Results\n\nThe four kinds of problem that were trained on, 96 held-out problems:\n",
        *results(same),
        "\n![Accuracy against tokens](../real-frontier.svg)\n\nBars are standard errors over problems.\n",
        "The two kinds that nothing was trained on, 48 problems:\n",
        *results(other),
        "\n## What held and what did not\n\nOn the trained kinds; expected before anything was evaluated.\n",
        *answers(same),
        "\nBase answers often run into the limit. Where neither was cut off, first seed:\n",
        *ended(runs[0]),
        "\n## What is forgotten\n\n24 everyday instructions without a verifier, first seed:\n",
        *forgetting(runs[0]),
        "\n## Three cases\n\nThe first problem of the file that fits each rule, first seed.\n",
        *cases(runs[0], data),
        *gym(data),
        *family(runs[0], data),
        "\n## Doses\n",
        *doses(runs[0]),
        "\n## Cost\n",
        *costs([run for run in (*runs, runs[0].parent / "real-expert") if run.exists()]),
    ]
    return "\n".join(parts)


def readme(policies: Mapping[str, Policy]) -> str:
    """The README's table and picture."""

    named = {
        "base": "the student",
        "system-prompt": "the student with a system prompt that asks for brevity",
        "weave-50": "the student trained with two anchors, *brief* and *right*",
    }
    rows = []
    for name in filter(policies.__contains__, named):
        means = policies[name].means
        rows.append(f"| {named[name]} | {means.accuracy.mean():.0f} % | {means.tokens.mean():.0f} |")
    contrast = ""
    if {"system-prompt", "weave-50"} <= policies.keys():
        difference = against(policies["weave-50"], policies["system-prompt"], policies["base"]).accuracy
        contrast = f"Trained student minus system prompt: {shown(difference)} points of accuracy (95 % interval). "
    problems = len(policies["base"].means.problems)
    seeds = max(len(policy.seeds) for policy in policies.values())
    return "\n".join(
        [
            "A small experiment on a real model, SmolLM2-135M-Instruct, on simple sums "
            f"({problems} problems, {seeds} training seeds, `make real`):\n",
            "| | accuracy | tokens |\n| --- | ---: | ---: |",
            *rows,
            f"\n{contrast}It says little about large",
            "models ([setup and all results](docs/appendix/real-models.md)).\n",
            "![Accuracy against tokens of SmolLM2](docs/real-frontier.svg)",
        ]
    )


def main(runs: Sequence[Path]) -> None:
    """Write the page, the picture and the README's part."""
    put(ROOT / "docs" / "appendix" / "real-models.md", page(runs, runs[0].parent / "real-data"))
    same = read_policies(runs, "same")
    put(ROOT / "README.md", readme(same))
    draw(same, ROOT / "docs" / "real-frontier.svg")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
