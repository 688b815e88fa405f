"""A strict reader of the safetensors files of one checkpoint directory.

Files are memory-mapped, one at a time; a tensor is a view of its file until it is copied. Nothing is
trusted: not the index's file names, not a header's offsets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attrs import frozen
from safetensors import SafetensorError, safe_open

from trivet.config.json_file import read_object
from trivet.errors import CheckpointError
from trivet.weights.header import fault

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INDEX_LIMIT_BYTES = 256 * 2**20

STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes that weights are read from, by their name in safetensors."""


@frozen
class StoredTensor:
    """One entry of a file's header.

    Attributes:
        file: where the tensor lies.
        position: rank among the tensors of its file by where the data lies.
        shape: as stored.
        dtype: as safetensors names it, for example ``"BF16"``.
    """

    file: Path
    position: int
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a checkpoint directory. Owns the one file that is mapped; close it, or use ``with``."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self._tensors = dict(tensors)
        self._mapped: tuple[Path, Any] | None = None

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read and validate the headers of the checkpoint's files; no tensor data is touched.

        With an index, each tensor is looked for in the file that the index names for it and nowhere else.
        Without one, ``model.safetensors`` is read, or every ``*.safetensors`` if there is none of that name.

        Raises:
            CheckpointError: no weights; an index that is damaged, names a path outside the directory, or
                a file or tensor that is not there; a truncated file or lying header; a tensor in two files.
                Names the file, and the tensor where one is at fault.
        """
        directory = Path(directory)
        if not os.path.isdir(directory):
            raise CheckpointError(f"{directory} is not a directory: expected one with *.safetensors")
        index = directory / INDEX_FILE
        if os.path.lexists(index):
            return cls(directory, _indexed(directory, index))
        return cls(directory, _unindexed(directory))

    @property
    def names(self) -> Sequence[str]:
        """Every tensor that is served from here, as it is called on disk."""
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def file(self, name: str) -> Path:
        """The file that `name` is read from."""
        return self._stored(name).file

    def position(self, name: str) -> tuple[str, int]:
        """Sort key that reads files one after another and each from front to back."""
        stored = self._stored(name)
        return str(stored.file), stored.position

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of `name`."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """The stored dtype of `name`, as torch names it.

        Raises:
            CheckpointError: it is none that weights are read from, as in quantised checkpoints.
        """
        stored = self._stored(name)
        try:
            return STORED_DTYPES[stored.dtype]
        except KeyError:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is stored as {stored.dtype}: expected one of "
                f"{', '.join(STORED_DTYPES)}; quantised weights are not served, use the original checkpoint"
            ) from None

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """`name`, or some `rows` of its dimension 0, on the CPU, in its stored shape and dtype.

        A whole tensor is a view of the mapped file: copy it before another file's tensor is asked for, so
        that no more than one file's pages are held.
        """
        self.dtype(name)
        stored = self._stored(name)
        try:
            mapped = self._map(stored.file)
            tensor: torch.Tensor = mapped.get_tensor(name) if rows is None else mapped.get_slice(name)[rows]
        except (SafetensorError, OSError, RuntimeError) as cause:
            raise CheckpointError(f"{stored.file}: tensor {name!r} cannot be read: {cause}") from cause
        if rows is None and tuple(tensor.shape) != stored.shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has shape {list(tensor.shape)}, it had {list(stored.shape)} "
                "when the checkpoint was opened: the file was changed meanwhile; load again"
            )
        return tensor

    def close(self) -> None:
        """Release the mapped file. Idempotent; reading again maps it again."""
        if self._mapped is not None:
            _, handle = self._mapped
            self._mapped = None
            handle.__exit__(None, None, None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory} holds no tensor {name!r}") from None

    def _map(self, file: Path) -> Any:
        if self._mapped is None or self._mapped[0] != file:
            self.close()
            self._mapped = file, safe_open(file, framework="pt")
        return self._mapped[1]


def _unindexed(directory: Path) -> dict[str, StoredTensor]:
    single = directory / SINGLE_FILE
    files = [single] if os.path.lexists(single) else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"no *.safetensors in {directory}: expected {SINGLE_FILE}, or shards with {INDEX_FILE}; other "
            "formats are not read, convert the checkpoint to safetensors"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} lies in both {tensors[name].file} and {file}: expected it in one of "
                    f"them; remove the stale file or add {INDEX_FILE}"
                )
            tensors[name] = stored
    return tensors


def _indexed(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_object(index, CheckpointError, INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: 'weight_map' is missing or no object: expected tensor names to files")
    headers: dict[Path, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(f"{index}: tensor {name!r} is mapped to {file_name!r}: expected a file name")
        file = directory / file_name
        if file not in headers:
            _require_inside(directory, index, name, file_name)
            headers[file] = _header(file, f"{index} names it for tensor {name!r}")
        if name not in headers[file]:
            raise CheckpointError(
                f"{file} holds no tensor {name!r}, which {index} places there: index and files are of "
                "different versions; download the checkpoint again"
            )
        tensors[name] = headers[file][name]
    return tensors


def _require_inside(directory: Path, index: Path, name: str, file_name: str) -> None:
    """Refuse a file name in an index that leads outside the checkpoint, by dots, root or symbolic link."""
    path = PurePosixPath(file_name)
    inside = bool(path.parts) and file_name.isprintable() and "\\" not in file_name
    inside = inside and not path.is_absolute() and ".." not in path.parts
    if inside:
        target = Path(os.path.realpath(directory / file_name))
        inside = any(target.is_relative_to(root) for root in _roots(directory))
    if not inside:
        raise CheckpointError(
            f"{index}: tensor {name!r} is mapped to {file_name!r}, which leaves the checkpoint's directory: "
            "expected the name of a file that lies within it"
        )


def _roots(directory: Path) -> list[Path]:
    """Where a checkpoint's files may lie: its directory; for a snapshot of the hub's cache, also its blobs.

    The cache keeps ``<model>/snapshots/<revision>/<file>`` as symbolic links into ``<model>/blobs``.
    """
    root = Path(os.path.realpath(directory))
    return [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]


def _header(file: Path, reason: str = "") -> dict[str, StoredTensor]:
    """Validate and read a file's header."""
    if not os.path.isfile(file):
        raise CheckpointError(
            f"{file} is missing or no regular file" + (f": {reason}" if reason else "") + "; download it again"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return {
                name: StoredTensor(file, position, tuple(view.get_shape()), view.get_dtype())
                for position, name in enumerate(opened.offset_keys())
                for view in (opened.get_slice(name),)
            }
    except (SafetensorError, OSError, RuntimeError) as cause:
        raise CheckpointError(f"{file}: {_fault(file) or cause}") from cause


def _fault(file: Path) -> str | None:
    try:
        return fault(file)
    except OSError as cause:
        return f"cannot be read: {cause}"
