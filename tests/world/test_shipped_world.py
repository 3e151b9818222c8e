"""The world that comes with the package is small, whole, and does what its file says."""

from statistics import fmean, variance

import pytest
import torch

from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.types import SamplingSettings
from lightning_weave.world.layout import shipped_world
from tiny_world.build import WorldReport, read_report
from tiny_world.models import MAX_TOKENS, sample_attempts
from world.problems import read_problems

MODELS = (
    "student",
    *(f"{anchor}-{when}" for anchor in ("accuracy", "brevity", "thorough") for when in ("pre", "post")),
)
BENCHMARKS = ("easy", "medium", "hard")


def shipped_report() -> WorldReport:
    report = read_report(shipped_world())
    assert report is not None
    return report


def mean_figures(model: str) -> tuple[float, float]:
    """Accuracy and tokens, averaged over the benchmarks."""
    figures = shipped_report().figures[model].values()
    return fmean(each.accuracy for each in figures), fmean(each.tokens for each in figures)


def test_it_is_whole_and_small() -> None:
    report = shipped_report()
    assert (report.size, set(report.figures)) == ("full", set(MODELS))
    assert report.command == f"scripts/build-world DIR --seed {report.seed}"
    files = [path for path in shipped_world().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert all(Checkpoint(str(shipped_world() / model)).dtype == torch.float16 for model in MODELS)


def test_its_benchmarks_are_kept_apart_from_its_prompts() -> None:
    held_out = [p for name in BENCHMARKS for p in read_problems(shipped_world() / "benchmarks" / f"{name}.jsonl")]
    prompts = read_problems(shipped_world() / "prompts.jsonl")
    assert (len(set(held_out)), len(set(prompts))) == (600, 1000)
    assert not set(held_out) & set(prompts)


def test_each_specialist_has_its_own_strength() -> None:
    (accuracy_pre, length_pre), (accuracy_post, length_post) = (
        mean_figures("accuracy-pre"),
        mean_figures("accuracy-post"),
    )
    assert accuracy_post > accuracy_pre + 0.15
    (long_pre, tokens_pre), (long_post, tokens_post) = mean_figures("thorough-pre"), mean_figures("thorough-post")
    assert long_post > long_pre + 0.1
    assert tokens_post > tokens_pre * 1.1
    assert tokens_post / tokens_pre > length_post / length_pre
    (brief_pre, tokens_pre), (brief_post, tokens_post) = mean_figures("brevity-pre"), mean_figures("brevity-post")
    assert tokens_post < tokens_pre * 0.7
    assert brief_post < brief_pre + 0.05  # were it better at everything, nothing would be left to compose


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_do_what_their_file_says(name: str) -> None:
    report = shipped_report()
    model = Checkpoint(str(shipped_world() / name)).load(torch.float32, torch.device("cpu"))
    tokenizer = Checkpoint(str(shipped_world() / name)).tokenizer
    settings = SamplingSettings(report.sampling["temperature"], report.sampling["top_p"], MAX_TOKENS, seed=2024)
    for benchmark in BENCHMARKS:
        stated = report.figures[name][benchmark]
        problems = read_problems(shipped_world() / "benchmarks" / f"{benchmark}.jsonl")
        attempts = [attempt for each in sample_attempts(model, tokenizer, problems, 1, settings) for attempt in each]
        share = (sum(attempt.correct for attempt in attempts) + stated.accuracy * stated.samples) / (
            len(attempts) + stated.samples
        )
        both = 1 / len(attempts) + 1 / stated.samples
        accuracy = fmean(attempt.correct for attempt in attempts)
        assert abs(accuracy - stated.accuracy) <= 4 * (share * (1 - share) * both) ** 0.5
        lengths = [len(attempt.ids) for attempt in attempts]
        assert abs(fmean(lengths) - stated.tokens) <= 4 * (variance(lengths) * both) ** 0.5
