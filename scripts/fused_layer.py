"""Count the bytes that one compiled layer moves, forward and backward, as inductor's scheduler fuses it.

    python scripts/fused_layer.py [MODEL]

Compiles for the CPU: nothing of it is timed. Attention is one opaque kernel, as on a GPU; matrix products and attention
are not counted. Prints the bytes per token of all other kernels.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_runs import config_of

TOKENS = 1024  # bytes per token do not depend on it


@torch.library.custom_op("fused_layer::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stand for an attention kernel."""
    return torch.zeros_like(query)


@torch.library.custom_op("fused_layer::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Stand for its backward kernel."""
    return [torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)]


attention.register_fake(lambda query, key, value: torch.empty_like(query))
attention_backward.register_fake(lambda gradient, *inputs: [torch.empty_like(one) for one in inputs])
attention.register_autograd(
    lambda ctx, gradient: tuple(attention_backward(gradient, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def count(model: str) -> float:
    """Compile a layer with its backward pass; return the bytes per token of its fused kernels."""
    config = AutoConfig.for_model(**config_of(model))
    config._attn_implementation = "opaque"

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
        return attention(*(one.transpose(1, 2).contiguous() for one in (query, key, value))), None

    ALL_ATTENTION_FUNCTIONS.register("opaque", attend)
    moved: list[float] = []
    usual = Scheduler.codegen

    def codegen(scheduler: Any, *args: Any) -> Any:
        fused = [node for node in scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        moved.extend(node.get_read_write_buffers_sizes() for node in fused)
        return usual(scheduler, *args)

    inductor.force_disable_caches = True
    Scheduler.codegen = codegen
    layer = Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
    hidden = torch.randn(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotary = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    torch.compile(lambda states: layer(states, position_embeddings=rotary), dynamic=False)(hidden).sum().backward()
    return sum(moved) / TOKENS


if __name__ == "__main__":
    print(f"{count(sys.argv[1] if len(sys.argv) > 1 else 'Qwen/Qwen3-4B'):.0f} bytes per token")
