"""Computing a model in a wider dtype than its parameters are kept in, one layer's parameters at a time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

RECURRENCE, KERNELS = "torch_chunk_gated_delta_rule", ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")
"""transformers' own recurrence, and what it calls that may be a kernel which takes no float32."""


@contextmanager
def widened(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Within, `model` computes in `dtype`. Its parameters are widened as they are met and put back afterwards.

    So a wide forward needs room for the largest layer, not for a second model. Recurrent layers use transformers' own
    torch code.
    """
    kept: dict[torch.nn.Module, list[tuple[torch.nn.Module, str, torch.nn.Parameter]]] = {}

    def widen(block: torch.nn.Module, *_: Any) -> None:
        kept[block] = []
        for module in block.modules():
            for name, parameter in module.named_parameters(recurse=False):
                kept[block].append((module, name, parameter))
                setattr(module, name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))

    def put_back(block: torch.nn.Module, *_: Any) -> None:
        for module, name, parameter in kept.pop(block, ()):
            setattr(module, name, parameter)

    with ExitStack() as stack:
        for block in _blocks(model):
            for handle in (
                block.register_forward_pre_hook(widen),
                block.register_forward_hook(put_back, always_call=True),
            ):
                stack.callback(handle.remove)
        _use_plain_recurrence(model, stack)
        yield


def _blocks(model: Any) -> list[torch.nn.Module]:
    """The layers, and whatever outside of them has parameters of its own. Layers may read their children's directly."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = list(max(lists, key=len, default=()))
    inside = {id(module) for layer in layers for module in layer.modules()}
    rest = [m for m in model.modules() if id(m) not in inside and next(m.parameters(recurse=False), None) is not None]
    return [*layers, *rest]


def _use_plain_recurrence(model: Any, stack: ExitStack) -> None:
    """Until `stack` closes, call transformers' torch code where its modules, or their own module, name a kernel."""
    patched: set[str] = set()
    for module in model.modules():
        code = sys.modules[type(module).__module__]
        plain = getattr(code, RECURRENCE, None)
        if plain is None:
            continue
        plain = inspect.unwrap(plain)
        for name in KERNELS:
            if name in vars(module):
                stack.enter_context(mock.patch.object(module, name, plain))
            if code.__name__ not in patched and hasattr(code, name):
                stack.enter_context(mock.patch.object(code, name, plain))
        patched.add(code.__name__)
