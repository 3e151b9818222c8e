"""From a source to prompts.jsonl: every row ends in one count."""

import json
import random
import re
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.config import Eval, Prompts
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.prompts import build_prompts, format_messages, livecodebench, read_prompts, render
from lightning_weave.stages.prompts import render_problems
from lightning_weave.types import Prompt, PromptForm

CODE, FORM = PromptForm("chatml"), PromptForm("chat")


def write_prompts(path, prompts):
    path.write_text("".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts), newline="\n")


def build(tokenizer, source, **settings):
    """Build prompts without the recipe's limits on length and number, unless a test sets them."""
    files = [str(file) for file in settings.pop("screen_against", ())]
    section = {"take": None, "max_tokens": 10**6, "screen_against": files, **settings}
    return build_prompts(tokenizer, Prompts(source=None if source is None else str(source), **section))


def total(report):
    others = report.duplicates + report.too_long + report.not_taken + report.kept
    return len(report.bad) + len(report.overlaps) + others


def test_a_recipe_section_can_be_handed_over(qwen, jsonl):
    section = Prompts(source=str(jsonl([{"q": "One?", "a": 1}])), columns={"prompt": "q", "answer": "a"}, take=1)
    prompts, _ = build_prompts(qwen, section)
    assert [(prompt.messages, prompt.answer) for prompt in prompts] == [([{"role": "user", "content": "One?"}], "1")]


def test_each_kind_of_bad_row_is_named(qwen, jsonl):
    rows = [
        {"prompt": "fine", "answer": None, "id": 7},
        {"question": "no prompt", "answer": "1", "id": "b"},
        {"prompt": "", "answer": "1", "id": "c"},
        {"prompt": " \n", "answer": "1", "id": "d"},
        {"prompt": None, "answer": "1", "id": "e"},
        {"prompt": 5, "answer": "1", "id": "f"},
        {"prompt": [], "answer": "1", "id": "g"},
        {"prompt": ["hello"], "answer": "1", "id": "h"},
        {"prompt": [{"role": "user", "content": None}], "answer": "1", "id": "i"},
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1", "id": "j"},
        {"prompt": "no answer", "id": "k"},
        {"prompt": "odd answer", "answer": {"value": 1}, "id": "l"},
        {"prompt": "no id", "answer": "1"},
        {"prompt": "odd id", "answer": "1", "id": 1.5},
        {"prompt": "half \ud800", "answer": "1", "id": "o"},
        b'{"prompt": "broken',
        b'{"prompt": "\xff"}',
        {"prompt": "other", "answer": "1", "id": "7"},
    ]
    path = jsonl(rows)
    prompts, report = build(qwen, source=path, columns={"answer": "answer", "id": "id"})
    assert [(prompt.id, prompt.answer) for prompt in prompts] == [("7", None)]
    assert report.read == len(rows) == total(report)
    assert [row.where for row in report.bad] == [f"{path}:{n}" for n in range(2, len(rows) + 1)]
    whys = [row.why for row in report.bad]
    assert whys[0] == "no column 'prompt' (it has 'question', 'answer', 'id')"
    expected = [
        "'prompt' is empty",
        "'prompt' is empty",
        "'prompt' is null, not text",
        "'prompt' is a int, not text",
        "column 'prompt' is an empty list",
        "'prompt[0]' is not a message with 'role' and 'content'",
        "'prompt[0].content' is null, not text",
        "the last turn of 'prompt' is from the assistant; it must be from the user",
        "no column 'answer' (it has 'prompt', 'id')",
        "'the answer' is a dict, not text",
        "no column 'id' (it has 'prompt', 'answer')",
        "'the id' is a float, not text",
        "'prompt' has half a surrogate pair, which is not a character",
    ]
    assert whys[1:14] == expected
    assert whys[14].startswith("not JSON")
    assert whys[15].startswith("not UTF-8")
    assert whys[16] == f"id '7' is already used by {path}:1"


def test_a_source_of_bad_rows_only_is_the_users_error(qwen, jsonl):
    path = jsonl([{"question": "a"}, {"question": "b"}])
    message = f"{path}: none of its 2 rows can be used; the first is {path}:1: no column 'prompt' (it has 'question')"
    with pytest.raises(InputError, match=re.escape(message) + ".*prompts.columns"):
        build(qwen, source=path)
    with pytest.raises(InputError, match=r"has no rows\. Set prompts\.source"):
        build(qwen, source=jsonl([], "empty.jsonl"))
    with pytest.raises(InputError, match=r"prompts\.source is missing"):
        build(qwen, source=None)


