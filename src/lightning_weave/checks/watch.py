"""Checks of what a stage has just computed: is the next stage worth it? The thresholds are in [checks] of a recipe.

Every stage warns when it is done; `lweave run` also stops where the next stage would be wasted.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from lightning_weave.bench.samples import read_samples
from lightning_weave.cache.block import Cache
from lightning_weave.checks.findings import FEW, Bounds, Finding, percent
from lightning_weave.checks.pairs import SAMPLE, STOP, rollout_rows, spread
from lightning_weave.checks.shifts import check_scored
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.grading.graders import grade_rollout
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair
from lightning_weave.store import read_lines

Check = Callable[[], list[Finding]]
Watch = Callable[[Check, bool, Progress], None]  # what to check, whether it was computed just now, and where to log
ROWS = 1024  # that are looked at
NGRAM = 4  # tokens
DISTINCT = 0.3  # share of distinct n-grams below which a response is repetitive
LEVELS = {  # of each check: its key in [checks], and the level at which it warns unless the key says otherwise
    "truncated": ("truncated", 0.5),
    "unanswered": ("unanswered", 0.5),
    "empty": ("unanswered", 0.05),
    "right": ("right", 0.02),
    "repetition": ("repeated", 0.2),
    "positions": ("surviving", 0.5),
    "KL to the target": ("kl_rise", 1.05),
}
FORM = "Prompt the student in the form that it expects (prompts.format, prompts.chat)"
ANSWERS = {  # a figure of an evaluation, and the remedy
    "truncated": ("are cut off", "Raise eval.max_tokens, or look for repetition in samples.jsonl"),
    "unanswered": ("have no answer that can be extracted", "Let the prompt ask for one (eval.format)"),
    "empty": ("are empty", "Prompt the policy in the form that it expects (eval.chat, eval.format)"),
}


def say(findings: Sequence[Finding], progress: Progress) -> None:
    """Log warnings and errors."""
    for finding in findings:
        if finding.verdict in ("warning", "error"):
            progress.say(f"warning: {finding.line}")


def warn(check: Check, is_new: bool, progress: Progress) -> None:
    """Log the findings about what was just computed, and continue."""
    if is_new:
        say(check(), progress)


def stop(check: Check, is_new: bool, progress: Progress) -> None:
    """Log warnings, and stop on an error, also where the stage was computed before."""
    findings = check()
    say([finding for finding in findings if finding.verdict == "warning" and is_new], progress)
    if errors := [finding.line for finding in findings if finding.verdict == "error"]:
        lines = "\n".join(errors)
        raise WeaveError(
            f"{lines}\nStopped: the next stage would be wasted. Finished work is kept. --force continues; [checks] in "
            "the recipe sets when to stop"
        )


def judge_share(
    run: Run, about: str, check: str, share: float, count: int, fact: str, advice: str, stops: bool = True
) -> Finding:
    """Judge a share of so many rows by [checks]; the advice is given where it is needed."""
    key, warns = LEVELS[check]
    warn_at, stop_at = run.recipe.checks.levels(key, warns)
    bounds = Bounds(warn_at, stop_at if stops else False, below=check in ("right", "positions"))
    verdict = bounds.judge(share, count)
    text = fact if verdict == "ok" else f"{fact}. {advice}"
    return Finding(about, check, verdict, text, {"share": share}, judged=True, bounds=bounds)


def check_rollouts(run: Run) -> list[Finding]:
    """Check what the student sampled: cut off, without an answer, wrong, or repetitive."""
    if not run.stage("rollout").complete:  # other ranks are still sampling
        return []
    rule, _ = run.grading
    prompts = read_prompts(run.prompts_file)
    rows = list(rollout_rows(run, ROWS))

    def judged(check: str, flags: Sequence[bool], fact: str, advice: str, stops: bool = True) -> Finding:
        share = float(np.mean(flags))
        text = f"{percent(share)} of {len(flags):,} sampled responses {fact}"
        return judge_share(run, "rollout", check, share, len(flags), text, advice, stops)

    cut = [bool(row.finish_R[0] != STOP) for row in rows]
    fact = f"are cut off at {run.recipe.rollout.max_tokens} tokens"
    sampled = run.recipe.rollout.from_ is None  # else the finish is what the user's file has
    findings = [judged("truncated", cut, fact, f"Raise rollout.max_tokens. {FORM}", stops=sampled)]
    findings[0].figures["tokens"] = float(np.mean([len(row.response_ids[0]) for row in rows]))

    answered = [(row, answer) for row in rows if (answer := prompts[int(row.prompt_R[0])].answer) is not None]
    if answered:
        decode = run.student.tokenizer.decode
        texts = [(decode(row.response_ids[0].tolist(), skip_special_tokens=True), answer) for row, answer in answered]
        grades = [grade_rollout(rule, text, answer) for text, answer in texts]
        in_box = rule.kind in ("paper", "code", "python")
        lacking = "have no \\boxed{} answer" if in_box else f"have no answer that the grader {rule.kind} finds"
        advice = f"Ask for one in the prompt, or choose another grader with eval.profile. {FORM}"
        asks = any("\\boxed" in prompt.text for prompt in prompts)  # else the answers may have another form
        unanswered = [answer is None for answer, _ in grades]
        findings.append(judged("unanswered", unanswered, lacking, advice, stops=asks))
        advice = "Too few to check whether an anchor prefers them. Check prompts and answers, or use easier problems"
        findings.append(judged("right", [correct for _, correct in grades], "are right", advice))
    loops = [is_repetitive(row.response_ids[0].tolist()) for row in rows]
    return [*findings, judged("repetition", loops, "are repetitive", FORM)]


def is_repetitive(ids: Sequence[int]) -> bool:
    """Whether few of the runs of four tokens of a response are distinct.

    >>> is_repetitive(list(range(100))), is_repetitive([1, 2, 3] * 33), is_repetitive([1, 2, 3])
    (False, True, False)
    """
    count = len(ids) - NGRAM + 1
    return count >= FEW and len(set(zip(*(ids[start:] for start in range(NGRAM)), strict=False))) < DISTINCT * count


def check_scores(run: Run) -> list[Finding]:
    """Check every scored pair: few positions, the same model twice, stopping masked, swapped, copied contexts."""
    findings: list[Finding] = []
    for anchor in run.recipe.anchors:
        if any(not stage.complete for stage in run.scores_of(anchor)):
            continue
        if run.has_shift(anchor):
            cache = Cache(run.stage("rollout"), run.stage("reference"), [anchor_pair(run, anchor)])
            rows = spread(len(cache), SAMPLE)
            block = cache.block(rows)
            valid_P = block.valid_KP[0][block.decided_P]
            share = float(valid_P.mean()) if len(valid_P) else 0.0
            fact = (
                f"its shift is valid at {percent(share)} of {len(valid_P):,} positions; the others are not trained on"
            )
            advice = f"{run.command('doctor')} names the tokens that mask them"
            findings.append(judge_share(run, f"anchors.{anchor}", "positions", share, len(rows), fact, advice))
        with suppress(InputError):  # its models were deleted after scoring
            findings += check_scored(run, anchor)
    return findings


def check_training(run: Run, name: str) -> list[Finding]:
    """Check whether the student approached its target; if it moved away, since which update."""
    composition = run.recipe.compositions[name]
    if composition.method == "online":  # its target moves with the student
        return []
    warn_at, stop_at = run.recipe.checks.levels(*LEVELS["KL to the target"])
    # The naive objective does not aim at this target, and is known to drift.
    bounds = Bounds(warn_at, stop_at if run.objective(name) != "direct-opd" else False, share=False)
    folder = run.stage("train", name).folder
    findings = []
    for file in (folder / "metrics.jsonl", *sorted(folder.glob("leg-*/**/metrics.jsonl"))):
        rows = read_lines(file) if file.exists() else []
        curve = [(int(row["step"]), row["reverse_kl"]) for row in rows if "reverse_kl" in row]
        if len(curve) < 2:
            continue
        rise, lowest, step = kl_rise(curve)
        verdict = bounds.judge(rise, len(curve))
        text = f"KL to the target went from {curve[0][1]:.4f} to {curve[-1][1]:.4f} nats per token"
        if verdict != "ok":
            text += f", lowest ({lowest:.4f}) about update {step}. The student left its target after that: lower "
            text += "train.learning_rate or train.epochs, or raise alpha"
        figures = {"rise": rise, "lowest": lowest, "step": step}
        about = f"compositions.{name}"
        findings.append(Finding(about, "KL to the target", verdict, text, figures, judged=True, bounds=bounds))
    return findings


def kl_rise(curve: Sequence[tuple[int, float]]) -> tuple[float, float, int]:
    """Compare the last tenth of training with the first: their ratio, the lowest tenth, and the update where that ends.

    >>> kl_rise([(1, 1.0), (2, 0.5), (3, 2.0)])
    (2.0, 0.5, 2)
    """
    size = max(len(curve) // 10, 1)
    means = [float(np.mean([kl for _, kl in curve[at : at + size]])) for at in range(len(curve) - size + 1)]
    lowest = int(np.argmin(means))
    rise = means[-1] / means[0] if means[0] > 0 else 1.0
    return rise, means[lowest], curve[lowest + size - 1][0]


def check_evaluation(run: Run, policy: str) -> list[Finding]:
    """Check the responses of a policy. Only the untrained student stops a run: the others are to be measured."""
    findings = []
    for benchmark in run.recipe.eval.benchmarks:
        stage = run.stage("eval", policy, benchmark)
        if not stage.complete:
            continue
        samples = list(read_samples(stage.folder / "samples.jsonl"))
        shares = {
            "truncated": float(np.mean([sample.finish != "stop" for sample in samples])),
            "unanswered": float(np.mean([sample.answer is None for sample in samples])),
            "empty": float(np.mean([not sample.text.strip() for sample in samples])),
        }
        for check, share in shares.items():
            words, advice = ANSWERS[check]
            fact = f"{percent(share)} of {len(samples):,} responses {words}"
            about = f"eval {policy}/{stage.name}"
            findings.append(judge_share(run, about, check, share, len(samples), fact, advice, policy == "base"))
    return findings


def check_results(run: Run) -> list[Finding]:
    """Check every complete training and evaluation."""
    trained = [name for name in run.recipe.compositions if run.stage("train", name).complete]
    groups = [check_training(run, name) for name in trained]
    groups += [check_evaluation(run, policy) for policy in run.policies]
    return [finding for findings in groups for finding in findings]
