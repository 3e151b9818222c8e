"""Error of log-probabilities in TF32, emulated on the CPU: every factor of a float32 product rounded to 10 bits.

    python benchmarks/tf32.py [CHECKPOINT]

The checkpoint is a directory, such as SmolLM2 of `scripts/real-models`; by default the student of the demo. The
text is the README of this repository. bfloat16 is shown for comparison.
"""

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default}
CANDIDATES = 16


def rounded(values: Tensor) -> Tensor:
    """Round float32 to the 10 explicit bits of TF32, ties away from zero, as the hardware's conversion does."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


class TF32(TorchDispatchMode):
    """Round the factors of every product, and leave the sum in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = (*args[:-2], *(rounded(factor) for factor in args[-2:]))
        return func(*args, **(kwargs or {}))


def log_probs(model: Any, ids: Tensor) -> Tensor:
    """Compute the log-probabilities of all tokens."""
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0].float(), dim=-1)


def main() -> None:
    torch.manual_seed(0)
    folder = sys.argv[1] if len(sys.argv) > 1 else str(files("lightning_weave.world") / "shipped" / "student")
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :1024]
    # Eager attention: the emulation also sees its two products.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    exact_NV = log_probs(model, ids)
    top_NC = exact_NV.topk(CANDIDATES).indices
    with TF32():
        emulated_NV = log_probs(model, ids)
    for name, other_NV in {"TF32": emulated_NV, "bfloat16": log_probs(model.bfloat16(), ids)}.items():
        off_NC = (other_NV - exact_NV).gather(1, top_NC).abs()
        kl_N = (exact_NV.exp() * (exact_NV - other_NV)).sum(dim=1)
        print(
            f"{name}: |change of log p| of the {CANDIDATES} candidates: mean {off_NC.mean():.1e}, 99 % below "
            f"{off_NC.flatten().quantile(0.99):.1e}, largest {off_NC.max():.1e}; KL {kl_N.mean():.1e} nats"
        )


if __name__ == "__main__":
    main()
