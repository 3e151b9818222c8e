"""A rank that starts an engine on its share of the GPUs that are said to be visible: MODEL GPUS_PER_ENGINE."""

import sys
from pathlib import Path

import torch

from lightning_weave.devices import own_gpus
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.types import Request, SamplingSettings

if __name__ == "__main__":
    gpus = int(sys.argv[2])
    options = {"tensor_parallel_size": gpus}
    environment = own_gpus(torch.device("cuda"), gpus)
    with VLLMSampler(Path(sys.argv[1]), frozenset({1}), 8, options=options, environment=environment) as sampler:
        (response,) = sampler.sample([Request([2, 3], 0, 0)], SamplingSettings(1.0, 1.0, 3, 0))
        assert response.ids == [7, 7, 7]
        assert sampler.score([[2, 3, 7]]) == [[0.0, 0.0]]
