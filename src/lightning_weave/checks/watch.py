"""Checks on the way: is what a stage has just made worth the next stage? Thresholds are in [checks] of a recipe.

Every stage says what is wrong when it is done; `lweave run` also stops where the next stage would be wasted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_weave.bench.samples import read_samples
from lightning_weave.cache.reader import Cache
from lightning_weave.checks.end_of_turn import warn_if_masked
from lightning_weave.checks.findings import Bounds, Finding, Level, percent
from lightning_weave.checks.leaks import judge_leak
from lightning_weave.checks.length import judge_direction
from lightning_weave.checks.sample import ROWS as SURVIVAL_ROWS
from lightning_weave.checks.sample import STOP, rollout_rows, spread
from lightning_weave.config import Threshold
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.grading.graders import grade_rollout
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines

Check = Callable[[], list[Finding]]
Watch = Callable[[Check, bool, Progress], None]  # what to look at, whether it was made just now, and who is told
ROWS = 1024  # that are looked at
FEW = 32  # rows or updates; with fewer nothing is stopped, because chance would decide
RUN = 4  # tokens
ANSWERS = {  # what an evaluation may show, and what to do
    "truncated": ("are cut off", "Raise eval.max_tokens, or look at what is repeated in samples.jsonl"),
    "unanswered": ("have no answer that can be extracted", "Let the prompt ask for one (eval.format)"),
    "empty": ("are empty", "Give problems the form that the policy expects (eval.chat, eval.format)"),
}
DISTINCT = 0.3  # share of runs of four tokens that are distinct, below which a response repeats itself


def say(findings: Sequence[Finding], progress: Progress) -> None:
    """Say what is wrong."""
    for finding in findings:
        if finding.verdict in ("warning", "error"):
            progress.say(f"warning: {finding.line}")


def warn(check: Check, made: bool, progress: Progress) -> None:
    """Log the findings of what was just made, and continue."""
    if made:
        say(check(), progress)


def stop(check: Check, made: bool, progress: Progress) -> None:
    """Say what is wrong, and stop where the next stage would be wasted, whenever the last one was made."""
    findings = check()
    say([finding for finding in findings if finding.verdict == "warning" and made], progress)
    if wrong := [finding.line for finding in findings if finding.verdict == "error"]:
        lines = "\n".join(wrong)
        raise WeaveError(
            f"{lines}\nStopped: what comes next would be wasted. Finished work is kept. --force continues; [checks] in "
            "the recipe sets when to stop"
        )


def judge(value: float, bounds: Bounds, count: int) -> Level:
    """Compare a figure with its two thresholds; with few rows nothing is stopped.

    >>> some = Bounds(0.5, 0.9)
    >>> judge(0.6, some, 100), judge(0.95, some, 100), judge(0.95, some, 3), judge(0.95, Bounds(False, False), 100)
    ('warning', 'error', 'warning', 'ok')
    """

    def beyond(threshold: Threshold) -> bool:
        return threshold is not False and (value < threshold if bounds.below else value > threshold)

    stops = beyond(bounds.stop)
    return "error" if count >= FEW and stops else "warning" if beyond(bounds.warn) or stops else "ok"


def check_rollouts(steps: Steps) -> list[Finding]:
    """Look at what the student sampled: cut off, without an answer, wrong, or repeating itself."""
    if steps.store.stage(steps.rollout).state() != "done":  # other ranks are still at it
        return []
    limits = steps.recipe.checks
    rows = list(rollout_rows(steps, ROWS))
    own = steps.recipe.rollout.from_ is not None  # then the finish is what the user's file says
    cut = float(np.mean([row.finish_R[0] != STOP for row in rows]))
    bounds = Bounds(limits.truncated_warn, False if own else limits.truncated_stop)
    fact = f"{percent(cut)} of {len(rows):,} sampled responses are cut off at {steps.recipe.rollout.max_tokens} tokens"
    advice = (
        "Raise rollout.max_tokens, or give prompts the form that the student expects (prompts.format, prompts.chat)"
    )
    truncated = _finding("rollout", "truncated", (fact, advice), cut, bounds=bounds, count=len(rows))
    length = float(np.mean([len(row.response_ids[0]) for row in rows]))
    findings = [replace(truncated, figures={"share": cut, "tokens": length}), *_check_answers(steps)]
    loops = float(np.mean([is_repetitive(row.response_ids[0].tolist()) for row in rows]))
    fact = f"{percent(loops)} of {len(rows):,} sampled responses repeat themselves"
    advice = "Check the form of the prompts (prompts.format, prompts.chat)"
    bounds = Bounds(limits.repeated_warn, limits.repeated_stop)
    return [*findings, _finding("rollout", "repetition", (fact, advice), loops, bounds=bounds, count=len(rows))]


def _finding(about: str, check: str, words: tuple[str, str], share: float, *, bounds: Bounds, count: int) -> Finding:
    """Judge a share of so many, and give the fact, with advice where it is needed."""
    verdict = judge(share, bounds, count)
    text = words[0] if verdict == "ok" else ". ".join(words)
    return Finding(about, check, verdict, text, {"share": share}, judged=True, bounds=bounds)


def _check_answers(steps: Steps) -> list[Finding]:
    """Grade the responses to prompts with a known answer."""
    limits = steps.recipe.checks
    prompts = read_prompts(steps.prompts_file)
    tokenizer = steps.student.tokenizer
    section = steps.recipe.eval
    graded = []
    for row in rollout_rows(steps, ROWS):
        answer = prompts[int(row.prompt_R[0])].answer
        if answer is not None:
            text = tokenizer.decode(row.response_ids[0].tolist(), skip_special_tokens=True)
            final_answer, correct = grade_rollout(section, text, answer)
            graded.append((final_answer is None, correct))
    if not graded:
        return []
    unanswered, right = np.mean(graded, axis=0).tolist()
    count = len(graded)
    kind = "\\boxed{}" if section.profile in (None, "paper") else section.profile
    fact = f"{percent(unanswered)} of {count:,} sampled responses have no {kind} answer"
    advice = (
        "Let the prompt ask for one, in the form that the student expects (prompts.format, prompts.chat), or grade it "
        "otherwise (eval.profile)"
    )
    asks = any("\\boxed" in prompt.text for prompt in prompts)  # else the answers may have another form
    bounds = Bounds(limits.unanswered_warn, limits.unanswered_stop if asks else False)
    answered = _finding("rollout", "unanswered", (fact, advice), unanswered, bounds=bounds, count=count)
    fact = f"{percent(right)} of {count:,} sampled responses are right"
    advice = "No pair can be seen to prefer right ones: check prompts and answers, or take easier problems"
    bounds = Bounds(limits.right_warn, limits.right_stop, below=True)
    return [answered, _finding("rollout", "right", (fact, advice), right, bounds=bounds, count=count)]


def is_repetitive(ids: Sequence[int]) -> bool:
    """Say whether a response is repetitive: few of its runs of four tokens are distinct.

    >>> is_repetitive(list(range(100))), is_repetitive([1, 2, 3] * 33), is_repetitive([1, 2, 3])
    (False, True, False)
    """
    runs = len(ids) - RUN + 1
    return runs >= FEW and len(set(zip(*(ids[start:] for start in range(RUN)), strict=False))) < DISTINCT * runs


def check_scores(steps: Steps) -> list[Finding]:
    """Look at every pair that is scored: the same model twice, few positions, stopping masked, swapped."""
    findings: list[Finding] = []
    for anchor in steps.recipe.anchors:
        about = f"anchors.{anchor}"
        if not steps.has_shift(anchor):
            text = "post and pre are the same model, so its shift is zero everywhere"
            findings.append(Finding(about, "checkpoints", "warning", text))
            continue
        if any(steps.store.stage(step).state() != "done" for step in steps.scores_of(anchor)):
            continue
        findings.append(_check_survival(steps, anchor))
        try:
            judgements = [warn_if_masked(steps, anchor), *judge_direction(steps, anchor), judge_leak(steps, anchor)]
        except InputError:  # its models are gone since they were scored
            continue
        findings += [finding for finding in judgements if finding is not None]
    return findings


def _check_survival(steps: Steps, anchor: str) -> Finding:
    limits = steps.recipe.checks
    pair = anchor_pair(steps, anchor)
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair])
    rows = spread(len(cache), SURVIVAL_ROWS)
    block = cache.block(rows)
    valid_P = block.valid_KP[0][block.decided_P]
    share = float(valid_P.mean()) if len(valid_P) else 0.0
    fact = f"its shift is valid at {percent(share)} of {len(valid_P):,} positions; the others teach nothing"
    advice = f"{steps.command('doctor')} names the tokens that mask them"
    bounds = Bounds(limits.surviving_warn, limits.surviving_stop, below=True)
    return _finding(f"anchors.{anchor}", "positions", (fact, advice), share, bounds=bounds, count=len(rows))


def check_training(steps: Steps, name: str) -> list[Finding]:
    """Look whether the student came nearer to its target, or went away from it and since which update."""
    composition = steps.recipe.compositions[name]
    if composition.method == "online":  # its target moves with the student
        return []
    limits = steps.recipe.checks
    folder = steps.store.stage(steps.train(name)).folder
    findings = []
    for file in (folder / "metrics.jsonl", *sorted(folder.glob("leg-*/**/metrics.jsonl"))):
        curve = [(int(row["step"]), row["reverse_kl"]) for row in _metrics(file)]
        if len(curve) < 2:
            continue
        rise, lowest, step = kl_rise(curve)
        # Only these objectives aim at this target; the naive one is known to drift.
        stops = limits.kl_rise_stop if steps.objective(name) != "direct-opd" else False
        bounds = Bounds(limits.kl_rise_warn, stops, share=False)
        verdict = judge(rise, bounds, len(curve))
        text = f"KL to the target went from {curve[0][1]:.4f} to {curve[-1][1]:.4f} nats per token"
        if verdict != "ok":
            text += f", lowest ({lowest:.4f}) about update {step}. The student left its target after that: lower "
            text += "train.learning_rate or train.epochs, or raise alpha"
        figures = {"rise": rise, "lowest": lowest, "step": step}
        findings.append(
            Finding(f"compositions.{name}", "KL to the target", verdict, text, figures, judged=True, bounds=bounds)
        )
    return findings


def _metrics(file: Path) -> list[dict[str, float]]:
    return [row for row in read_lines(file) if "reverse_kl" in row] if file.exists() else []


def kl_rise(curve: Sequence[tuple[int, float]]) -> tuple[float, float, int]:
    """Compare the last tenth of training with the first: their ratio, the lowest tenth, and the update where it ends.

    >>> kl_rise([(1, 1.0), (2, 0.5), (3, 2.0)])
    (2.0, 0.5, 2)
    """
    size = max(len(curve) // 10, 1)
    means = [float(np.mean([kl for _, kl in curve[at : at + size]])) for at in range(len(curve) - size + 1)]
    lowest = int(np.argmin(means))
    rise = means[-1] / means[0] if means[0] > 0 else 1.0
    return rise, means[lowest], curve[lowest + size - 1][0]


def check_evaluation(steps: Steps, policy: str) -> list[Finding]:
    """Look at what a policy answered. Only the student itself stops a run: the others are what is to be measured."""
    limits = steps.recipe.checks
    findings = []
    for benchmark in steps.recipe.eval.benchmarks:
        stage = steps.store.stage(steps.eval(policy, benchmark))
        if stage.state() != "done":
            continue
        samples = list(read_samples(stage.folder / "samples.jsonl"))
        about = f"eval {policy}/{stage.folder.name}"
        shares = {
            "truncated": float(np.mean([sample.finish != "stop" for sample in samples])),
            "unanswered": float(np.mean([sample.answer is None for sample in samples])),
            "empty": float(np.mean([not sample.text.strip() for sample in samples])),
        }
        for check, share in shares.items():
            stops: Threshold = getattr(limits, f"{check}_stop") if policy == "base" else False
            bounds = Bounds(getattr(limits, f"{check}_warn"), stops)
            fact = f"{percent(share)} of {len(samples):,} responses {ANSWERS[check][0]}"
            findings.append(_finding(about, check, (fact, ANSWERS[check][1]), share, bounds=bounds, count=len(samples)))
    return findings


def check_results(steps: Steps) -> list[Finding]:
    """Look at every training and evaluation that is done."""
    trained = [name for name in steps.recipe.compositions if steps.store.stage(steps.train(name)).state() == "done"]
    groups = [check_training(steps, name) for name in trained]
    groups += [check_evaluation(steps, policy) for policy in steps.policies]
    return [finding for findings in groups for finding in findings]
