"""As much of vllm.config as is asked for."""


def PoolerConfig(task: str) -> dict[str, str]:
    return {"task": task}
