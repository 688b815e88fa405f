"""A transformers model whose parameters are the runtime's own: assigned as views, nothing is copied."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import ConfigError
from trivet.gate.session import GateError
from trivet.installed import install_extra
from trivet.weights.loader import parameter_views
from trivet.weights.map import WeightMap

if TYPE_CHECKING:
    import torch

    from trivet.runtime.runtime import Runtime

NESTED = ("model.language_model.", "model.")
"""Checkpoints with a vision tower put the language model's tensors one level deeper than its class does."""


def import_transformers() -> Any:
    """The library, silenced.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        advice = install_extra("gate")
        raise ConfigError(f"the reference is transformers, which is not installed; {advice}") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def disk_views(weight_map: WeightMap, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor by its name on disk, in its shape there, as a view of the rows that it fills of a parameter."""
    views = {}
    for spec in weight_map.parameters:
        for part, first in spec.placed():
            rows = parameters[spec.name][first : first + spec.part_rows(part)]
            views[part.name] = rows.view(part.shape)
    return views


def runtime_views(runtime: Runtime) -> dict[str, torch.Tensor]:
    """The parameters that `runtime` computes with, by their names on disk."""
    engine = runtime._engine
    weight_map = engine.blueprint.weight_map
    return disk_views(weight_map, parameter_views(weight_map, engine.owned[engine.blueprint.weights.name]))


def build_over(directory: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The transformers model of a checkpoint's config, over `tensors` by their names on disk.

    Attention is transformers' own ``"sdpa"``; recurrent layers use the kernels that transformers finds.

    Args:
        directory: holds config.json.
        dtype: what the model believes it is in; the tensors stay as they are.

    Raises:
        ConfigError: transformers is not installed.
        GateError: tensors and model do not fit each other, naming both.
    """
    import torch

    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(directory).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state = {_name_in(wanted, name): tensor for name, tensor in tensors.items()}
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings:
        names = {id(module): name for name, module in model.named_modules()}
        tied = state.get(f"{names[id(embedding)]}.weight")
        if tied is not None:
            state.setdefault(f"{names[id(output)]}.weight", tied)
    missing, unknown = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    wrong = [name for name in set(wanted) & set(state) if wanted[name] != state[name].shape]
    if missing or unknown or wrong:
        raise GateError(
            f"{type(model).__name__} of transformers and the weight map do not fit: without a tensor {missing[:3]}, "
            f"without a place {unknown[:3]}, of another shape {wrong[:3]}"
        )
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _make_buffers(model, next(iter(tensors.values())).device)
    return model.eval()


def copied_bytes(model: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the parameters of `model` that do not lie in the storages of `tensors`."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return sum(p.nbytes for p in model.parameters() if p.untyped_storage().data_ptr() not in storages)


def _name_in(wanted: Mapping[str, Any], name: str) -> str:
    """What the model calls the tensor `name`; `name` itself where it has no such tensor."""
    nested, plain = NESTED
    inner = plain + name.removeprefix(nested)
    return inner if name not in wanted and name.startswith(nested) and inner in wanted else name


def _make_buffers(model: Any, device: torch.device) -> None:
    """Compute what is in no checkpoint, such as the frequencies of rotary embeddings, which building left empty."""
    for module in model.modules():
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if empty:
            made = type(module)(module.config)
            for name in empty:
                setattr(module, name, getattr(made, name).to(device))
