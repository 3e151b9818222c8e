"""Four tokenizers that encode the same text differently: other ids, other ends of sequence, other merges.

Each is a real byte-level BPE file over the few characters of this world.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALPHABET = "0123456789+-*=.:{}\\ \n" + "".join(sorted(set("QuestionAnswerhmmsowaitboxed")))
RESPONSE_WORDS = (" hmm", " so", " wait", " \\boxed{")
# Models of this world get their prompts as they are, so the chat template adds nothing.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class TokenizerSpec:
    """The specifics of one tokenizer. Words are merged letter by letter from the start."""

    end: str
    pad: str
    words: tuple[str, ...]


SPELLINGS = {
    # Only the student has the token `}.`: its anchors need two tokens there.
    "student": TokenizerSpec("<|end|>", "<|pad|>", ("Question", "Answer", *RESPONSE_WORDS, "}.")),
    "accuracy": TokenizerSpec("</s>", "<pad>", ("Question", "Answer", *RESPONSE_WORDS)),
    # Splits the words of the prompt into pieces that the student does not have.
    "brevity": TokenizerSpec("<|eot|>", "<|fill|>", ("Quest", "ion", "Ans", "wer", *RESPONSE_WORDS)),
    # Has no words for the prompt at all.
    "thorough": TokenizerSpec("[EOS]", "[PAD]", RESPONSE_WORDS),
}


def make_tokenizer(spelling: TokenizerSpec, rng: np.random.Generator) -> PreTrainedTokenizerFast:
    """Build a tokenizer with ids in random order."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [_visible(bytes_of, letter) for letter in ALPHABET]
    merges: dict[tuple[str, str], None] = {}  # in order, each once: words may share a prefix
    for word in spelling.words:
        pieces = [_visible(bytes_of, letter) for letter in word]
        for length in range(1, len(pieces)):
            merges["".join(pieces[:length]), pieces[length]] = None
    tokens = sorted({*letters, *("".join(pair) for pair in merges)})
    order = rng.permutation(len(tokens))
    vocabulary = {tokens[int(place)]: number for number, place in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = bytes_of
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=spelling.end, pad_token=spelling.pad)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _visible(bytes_of: pre_tokenizers.ByteLevel, letter: str) -> str:
    """Write one character as byte-level BPE files do (a space as `Ġ`)."""
    return "".join(piece for piece, _ in bytes_of.pre_tokenize_str(letter))
