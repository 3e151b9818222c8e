"""Everything that must hold before a run: what every stage checks of itself, and the resources of the machine.

`lweave run` refuses on an error, `lweave doctor` and `lweave run --dry-run` print them. No weights are loaded, and a
complete stage needs nothing: its models and data may be gone.
"""

from lightning_weave.checks.findings import Finding
from lightning_weave.checks.models import known_fault, open_benchmarks
from lightning_weave.checks.pairs import align_sample
from lightning_weave.checks.resources import check_resources
from lightning_weave.checks.sample import take_sample
from lightning_weave.run import Run
from lightning_weave.stages import eval, harness, prompts, reference, rollout, score, train

STAGES = (prompts, rollout, reference, score, train, eval, harness)


def preflight(run: Run) -> list[Finding]:
    """Validate every pending stage, and the machine for them. Nothing is repeated that two stages report."""
    run.check_trust()
    for known in (known_fault, open_benchmarks, prompts.planned_prompts, take_sample, align_sample):
        known.cache_clear()
    found = [finding for stage in STAGES for finding in stage.validate(run)]
    findings = list({(finding.about, finding.check, finding.text): finding for finding in found}.values())
    if any(finding.about == "student" and finding.check == "checkpoint" for finding in findings):
        return findings
    return [*findings, *check_resources(run)]
