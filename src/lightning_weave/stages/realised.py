"""What training made of a target: how much of the asked shift the student learned, and whether the forecast came true.

On cached rows, at every decision that was trained on: KL(target || base) was asked for, KL(target || trained) is left.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from pandas import DataFrame
from torch import Tensor

from lightning_weave.bench.summary import combine
from lightning_weave.cache.block import compute_targets
from lightning_weave.errors import InputError
from lightning_weave.maths import expected_kl, log_residual_loss, with_other
from lightning_weave.progress import Progress
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.stages.alignment import find_candidates
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.engines import Engines
from lightning_weave.stages.forecast import ForecastPoint, not_forecast, outcome_text
from lightning_weave.stages.prompts import load_prompts, tag_columns, tag_of
from lightning_weave.store import read_json, write_json
from lightning_weave.train.data import Balance
from lightning_weave.train.schedule import make_schedule

FILE = "realised.json"  # in the folder of the trained composition
ROWS = 256  # that are looked at, evenly over those that are held out
READ = 32  # at a time
REACHED = 0.6  # share of the KL that is closed; on the toy task 0.64 to 0.81 where the forecast came true
GROUPED = ("all", "position", "kind", "tag")
LITTLE = 0.05  # of the mean KL: where less was asked for, a share says nothing
KINDS = {  # by the token that was sampled, the first that fits; stops come before them
    "thinking marks": re.compile(r"</?\|?(think|thinking|thought|reasoning|analysis)\b", re.IGNORECASE),
    "tool calls": re.compile(r"</?\|?(tool|function)|tool_call", re.IGNORECASE),
    "digits": re.compile(r"\d"),
}
RealisedVerdict = Literal["as forecast", "target", "training", "states", "unknown"]
ADVICE: dict[RealisedVerdict, str] = {
    "as forecast": "",
    "target": "the target itself is not better than the base. Try other weights or another alpha: lweave forecast "
    "RECIPE --grid 8 --goal aes",
    "training": "the target is good, but training did not reach it. Try more train.epochs, a larger "
    "train.learning_rate or a larger train.lora.rank",
    "states": "the target is good and reached on cached responses, but not in new ones. Try "
    'refresh = "auto", or a larger alpha',
    "unknown": "no trusted forecast to compare with, or not evaluated yet",
}


@dataclass(frozen=True)
class Closed:
    """A group of decisions: how far away the target was, and how far it is after training, in nats per decision."""

    group: str
    decisions: int
    asked: float
    left: float
    loss: float = 0.0  # that the group added before training, as train.balance weighs it

    @property
    def share(self) -> float:
        """The share of the KL that is closed; negative if training went elsewhere."""
        return 1 - self.left / self.asked if self.asked > 0 else float("nan")


@dataclass(frozen=True)
class Realised:
    """One trained composition."""

    policy: str
    rows: int
    held_out: bool  # whether the rows were kept for validation; else it was trained on them
    closed: Mapping[str, Sequence[Closed]]  # "all", and by "position", "kind" and "tag"
    forecast: ForecastPoint | None = None
    measured: Mapping[str, float] | None = None  # accuracy, tokens and aes
    verdict: RealisedVerdict = "unknown"
    apart: Mapping[str, float] | None = None  # of a level: KL from the plain prompt, asked and learned

    def shares(self) -> dict[str, float]:
        """The share that is closed, by group; where little was asked for, none. A single tag is left out."""
        whole = self.closed["all"][0].asked if self.closed["all"] else 0.0
        return {
            one.group if by == "all" else f"{by} {one.group}": one.share
            for by, several in self.closed.items()
            if by != "tag" or len(several) > 1
            for one in several
            if one.asked > LITTLE * whole
        }

    def tag_shares(self) -> dict[str, dict[str, float]]:
        """Each tag's share of the decisions, of the loss before training, and of the KL that training closed."""
        tags = self.closed["tag"] if len(self.closed["tag"]) > 1 else ()
        columns = {"decisions": [one.decisions for one in tags], "loss": [one.loss for one in tags]}
        columns["closed"] = [one.decisions * (one.asked - one.left) for one in tags]
        table = DataFrame(columns, index=[one.group for one in tags])
        return (table / table.sum().replace(0, 1)).to_dict("index")

    def to_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        tables = {by: [asdict(one) | {"share": one.share} for one in several] for by, several in self.closed.items()}
        return asdict(self) | {"tags": self.tag_shares()} | {"closed": tables, "advice": ADVICE[self.verdict]}


