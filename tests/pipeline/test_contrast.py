"""Contexts with other responses of the run: which ones, what is scored after them, and what happens without any."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from lightning_weave.cache.block import Cache
from lightning_weave.checks.preflight import preflight
from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.report.survey import Reading
from lightning_weave.stages.alignment import with_responses
from lightning_weave.stages.caches import anchor_pair, open_cache
from lightning_weave.stages.grades import grade_rows
from lightning_weave.stages.preview import preview
from lightning_weave.stages.prompts import load_prompts
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.train import train
from lightning_weave.train.resampled import parts_of
from lightning_weave.types import Scores
from pipeline.scored import QUIET, trained
from tiny import make_world, run_of

TEMPLATE = "{prompt} not {wrong}"
RESPONSES = 4


def texts(run: Any) -> list[list[tuple[list[int], str]]]:
    """Every prompt's responses."""
    cache = Cache(run.stage("rollout"), run.stage("reference"))
    rows = [ids.tolist() for ids in cache.block(range(len(cache))).rollouts.response_ids]
    decode = run.student.tokenizer.decode
    both = [(ids, decode(ids, skip_special_tokens=True)) for ids in rows]
    return [both[at : at + RESPONSES] for at in range(0, len(both), RESPONSES)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Half of the prompts have their first response as their answer, so that it is right and others are wrong."""
    folder = tmp_path_factory.mktemp("contrast")
    recipe = make_world(folder)
    anchor = {
        "model": "student",
        "post_prompt": {"template": "{prompt} so {right}"},
        "pre_prompt": {"template": TEMPLATE},
    }
    recipe |= {"anchors": {"acc": recipe["anchors"]["acc"]}, "compositions": {"acc-only": {"weights": {"acc": 1.0}}}}
    recipe |= {"rollout": {**recipe["rollout"], "responses": RESPONSES}, "eval": {"benchmarks": [], "profile": "exact"}}
    make_cache(run_of(recipe), QUIET, until="reference")
    groups = texts(run_of(recipe))
    path = Path(recipe["prompts"]["source"])
    order = {prompt.id: place for place, prompt in enumerate(load_prompts(run_of(recipe), ()))}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        place = order[row["id"]]
        row["answer"] = groups[place][0][1].strip() if place % 2 else "no such answer"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe |= {"anchors": {"contrast": anchor}, "compositions": {"contrast": {"weights": {"contrast": 1.0}}}}
    make_cache(run_of(recipe), QUIET)
    assert texts(run_of(recipe)) == groups
    return recipe


def test_columns_are_other_responses_of_the_group(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    grades = grade_rows(run, QUIET)
    assert grades is not None
    assert {0.0, 1.0} <= set(grades.tolist())
    names = ("wrong", "right", "shorter")
    keys, prompts = with_responses(run, names, load_prompts(run, ()))
    found = {key: prompt.columns for key, prompt in zip(keys, prompts, strict=True)}
    for prompt, group in enumerate(texts(run)):
        for own, (ids, _) in enumerate(group):
            others = [(own + step) % RESPONSES for step in range(1, RESPONSES)]
            others = [other for other in others if group[other][0] != ids]
            expected = {}
            for name, grade in (("wrong", 0.0), ("right", 1.0)):
                if graded := [other for other in others if grades[prompt * RESPONSES + other] == grade]:
                    expected[name] = group[graded[0]][1]
            if shorter := [group[other] for other in others if len(group[other][0]) < len(ids)]:
                expected["shorter"] = min(shorter, key=lambda one: len(one[0]))[1]
            assert found[prompt, np.array(ids, np.int32).tobytes()] == expected


def test_scores_are_those_of_the_model_after_that_text(recipe: dict[str, Any]) -> None:
    """Row by row with the plain model; rows without such a response are masked."""
    run = run_of(recipe)
    model = run.student.load(torch.float32, torch.device("cpu"))
    keys, prompts = with_responses(run, ("wrong",), load_prompts(run, ()))
    columns = {key: prompt.columns or {} for key, prompt in zip(keys, prompts, strict=True)}
    pair = anchor_pair(run, "contrast")
    cache = Cache(run.stage("rollout"), run.stage("reference"), [pair])
    masked = 0
    for row in range(len(cache)):
        block = cache.block([row])
        prompt, ids = int(block.rollouts.prompt_R[0]), block.sampled_P
        shard, place = cache.rows.find(row)
        scores = pair.pre.open(Scores, shard).read(place, place + 1)
        own = columns[prompt, ids.astype(np.int32).tobytes()]
        if "wrong" not in own:
            assert not scores.mapped.flat.any()
            assert not block.valid_KP.any()
            masked += 1
            continue
        text = prompts[[key[0] for key in keys].index(prompt)].messages[-1]["content"]
        asked = TEMPLATE.format(prompt=text, wrong=own["wrong"])
        before = run.student.tokenizer.encode(asked, add_special_tokens=False)
        logits = model(input_ids=torch.tensor([[*before, *ids.tolist()]])).logits[0, :, : run.student.vocabulary]
        logp_TV = torch.log_softmax(logits[len(before) - 1 : -1].float(), dim=-1)
        expected = logp_TV.gather(1, torch.tensor(block.candidates.ids.flat).long()).detach().numpy()
        np.testing.assert_allclose(scores.logp.flat, expected, atol=1e-4)
    both = [cache.block([row]).valid_KP.any() for row in range(len(cache))]
    assert 0 < sum(both) < len(both), "some groups have no right response"
    reading = Reading.from_run(run, "contrast")
    reasons = set(reading.why_masked(cache.block([both.index(False)]), 0, run.student.stop_ids).tolist())
    assert reasons == {"masked: a column of the context is missing"}


def test_it_is_trained_and_the_grader_is_part_of_the_scores(recipe: dict[str, Any]) -> None:
    assert trained(recipe, contrast={"weights": {"contrast": 1.0}})["contrast"]
    run, other = (run_of({**recipe, "eval": {**recipe["eval"], "profile": one}}) for one in ("exact", "paper"))
    one, two = (each.scores_of("contrast")[1].fingerprint for each in (run, other))
    assert one != two
    with pytest.raises(InputError, match=r"anchors\.contrast"):
        preview(run, QUIET, Console(), problems=1)


def test_where_no_response_has_another_it_is_refused(recipe: dict[str, Any]) -> None:
    """With a grader that finds every response wrong there is no right one."""
    run = run_of({**recipe, "eval": {**recipe["eval"], "profile": "paper"}})
    with pytest.raises(InputError, match=r"\{right\}"):
        make_cache(run, QUIET)


def test_a_later_part_without_such_a_response_is_masked(recipe: dict[str, Any]) -> None:
    """The trained student never repeats, to the letter, what counts as right; stopping would waste the first part."""
    compositions = {"again": {"weights": {"contrast": 1.0}, "refresh": 2}}
    run = run_of({**recipe, "compositions": compositions, "train": {**recipe["train"], "learning_rate": 0.05}})
    train(run, QUIET)
    assert run.stage("train", "again").complete
    *_, later = parts_of(run, "again")
    block = (cache := open_cache(later.run, "again")).block(range(len(cache)))
    assert not block.kept(cache.weights).any()


def test_a_column_of_the_prompts_is_not_taken_for_one_of_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(recipe["prompts"]["source"]).read_text().splitlines()]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**row, "right": "gold"}) + "\n" for row in rows))
    for source, warned in ((path, {"anchors.contrast.post_prompt"}), (recipe["prompts"]["source"], set())):
        run = run_of({**recipe, "name": "columns", "prompts": {**recipe["prompts"], "source": str(source)}})
        found = [one for one in preflight(run) if one.check == "columns"]
        assert {one.about for one in found if one.verdict == "warning"} == warned


@pytest.mark.parametrize("change", [{"rollout": {"responses": 1}}, {"prompts": {"source": "x.jsonl"}}])
def test_answers_and_other_responses_are_needed(change: dict[str, Any]) -> None:
    anchor = {"model": "student", "pre_prompt": {"template": TEMPLATE}}
    recipe = {"name": "r", "student": {"model": "m"}, "anchors": {"one": anchor}}
    known = {"prompts": {"source": "x.jsonl", "columns": {"answer": "answer"}}}
    check_recipe({**recipe, **known})
    with pytest.raises(InputError, match=r"anchors\.one"):
        check_recipe({**recipe, **known, **change})