def test_a_missing_template_fails_before_anything_is_read(bare):
    with pytest.raises(InputError, match="no chat template"):
        build(bare, source="nothing.jsonl")


def test_nested_columns_messages_and_answers_as_skywork_has_them(qwen, tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "Find $n$."}],
        "reward_model": {"ground_truth": '["\\\\frac{1}{2}", "0.5"]', "style": "rule"},
        "extra_info": {"index": 12},
        "tests": "x" * 1000,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "math.parquet")
    columns = {"prompt": "prompt", "answer": "reward_model.ground_truth", "id": "extra_info.index"}
    prompts, _ = build(qwen, source=tmp_path / "math.parquet", columns=columns, format="dapo")
    (message,) = format_messages(Prompts(format="dapo"), [{"role": "user", "content": "Find $n$."}])
    text = message["content"]
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = qwen(rendered, add_special_tokens=False)["input_ids"]
    assert prompts == [Prompt("12", [{"role": "user", "content": text}], rendered, ids, "\\frac{1}{2}", FORM)]


def test_livecodebench_never_sees_a_chat_template(llama, bare, jsonl):
    rows = [
        {"question_content": "Print n.", "starter_code": "", "question_id": "a"},
        {"question_content": "Print n.", "starter_code": "def f(): ", "question_id": "b"},
        {"question_content": "Print m.", "starter_code": None, "question_id": "c"},
        {"question_content": "Print k.", "starter_code": 3, "question_id": "d"},
    ]
    columns = {"prompt": "question_content", "id": "question_id"}
    path = jsonl(rows)
    prompts, report = build(bare, source=path, columns=columns, format="livecodebench", chat=True)
    starters = [("Print n.", ""), ("Print n.", "def f(): "), ("Print m.", "")]
    assert [prompt.messages for prompt in prompts] == [livecodebench(*starter) for starter in starters]
    assert [prompt.text for prompt in prompts] == [render(prompt.messages, bare, CODE) for prompt in prompts]
    assert [bare.decode(prompt.token_ids) for prompt in prompts] == [prompt.text for prompt in prompts]
    assert [row.why for row in report.bad] == ["'starter_code' is a int, not text"]
    with_bos, _ = build(llama, source=path, columns=columns, format="livecodebench")
    assert all(prompt.token_ids[0] == llama.bos_token_id for prompt in with_bos)
    assert all(prompt.text.startswith("<|im_start|>system") for prompt in with_bos)


def test_code_to_start_from_counts_only_where_it_is_shown(qwen, jsonl):
    path = jsonl([{"prompt": "Print n.", "starter_code": starter} for starter in ("a", "b", 3)])
    prompts, report = build(qwen, source=path)
    assert (len(prompts), report.duplicates, report.bad) == (1, 2, [])


def test_every_user_turn_is_screened(qwen, jsonl):
    talk = ["user", "Find the last digit.", "assistant", "Of what?", "user", "Of 7^7."]
    messages = [{"role": role, "content": content} for role, content in zip(talk[::2], talk[1::2], strict=True)]
    bench = jsonl([{"problem": "FIND THE LAST DIGIT"}, {"problem": "Of what?"}], "bench.jsonl")
    path = jsonl([{"prompt": messages}, {"prompt": "Find the first digit."}])
    prompts, report = build(qwen, source=path, screen_against=[bench])
    assert [overlap.problem for overlap in report.overlaps] == [f"{bench}:1"]
    assert len(prompts) == 1


def test_plain_text_and_thinking_off(qwen, llama, jsonl):
    path = jsonl([{"prompt": "Find n."}])
    [prompt], _ = build(qwen, source=path, chat=False, format="question-answer")
    assert prompt.text == "Question: Find n.\nAnswer:" == qwen.decode(prompt.token_ids)
    [prompt], report = build(qwen, source=path, thinking=False)
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    assert not report.notes
    _, report = build(llama, source=path, thinking=False)
    assert "no effect" in report.notes[0]


def test_a_row_that_the_template_refuses_is_bad(llama, jsonl):
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find n."}]
    prompts, report = build(llama, source=jsonl([{"prompt": system}, {"prompt": "Find m."}]))
    assert len(prompts) == 1
    assert report.bad[0].why == "the chat template rejects the messages: System role not supported"


