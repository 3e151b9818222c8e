"""The parts of a model: what a text goes through, and what it does not, such as the tower that sees images."""

from typing import Any

from torch import nn


def freeze_all_but_text(model: Any) -> None:
    """Let gradients reach what computes the next token of a text, and nothing else."""
    text = [_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {weight for part in text if part is not None for weight in part.parameters()}
    for weight in model.parameters():
        weight.requires_grad_(weight in trained)


def blocks_of(model: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Give the decoder's layers (its longest list of modules), and the layers of everything beside it."""
    decoder = _decoder(model)
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    within = set(decoder.modules())
    outside = [each for each in model.modules() if isinstance(each, nn.ModuleList) and each not in within]
    inner = {each for one in outside for each in one.modules() if each is not one}
    return list(max(lists, key=len, default=[])), [block for one in outside if one not in inner for block in one]


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder()
    return model if decoder is None else decoder
