"""From the tensors of a checkpoint to the parameters of a model, without a second copy of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trivet.errors import CheckpointError, PluginError
from trivet.weights.checkpoint import Checkpoint
from trivet.weights.map import ParameterSpec, Part, WeightMap
from trivet.weights.staging import BLOCK_BYTES, copies, pieces

if TYPE_CHECKING:
    import torch


class ParameterBuffers(Protocol):
    """The buffers of `WeightMap.layout`: a flat tensor under each parameter's name."""

    def __getitem__(self, name: str) -> torch.Tensor: ...


Progress = Callable[[int, int], None]
"""Called with the bytes filled so far and the bytes of all parameters."""


def parameter_views(weight_map: WeightMap, buffers: ParameterBuffers) -> dict[str, torch.Tensor]:
    """Every parameter in its shape, as a view of its buffer."""
    return {spec.name: buffers[spec.name].view(spec.shape) for spec in weight_map.parameters}


def check(checkpoint: Checkpoint, weight_map: WeightMap) -> None:
    """Hold a checkpoint's headers against a weight map. Reads no data and allocates nothing.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config asks for, is of a dtype that
            weights are not read from, or is neither mapped nor ignored. Names tensor and file.
    """
    mapped: set[str] = set()
    for parameter in weight_map.parameters:
        for part in parameter.parts:
            _check_part(checkpoint, parameter, part)
            mapped.add(part.name)
    unexpected = [name for name in checkpoint.names if name not in mapped and not weight_map.ignores(name)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.file(unexpected[0])}: tensor {unexpected[0]!r} is not part of this model"
            f"{_and_more(unexpected)}: expected only tensors that its config asks for; check that "
            "config.json and weights belong together"
        )


def load_parameters(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    buffers: ParameterBuffers,
    dtype: str,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, torch.Tensor]:
    """Fill the buffers of ``weight_map.layout(dtype)`` and return the parameters as views of them.

    Each tensor is copied from the mapped file into its rows, file after file, and converted on the way, by the host.
    On the host the copy is straight; to a CUDA device it goes through two page-locked blocks, which are there while
    this runs (`trivet.weights.staging`), in the order of the current stream, and is done when this returns. A value
    beyond the target dtype's range becomes infinite, as torch's own conversion makes it: a float16 model made from a
    bfloat16 checkpoint may hold such.

    Args:
        block_bytes: copied at once, at most, and after it progress is told.

    Raises:
        CheckpointError: as `check`, before anything is copied.
        PluginError: `buffers` are of another layout.
    """
    check(checkpoint, weight_map)
    parameters = parameter_views(weight_map, buffers)
    _check_dtypes(weight_map, parameters, dtype)
    total_bytes = weight_map.parameter_bytes(dtype)
    done_bytes = 0
    placed = [(part, parameter, first) for parameter in weight_map.parameters for part, first in parameter.placed()]
    placed.sort(key=lambda entry: checkpoint.position(entry[0].name))
    to_cuda = any(parameter.is_cuda for parameter in parameters.values())
    with checkpoint, copies(block_bytes, to_cuda=to_cuda) as copy:
        for part, parameter, first in placed:
            rows = parameters[parameter.name][first : first + parameter.part_rows(part)]
            source = checkpoint.tensor(part.name).reshape(rows.shape)
            for target, piece in pieces(rows, source, block_bytes):
                copy(target, piece)
                done_bytes += target.nbytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
    return parameters


def _check_part(checkpoint: Checkpoint, parameter: ParameterSpec, part: Part) -> None:
    if part.name not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.directory} holds no tensor {part.name!r} in any file that is read: expected it, of "
            f"shape {list(part.shape)}, for parameter {parameter.name!r}; check that config.json and weights "
            "belong together"
        )
    found = checkpoint.shape(part.name)
    if found != part.shape:
        raise CheckpointError(
            f"{checkpoint.file(part.name)}: tensor {part.name!r} has shape {list(found)}: expected "
            f"{list(part.shape)} by config.json; check that config.json and weights belong together"
        )
    checkpoint.dtype(part.name)


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_dtypes(weight_map: WeightMap, parameters: dict[str, torch.Tensor], dtype: str) -> None:
    for spec in weight_map.layout(dtype).specs:
        found = str(parameters[spec.name].dtype).removeprefix("torch.")
        if found != spec.dtype:
            raise PluginError(
                f"buffer of parameter {spec.name!r} is {found}: expected {spec.dtype}, as its layout has it"
            )
