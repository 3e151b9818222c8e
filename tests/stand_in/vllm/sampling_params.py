"""The part of vLLM's module that the worker asks for."""

from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
