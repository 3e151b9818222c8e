"""A device that computes nothing: tensors on it have a shape, a dtype and a storage, and no numbers.

Code runs on it as on a GPU: models, FSDP2, optimizer, heads and scorer at full size, without weights. What is on the
CPU stays real. It counts the bytes of all storages that are alive, writes down where the host would wait for it, and
refuses an operation between two devices.

The device takes torch's one free place for a backend, for as long as the process lives. So tests use it in a process of
its own (`fake_runs.measure`), never in that of pytest.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakIdKeyDictionary

from lightning_weave.models import packing

NAME = "fakegpu"
GRANULE = 512  # bytes: what CUDA's allocator rounds a block up to


# Operations that torch takes apart on a device it does not know; on CUDA they are one kernel.
_SINGLE_KERNELS = ("silu_backward",)
_LIBRARY = torch.library.Library("aten", "IMPL")


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the fake device has given a shape before anything is computed")


class _Stream:
    """A stream on which everything is done at once."""

    device_index = stream_id = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **keywords: self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _backend() -> Any:
    """What torch asks of the module of a device."""
    return SimpleNamespace(
        Stream=lambda *arguments, **keywords: _Stream(),
        Event=lambda *arguments, **keywords: _Stream(),
        current_stream=lambda *arguments: _Stream(),
        stream=lambda stream: nullcontext(),
        device=lambda device: nullcontext(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda *arguments: None,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda *arguments: torch.zeros(1, dtype=torch.uint8),
        set_rng_state=lambda *arguments: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with the kernel that torch takes on CUDA: flash, memory-efficient, or the one that keeps T x T numbers.

    Flash attention takes 16 bits, no mask, and grouped heads; the memory-efficient kernel takes any dtype, a bias, and
    no grouped heads (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    aten: Any = torch.ops.aten
    if query.dtype != torch.float32 and attn_mask is None and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if query.shape[1] == key.shape[1]:
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        sums = query.requires_grad and torch.is_grad_enabled()
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, sums, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Multiply groups of rows with their matrices, or sum them into those; torch knows the shape in 16 bits only."""
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (len(offs), a.shape[0], b.shape[1]))


def _workspace(func: Any, args: Sequence[Any]) -> int:
    """Count the bytes that a kernel takes for itself while it runs, where that is much."""
    if func not in (
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        torch.ops.torch_attn._varlen_attn_backward.default,
    ):
        return 0
    query, key = args[1], args[2]
    grouped = query.shape[1] != key.shape[1]
    # A float32 sum for the gradient of queries, and those of keys and values for every head before they are added up.
    return query.numel() * (4 + (2 * query.element_size() if grouped else 0))


class FakeDevice(TorchDispatchMode):
    """The device at work: gives every tensor its shape, and counts the bytes of those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(torch, NAME):
            _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_backend())
            for name in _SINGLE_KERNELS:
                _LIBRARY.impl(name, _never, "PrivateUse1")
            torch.accelerator.empty_cache = lambda: None  # it keeps nothing for later
        self.device = torch.device(NAME, 0)
        self.live = self.peak = 0
        self.waits: list[str] = []  # operations at which the host waits until all work so far is done
        self.recorder: Callable[[Any, Any, Any, Any], None] | None = None  # sees every operation, and its result
        self._pinned = WeakIdKeyDictionary()
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self._held: dict[int, int] = {}  # storage -> its bytes

    @property
    def largest(self) -> int:
        """The bytes of the largest storage that is alive."""
        return max(self._held.values(), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with the local parts
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # torch itself wants to know a shape only
        asked = kwargs.get("device")
        asked = None if asked is None else torch.device(asked).type
        if asked != NAME and not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:  # a number that the CPU waits for
            self.waits.append("number")
            return True if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        if asked == "cpu":  # numbers that the CPU looks at
            self.waits.append("copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if (
            func.namespace == "aten" and func._can_decompose() and func._opname not in _SINGLE_KERNELS
        ):  # in inference mode: its parts hold memory too
            with self:
                return func.decompose(*args, **kwargs)
        if self._waits_for_a_copy(func, args, kwargs):
            self.waits.append("copy from pageable memory")
        args, kwargs = tree_map(self._without_numbers, (args, kwargs))
        with self._shapes:
            result = (_grouped_product if func is torch.ops.aten._grouped_mm.default else func)(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) and leaf.device.type == NAME:
                self.hold(leaf.untyped_storage())
        self.peak = max(self.peak, self.live + _workspace(func, args))
        if self.recorder:
            self.recorder(func, args, kwargs, result)
        return result

    def _waits_for_a_copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether numbers come from the host in a way that stops the device's queue: CUDA does so unless pinned."""
        if func not in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            return False
        source = args[1] if func is torch.ops.aten.copy_.default else args[0]
        if isinstance(source, FakeTensor):
            return False
        return source not in self._pinned or not (kwargs.get("non_blocking") or args[2:] == (True,))

    def pin(self, tensor: Tensor) -> Tensor:
        """Give a copy that the device may fetch while it computes."""
        pinned = tensor.clone()
        self._pinned[pinned] = True
        return pinned

    def _without_numbers(self, value: Any) -> Any:
        real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._shapes.from_tensor(value) if real else value

    def hold(self, storage: torch.UntypedStorage, known: bool = False) -> None:
        """Count a storage from now on with the size that it has; with `known` only if it is counted already."""
        key = storage._cdata
        if key not in self._held:
            if known:
                return
            weakref.finalize(storage, self._release, key)
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        self.live += size - self._held.get(key, 0)
        self._held[key] = size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int) -> None:
        self.live -= self._held.pop(key)


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Have a device `torch.device("fakegpu", 0)` for a while."""
    fake = FakeDevice()
    usual_resize = torch.UntypedStorage.resize_
    usual_attention = functional.scaled_dot_product_attention
    usual_tolist = FakeTensor.tolist
    usual_tensor = torch.tensor
    usual_flash = packing.has_flash_attention
    packing.has_flash_attention = lambda device: device.type == NAME or usual_flash(device)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = usual_resize(storage, size)
        fake.hold(storage, known=True)
        return resized

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (_attention if query.device.type == NAME else usual_attention)(query, *args, **kwargs)

    def tolist(tensor: Tensor) -> Any:  # which would ask for every number on its own
        return tensor.cpu().tolist()

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:  # which no mode sees
        made = usual_tensor(data, **kwargs)
        return made if device is None else made.to(device)

    torch.UntypedStorage.resize_ = resize  # FSDP2 frees and fills its buffers so
    torch.tensor = tensor
    functional.scaled_dot_product_attention = attention
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        with fake:
            yield fake
    finally:
        torch.UntypedStorage.resize_ = usual_resize
        functional.scaled_dot_product_attention = usual_attention
        FakeTensor.tolist = usual_tolist  # type: ignore[method-assign]
        torch.tensor = usual_tensor
        packing.has_flash_attention = usual_flash
