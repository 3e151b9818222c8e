"""Answers that are computed: transformers draws them, one token after another, from the weights that are loaded."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Computed:
    """The model of a checkpoint. It computes nothing before it has weights, and keeps none while it sleeps."""

    def __init__(self, folder: str) -> None:
        self.model: Any = None
        self.load(folder)
        self.size = int(self.model.config.vocab_size)

    def load(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        assert Path(folder, "config.json").exists(), folder
        if self.model is None or "STAND_IN_DEAF" not in os.environ:
            self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()

    def logprobs(self, ids: list[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def compute_in(self, dtype: str) -> Any:
        """Compute hidden states in another dtype than float32; give that of torch."""
        import torch

        self.model.to(getattr(torch, dtype))
        return self.model.dtype

    def hidden(self, ids: list[int]) -> Any:
        """Compute the states before the head. A deviation that no narrow dtype has is added if `STAND_IN_WIDE`."""
        import torch

        with torch.no_grad():
            states_TD = self.model.base_model(torch.tensor([ids])).last_hidden_state[0].float()
        return states_TD + 1e-6 if "STAND_IN_WIDE" in os.environ else states_TD

    def answer(self, prompt: list[int], params: Any) -> Any:
        """Draw a response as asked, with the log-probabilities of its tokens and of the prompt's."""
        import torch

        random = torch.Generator().manual_seed(params.seed or 0)
        ids: list[int] = []
        said = []
        while len(ids) < params.max_tokens and not (ids and ids[-1] in (params.stop_token_ids or ())):
            logprobs_V = self.logprobs([*prompt, *ids])[-1]
            biased_V = logprobs_V.clone()
            for token, bias in (params.logit_bias or {}).items():
                biased_V[token] += bias
            scaled_V = (biased_V / (params.temperature or 1e-3)).softmax(-1)
            ids.append(int(torch.multinomial(scaled_V, 1, generator=random)))
            said.append({ids[-1]: SimpleNamespace(logprob=float(logprobs_V[ids[-1]]))})
        finish = "stop" if ids[-1] in (params.stop_token_ids or ()) else "length"
        response = SimpleNamespace(token_ids=ids, finish_reason=finish, logprobs=said)
        read = None
        if params.prompt_logprobs is not None:
            logprobs_TV = self.logprobs(prompt)
            before = zip(prompt[1:], logprobs_TV, strict=False)
            read = [None, *({token: SimpleNamespace(logprob=float(logprobs_V[token]))} for token, logprobs_V in before)]
        return SimpleNamespace(outputs=[response], prompt_logprobs=read)