def kind_of(token: str, stops: bool) -> str:
    """Name the kind of a token.

    >>> kind_of("</think>", False), kind_of(" 12", False), kind_of("the", False), kind_of("</s>", True)
    ('thinking marks', 'digits', 'rest', 'stop')
    """
    return "stop" if stops else next((kind for kind, pattern in KINDS.items() if pattern.search(token)), "rest")


def measure_all(run: Run, progress: Progress) -> None:
    """Score every trained student that has a target on cached rows, if it is not done yet; refuse if there is none."""
    names = [name for name, one in run.recipe.written.items() if not_forecast(one) is None]
    names = [name for name in names if run.stage("train", name).complete]
    if not names:
        raise InputError("no composition with a target is trained yet. Run lweave train first")
    pending = [name for name in names if not (run.stage("train", name).folder / FILE).exists()]
    with Engines() as engines, progress.bar("realised", len(pending), "composition") as bar:
        for name in pending:
            measure_closed(run, name, engines)
            bar.advance()


def measure_closed(run: Run, name: str, engines: Engines) -> None:
    """Compare one trained student with its target on cached rows, with the plain prompt and at each of its levels.

    Written to the folder of its training.
    """
    stage = run.stage("train", name)
    alpha = float(stage.require()["alpha"])
    cache = open_cache(run, name)
    held_out = make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, name).held_out()
    rows = sorted(held_out) or list(range(len(cache)))
    rows = [rows[place] for place in np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(int)]
    tags = np.array([tag_of(run.recipe, prompt) for prompt in load_prompts(run, tag_columns(run.recipe))])
    scorer = engines.scorer(run, run.policy(name), run.recipe.engine_of("reference"))
    tokenizer, stop_ids = run.student.tokenizer, run.student.stop_ids
    levels = ["", *getattr(run.recipe.compositions[name], "levels", ())]  # in the order of their slots
    parts: dict[str, list[DataFrame]] = {level: [] for level in levels}
    for start in range(0, len(rows), READ):
        plain: list[Tensor] = []  # the target and the student with the plain prompt
        for slot, level in enumerate(levels):
            block = cache.block([slot * len(cache) + row for row in rows[start : start + READ]])
            targets, candidates = compute_targets(block, cache.weights, alpha), block.candidates
            learned = find_candidates(scorer, block.rollouts, candidates.ids.flat.shape[1], candidates)
            log_pi_PO = with_other(torch.tensor(learned.logp.flat), torch.tensor(learned.other_logp.flat))
            log_q_PO, log_b_PO = torch.from_numpy(targets.log_q_PO), torch.from_numpy(targets.log_b_PO)
            plain = plain or [log_q_PO, log_pi_PO]
            values = {
                "asked": expected_kl(log_q_PO, log_b_PO),
                "left": expected_kl(log_q_PO, log_pi_PO),
                "loss": log_residual_loss(log_b_PO, log_b_PO, log_q_PO, alpha),
                "apart_asked": expected_kl(log_q_PO, plain[0]),
                "apart": expected_kl(log_pi_PO, plain[1]),
            }
            row_P = np.repeat(np.arange(len(block)), block.decisions_R)
            place_P = np.concatenate([np.arange(count) for count in block.decisions_R])
            sampled = block.sampled_P.tolist()
            kinds = {one: kind_of(tokenizer.decode([one]), one in stop_ids) for one in set(sampled)}
            labels = {
                "row": start + row_P,
                "all": "all",
                "position": [f"{tenth}/10" for tenth in 1 + 10 * place_P // block.decisions_R[row_P]],
                "kind": [kinds[one] for one in sampled],
                "tag": tags[block.rollouts.prompt_R][row_P],
            }
            frame = DataFrame({key: value_P.double().numpy() for key, value_P in values.items()} | labels)
            parts[level].append(frame[targets.valid_P])
    found = {level: _grouped(pd.concat(each), rows, Balance.from_run(run)) for level, each in parts.items()}
    write_json(
        stage.folder / FILE,
        {"rows": len(rows), "held_out": bool(held_out), **found.pop(""), "levels": found},
    )


def _grouped(frame: DataFrame, rows: Sequence[int], balance: Balance) -> dict[str, Any]:
    """Average the valid decisions of one policy by group; the loss is summed as training weighs its rows."""
    kept_R = np.bincount(frame["row"], minlength=len(rows))
    weights = balance.weights(rows, balance.counts(rows, range(len(rows)), kept_R))
    frame["loss"] *= np.array([weights[row] for row in rows])[frame["row"]]
    closed = {}
    for by in GROUPED:
        table = frame.groupby(by).agg(
            decisions=("asked", "size"), asked=("asked", "mean"), left=("left", "mean"), loss=("loss", "sum")
        )
        order = sorted(table.index, key=lambda label: (len(label) if by == "position" else 0, label))
        closed[by] = table.loc[order].rename_axis("group").reset_index().to_dict("records")
    apart = {"asked": frame["apart_asked"].mean(), "learned": frame["apart"].mean()} if len(frame) else None
    return {"closed": closed, "apart": apart}


def judge(point: ForecastPoint | None, measured: Mapping[str, float] | None, closed: float) -> RealisedVerdict:
    """Find what failed: the target, the training, or the states that the trained student comes to."""
    if point is None or not point.trusted or point.aes is None or point.aes_low is None:
        return "unknown"
    if point.aes <= 0:
        return "target"
    if measured is None:
        return "unknown"
    if measured["aes"] >= point.aes_low - measured["aes_error"]:
        return "as forecast"
    return "training" if closed < REACHED else "states"


def realise(run: Run, points: Sequence[ForecastPoint]) -> list[Realised]:
    """Read what was measured of the trained students, and compare their evaluations with these forecasts."""
    forecasts = {point.policy: point for point in points}
    evaluated = summaries(run)
    results = []
    for name, composition in run.recipe.written.items():
        stage = run.stage("train", name)
        if not stage.complete or not (stage.folder / FILE).exists():
            continue
        found, made = read_json(stage.folder / FILE), stage.require()
        targets = {"": composition.by_tag or composition.weights}  # by level
        targets |= {
            str(slot.level): slot.weights for slot in composition.slots if slot.level in found.get("levels", {})
        }
        for level, weights in targets.items():
            policy, own = (f"{name}@{level}", found["levels"][level]) if level else (name, found)
            point = forecasts.get(policy)
            alpha = made.get("levels", {}).get(level, made["alpha"])
            if point and not (math.isclose(point.alpha or 0.0, alpha, rel_tol=1e-6) and point.weights == weights):
                point = None  # of another composition that had this name
            closed = {by: [Closed(**one) for one in own["closed"][by]] for by in GROUPED}
            measured = None
            if policy in evaluated and "base" in evaluated:
                overall = combine(evaluated[policy], evaluated["base"], resamples=1000)
                assert overall.comparison is not None
                score = overall.comparison.average.aes
                measured = {"accuracy": overall.accuracy, "tokens": overall.tokens, "aes": score.estimate}
                measured["aes_error"] = (score.high - score.low) / 2
            whole = closed["all"][0].share if closed["all"] else float("nan")
            verdict = judge(point, measured, whole)
            apart = own["apart"] if level else None
            results.append(Realised(policy, found["rows"], found["held_out"], closed, point, measured, verdict, apart))
    return results


def describe_realised(results: Sequence[Realised]) -> list[str]:
    """Describe where it was measured, and what to try."""
    held_out = all(one.held_out for one in results)
    where = "rows held out" if held_out else "rows that were trained on (train.validation = 0 holds none out)"
    lines = [f"KL(target || student), over the decisions of up to {max(one.rows for one in results)} cached {where}."]
    failed = {verdict: [one.policy for one in results if one.verdict == verdict] for verdict in ADVICE}
    return lines + [
        f"{', '.join(failed[verdict])}: {text}." for verdict, text in ADVICE.items() if text and failed[verdict]
    ]


def realised_table(results: Sequence[Realised]) -> list[list[str]]:
    """Rows of a table for people, the first its head: every group of decisions, then forecast, measured and verdict."""
    shares = [one.shares() for one in results]
    groups = list(dict.fromkeys(group for table in shares for group in table))
    rows = [["KL to the target closed", *(one.policy for one in results)]]
    for group in groups:
        rows.append([group, *(f"{table[group]:.0%}" if group in table else "" for table in shares)])
    tags = [one.tag_shares() for one in results]
    for tag in dict.fromkeys(tag for table in tags for tag in table):
        cells = [" / ".join(f"{share:.0%}" for share in table[tag].values()) if tag in table else "" for table in tags]
        rows.append([f"{tag}: its share of decisions / loss / closed KL", *cells])
    if any(one.apart for one in results):
        cells = [f"{one.apart['asked']:.3f} / {one.apart['learned']:.3f}" if one.apart else "" for one in results]
        rows.append(["KL from the plain prompt: asked / learned", *cells])
    rows.append(["forecast", *(outcome_text(asdict(one.forecast)) if one.forecast else "" for one in results)])
    rows.append(["measured", *(outcome_text(one.measured) if one.measured else "" for one in results)])
    rows.append(["verdict", *(one.verdict for one in results)])
    return rows
