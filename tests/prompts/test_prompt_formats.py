"""The formats, character by character, and their rendering."""

import pytest

from lightning_weave.config import Prompts
from lightning_weave.errors import InputError
from lightning_weave.prompts import encode, format_messages, livecodebench, render
from lightning_weave.types import PromptForm

PLAIN, SILENT = PromptForm("plain"), PromptForm("chat", thinking=False)
USER = [{"role": "user", "content": "What is {x} in $\\frac{1}{2}$?"}]
TALK = [{"role": "system", "content": "Be brief."}, *USER]

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {x} in $\\frac{1}{2}$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
STDIN = """<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user

You will be given a question (problem specification) and will generate a correct Python program that matches the \
specification and passes all tests. You will NOT return anything except for the program.

Question: Print {n} twice.

Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample \
inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the \
inputs, runs the algorithm and writes output to STDOUT.
```python
# YOUR CODE HERE
```

<|im_end|>
<|im_start|>assistant
"""
STARTER = """<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user

You will be given a question (problem specification) and will generate a correct Python program that matches the \
specification and passes all tests. You will NOT return anything except for the program.

Question: Print {n} twice.

You will use the following starter code to write the solution to the problem and enclose your code within delimiters.
```python
class Solution:
    def twice(self, n: int) -> str:
       \x20
```

<|im_end|>
<|im_start|>assistant
"""


def formatted(name, problem):
    (message,) = format_messages(Prompts(format=name), [{"role": "user", "content": problem}])
    return message["content"]


def test_dapo_words_a_problem_once():
    assert formatted("dapo", USER[0]["content"]) == DAPO
    assert formatted("dapo", DAPO) == DAPO


def test_question_answer_is_the_papers():
    assert formatted("question-answer", "1 + 1 = ?\nSay.") == "Question: 1 + 1 = ?\nSay.\nAnswer:"


def test_variables_of_a_template_that_is_not_used_are_refused(qwen):
    """Otherwise a policy with `template` would be the base under another name."""
    with pytest.raises(InputError, match="template"):
        render(livecodebench("Print {n} twice."), qwen, PromptForm("chatml"), variables={"reasoning_effort": "low"})


def test_livecodebench_reads_stdin_unless_there_is_code_to_start_from(bare):
    code = PromptForm("chatml")
    assert render(livecodebench("Print {n} twice."), bare, code) == STDIN
    starter = "class Solution:\n    def twice(self, n: int) -> str:\n        "
    assert render(livecodebench("Print {n} twice.", starter), bare, code) == STARTER


def test_livecodebench_messages_in_a_qwen_template_are_the_benchmarks_text(qwen):
    assert render(livecodebench("Print {n} twice."), qwen) == STDIN


def test_a_format_changes_the_last_turn_only():
    assert format_messages(Prompts(format="plain"), TALK) == TALK
    assert format_messages(Prompts(format="dapo"), TALK) == [TALK[0], {"role": "user", "content": DAPO}]
    code = Prompts(format="livecodebench")
    assert format_messages(code, USER, starter="pass") == livecodebench(USER[0]["content"], "pass")
    with pytest.raises(InputError, match="takes a single question, not a conversation"):
        format_messages(code, TALK)


def test_thinking_is_switched_where_the_template_knows_it(qwen):
    opened = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    hi = [{"role": "user", "content": "Hi"}]
    assert render(hi, qwen, PromptForm("chat", thinking=True)) == opened
    assert render(hi, qwen, SILENT) == opened + "<think>\n\n</think>\n\n"


def test_a_template_that_thinks_only_when_told_is_told(qwen, monkeypatch):
    monkeypatch.setattr(qwen, "chat_template", "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    assert render(USER, qwen) == USER[0]["content"] + "<think>"


def test_a_template_without_a_switch_is_left_alone(llama):
    assert render(USER, llama) == render(USER, llama, SILENT) == f"<s>[user]{USER[0]['content']}[assistant]"


def test_a_template_that_refuses_says_why(llama):
    with pytest.raises(InputError, match="rejects the messages: System role not supported"):
        render(TALK, llama)


def test_no_template_suggests_plain_text(bare):
    with pytest.raises(InputError, match=r"no chat template.*chat = false"):
        render(USER, bare)
    assert render(USER, bare, PLAIN) == USER[0]["content"]
    with pytest.raises(InputError, match="conversation of 2 turns"):
        render(TALK, bare, PLAIN)


def test_the_named_default_of_several_templates_counts(qwen, monkeypatch):
    monkeypatch.setattr(qwen, "chat_template", {"default": "D{{ messages[0].content }}", "tool_use": "enable_thinking"})
    assert render(USER, qwen) == "D" + USER[0]["content"]


def test_rendered_text_gets_no_second_bos_and_plain_text_gets_one(llama):
    bos, eos = llama.convert_tokens_to_ids(["<s>", "</s>"])
    text = render(USER, llama)
    [rendered] = encode([text], llama, rendered=True)
    assert rendered.count(bos) == 1
    assert llama.decode(rendered) == text
    plain, already = encode(["Find n", "<s>Find n"], llama, rendered=False)
    assert plain == already == [bos, *llama("Find n", add_special_tokens=False)["input_ids"]]
    assert eos not in plain


def test_plain_text_for_a_family_without_bos_is_only_its_text(qwen):
    texts = ["Find n", STDIN, ""]
    encoded = encode(texts, qwen, rendered=False)
    assert [qwen.decode(ids) for ids in encoded] == texts
    assert encoded[1].count(qwen.convert_tokens_to_ids("<|im_start|>")) == 3


def test_a_sentencepiece_bos_is_found_behind_its_word_mark():
    """Llama 2 and Gemma: a metaspace prefix, and the BOS before it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={"<s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4}, merges=[("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    assert encode(["a b", "b"], tokenizer, rendered=False) == [[0, 4, 1, 3], [0, 1, 3]]
    assert encode(["", "<s>b"], tokenizer, rendered=False) == [[0], [0, 1, 3]]
    assert encode([], tokenizer, rendered=False) == []


def test_settings_left_in_the_tokenizer_neither_cut_nor_pad(qwen):
    text = "Find the sum of all integers n " * 20
    whole = encode([text], qwen, rendered=True)[0]
    qwen.backend_tokenizer.enable_truncation(8)
    qwen.backend_tokenizer.enable_padding(length=5000)
    assert encode([text], qwen, rendered=True)[0] == whole