def test_a_prompt_without_tokens_is_bad(jsonl):
    """A byte-less vocabulary drops what it does not know; nothing can be sampled after nothing."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    prompts, report = build(tokenizer, source=jsonl([{"prompt": "b"}, {"prompt": "ab"}]), chat=False)
    assert [prompt.token_ids for prompt in prompts] == [[0]]
    assert [row.why for row in report.bad] == ["has no tokens"]


def test_made_ids_depend_on_the_question_alone(qwen, jsonl):
    rows = [{"prompt": f"Find {n}."} for n in range(5)]
    forward, _ = build(qwen, source=jsonl(rows))
    backward, _ = build(qwen, source=jsonl(rows[::-1], "other.jsonl"), format="dapo")
    assert [prompt.id for prompt in forward] == [prompt.id for prompt in backward][::-1]
    assert len({prompt.id for prompt in forward}) == 5


def test_duplicates_may_stay_and_keep_ids_of_their_own(qwen, jsonl):
    path = jsonl([{"prompt": "Find n."}, {"prompt": "find  N"}, {"prompt": "Find n."}])
    kept = {dedup: build(qwen, source=path, dedup=dedup) for dedup in ("none", "exact", "normalised")}
    assert {dedup: (len(prompts), report.duplicates) for dedup, (prompts, report) in kept.items()} == {
        "none": (3, 0),
        "exact": (2, 1),
        "normalised": (1, 2),
    }
    first, _, third = kept["none"][0]
    assert third.id == f"{first.id}-2"


def test_the_limit_is_in_student_tokens_and_the_limit_itself_is_allowed(qwen, jsonl):
    path = jsonl([{"prompt": "Find n." + " and n" * n} for n in range(10)])
    everything, _ = build(qwen, source=path)
    limit = len(everything[4].token_ids)
    prompts, report = build(qwen, source=path, max_tokens=limit)
    assert prompts == [prompt for prompt in everything if len(prompt.token_ids) <= limit]
    assert report.too_long == 10 - len(prompts) > 0


def test_every_row_ends_in_one_count(qwen, jsonl):
    rng = random.Random(3)
    subjects = ["apples", "bees", "cars", "doors", "eggs", "flags", "goats"]
    rows = [
        {"prompt": rng.choice(subjects) + " ?" * rng.randint(0, 2) + " n" * rng.choice([0, 40])} for _ in range(150)
    ]
    rows += [{"prompt": ""}, b"{", {"prompt": "BEES"}]
    path, bench = jsonl(rows), jsonl([{"problem": "Bees?"}, {"problem": "Cars"}], "bench.jsonl")
    prompts, report = build(qwen, source=path, dedup="normalised", max_tokens=40, take=3, screen_against=[bench])
    assert report.read == 153 == total(report)
    assert (len(report.bad), len(report.overlaps), report.kept) == (2, 2, 3)
    assert report.duplicates == 153 - 2 - 14
    assert report.too_long == 7
    assert report.not_taken == 2
    assert {overlap.problem for overlap in report.overlaps} == {f"{bench}:1", f"{bench}:2"}
    assert not any("bees" in prompt.text or "cars" in prompt.text for prompt in prompts)


@pytest.mark.parametrize(("limit", "count"), [(3, "1 longer than prompts.max_tokens = 3, 1 overlapping"), (1000, "0")])
def test_nothing_left_is_the_users_error(qwen, jsonl, limit, count):
    path, bench = jsonl([{"prompt": "a"}, {"prompt": "b"}]), [{"problem": "a"}, {"problem": "b"}]
    screen = [jsonl(bench[: 1 if limit == 3 else 2], "bench.jsonl")]
    with pytest.raises(InputError, match=f"no prompts are left of 2 rows: 0 bad, {count}"):
        build(qwen, source=path, max_tokens=limit, screen_against=screen)


def test_too_few_to_take_is_said(qwen, jsonl):
    prompts, report = build(qwen, source=jsonl([{"prompt": "a"}, {"prompt": "b"}]), take=3)
    assert len(prompts) == 2
    assert report.notes == ["prompts.take is 3, but only 2 prompts are available: all are used"]


def test_a_benchmark_that_cannot_be_read_whole_is_an_error(qwen, jsonl):
    source = jsonl([{"prompt": "a"}])
    for row in (b"{", {"text": "unknown column"}, {"problem": ""}):
        bench = jsonl([{"problem": "fine"}, row], "bench.jsonl")
        with pytest.raises(InputError, match=re.escape(f"prompts.screen_against: {bench}:2")):
            build(qwen, source=source, screen_against=[bench])


def test_an_empty_file_to_screen_against_is_an_error(qwen, jsonl):
    source, empty = jsonl([{"prompt": "a"}]), jsonl([], "empty.jsonl")
    bench = jsonl([{"problem": "b"}], "bench.jsonl")
    for files in ([empty], [bench, empty], [empty, bench]):
        with pytest.raises(InputError, match=re.escape(f"prompts.screen_against: {empty} has no rows")):
            build(qwen, source=source, screen_against=files)


def test_prompts_survive_being_written(tmp_path):
    prompts = [
        Prompt("a", [{"role": "user", "content": 'line\nbreak \u2028 \x85 é \\ " 🙂'}], "t\r\n", [1, 2], None),
        Prompt("b", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "", [0], "\\frac12"),
    ]
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, prompts)
    assert read_prompts(path) == prompts
    assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == ["a", "b"]


@pytest.mark.parametrize("line", [b"{", b'{"id": "a"}', b"[]", b"\xff"])
def test_broken_prompts_are_corrupt_data(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, [Prompt("a", [], "t", [1])])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(CorruptData, match=re.escape(f"{path}:2")):
        read_prompts(path)


TEMPLATE = "{problem} ({unit})\n\nPut the final answer in \\boxed{{}}."


def test_a_template_is_filled_from_the_rows_columns(qwen, jsonl):
    rows = [
        {"q": "How far?", "unit": "km", "a": "4"},
        {"q": "How far?", "unit": "miles", "a": "3"},  # the same problem, asked otherwise
        {"q": "How far?", "unit": "km", "a": "4"},
        {"q": "How long?", "a": "5"},
    ]
    columns = {"prompt": "q", "answer": "a"}
    prompts, report = build(qwen, source=jsonl(rows), columns=columns, format=TEMPLATE, system="Be brief.")
    asked = "How far? (km)\n\nPut the final answer in \\boxed{}."
    assert prompts[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    assert asked in prompts[0].text
    assert (len(prompts), report.duplicates) == (2, 1)
    assert [row.why for row in report.bad] == ["no column 'unit', which the template names"]
    assert total(report) == report.read


def test_a_template_without_its_column_in_any_row_is_refused_with_the_first_row(qwen, jsonl):
    with pytest.raises(InputError, match=r"no prompts are left.*:1: no column 'unit'"):
        build(qwen, source=jsonl([{"prompt": "How far?"}]), format=TEMPLATE)


def test_a_template_never_shows_the_answer(qwen, jsonl):
    columns = {"prompt": "q", "answer": "a.value"}
    with pytest.raises(InputError, match="holds the answer"):
        build(
            qwen,
            source=jsonl([{"q": "1+1?", "a": {"value": "2"}}]),
            columns=columns,
            format="{problem} {a}",
        )


def test_a_second_system_prompt_is_refused_by_row(qwen, jsonl):
    turns = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hello?"}]
    _, report = build(qwen, source=jsonl([{"prompt": turns}, {"prompt": "Hello?"}]), system="Yours.")
    assert ["has a system turn" in row.why for row in report.bad] == [True]


def test_boxed_asks_for_a_box(qwen, jsonl):
    (prompt,), _ = build(qwen, source=jsonl([{"prompt": "1+1?"}]), format="boxed")
    asked = "1+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompt.messages == [{"role": "user", "content": asked}]


def test_code_is_evaluated_as_it_is_trained(llama, jsonl):
    """With the BOS that the tokenizer puts before every text."""
    row = {"question_id": "c", "question_content": "Print {n} twice.</s>", "starter_code": "pass"}
    columns = {"prompt": "question_content", "id": "question_id"}
    [trained], _ = build(llama, source=jsonl([row]), columns=columns, format="livecodebench")
    problem = Problem("c", row["question_content"], row=row)
    benchmark = Benchmark("file:x", "x", "code", (problem,), 1, 8)
    [asked] = render_problems(benchmark, llama, Eval(), None)
    assert asked.token_ids == trained.token_ids
    assert trained.token_ids[0] == llama.bos_token_id
    assert llama.eos_token_id not in trained.token_ids, "it is text here"
