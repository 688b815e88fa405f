"""What a family's parameters are called, on disk and in the model. Free of torch.

Both the weight line of the memory ledger and the tensors that the loader fills are read off
`WeightMap.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal

from attrs import field, frozen

from trivet import dtypes
from trivet.errors import PluginError
from trivet.layout import BufferLayout, BufferSpec

LAYOUT_NAME = "weights"


@frozen
class Initial:
    """How a parameter's random weights are drawn. Use the constructors, which name their parameters.

    Attributes:
        kind: ``"normal"``: centre + spread x N(0, 1). ``"uniform"``: evenly from centre - spread to
            centre + spread. ``"log_uniform"``: the natural logarithm of such an even draw.
        centre: mean of the draw.
        spread: standard deviation (normal) or half width (the others); 0 makes a constant.
    """

    kind: Literal["normal", "uniform", "log_uniform"]
    centre: float
    spread: float

    def __attrs_post_init__(self) -> None:
        if not (math.isfinite(self.centre) and math.isfinite(self.spread) and self.spread >= 0.0):
            raise PluginError(f"{self}: expected a finite centre and a finite spread of at least 0")
        if self.kind == "log_uniform" and not self.centre - self.spread > 0.0:
            raise PluginError(f"{self}: a logarithm is taken of the draw: expected bounds above 0")

    @classmethod
    def normal(cls, std: float) -> Initial:
        """Normal around 0: projections and embeddings."""
        return cls("normal", 0.0, std)

    @classmethod
    def uniform(cls, low: float, high: float) -> Initial:
        """Evenly within ``[low, high]``."""
        return cls("uniform", (low + high) / 2, (high - low) / 2)

    @classmethod
    def log_uniform(cls, low: float, high: float) -> Initial:
        """The natural logarithm of an even draw within ``[low, high]``: decay rates kept as logarithms."""
        return cls("log_uniform", (low + high) / 2, (high - low) / 2)

    @classmethod
    def near(cls, centre: float, spread: float) -> Initial:
        """A constant with noise, evenly within ``centre ± spread``: norm weights around 1, or around 0."""
        return cls("uniform", centre, spread)


PROJECTION = Initial.normal(0.02)


def _sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


def _parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(parts)


def _parameters(parameters: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    return tuple(parameters)


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(patterns)


@frozen
class Part:
    """One tensor as it lies on disk.

    Attributes:
        name: as it is called in the checkpoint.
        shape: as it is stored there.
    """

    name: str
    shape: tuple[int, ...] = field(converter=_sizes)


@frozen
class ParameterSpec:
    """One parameter of the model and the tensors on disk that fill it.

    The parts are concatenated along dimension 0, each reshaped to ``(-1, *shape[1:])`` before: query, key
    and value projections become one parameter, and a depthwise ``[channels, 1, kernel]`` fills
    ``[channels, kernel]``.

    Attributes:
        name: as the model's layers ask for it.
        shape: in the model; at least one dimension.
        parts: in the order of their rows.
        dtype: kept in this dtype whatever the model is served in; None: the served dtype.
        initial: how random weights are drawn.

    Raises:
        PluginError: the parts do not fill the shape, naming both.
    """

    name: str
    shape: tuple[int, ...] = field(converter=_sizes)
    parts: tuple[Part, ...] = field(converter=_parts)
    dtype: str | None = None
    initial: Initial = PROJECTION

    def __attrs_post_init__(self) -> None:
        if not self.shape or not self.parts:
            raise PluginError(f"{self._place}: expected at least one dimension and one part")
        for what, shape in (
            (self._place, self.shape),
            *((repr(part.name), part.shape) for part in self.parts),
        ):
            if any(size < 1 for size in shape):
                raise PluginError(f"{what} has shape {list(shape)}: expected every dimension to be at least 1")
        if self.dtype is not None and self.dtype not in dtypes.SERVED:
            raise PluginError(
                f"{self._place} is kept in {self.dtype!r}: expected None or one of {', '.join(dtypes.SERVED)}"
            )
        for part in self.parts:
            if math.prod(part.shape) % self.row_elements:
                raise PluginError(
                    f"{self._place}: part {part.name!r} of shape {list(part.shape)} is no whole number of "
                    f"rows of {self.row_elements} elements, as shape {list(self.shape)} has"
                )
        rows = sum(self.part_rows(part) for part in self.parts)
        if rows != self.shape[0]:
            raise PluginError(
                f"{self._place}: the parts {[part.name for part in self.parts]} fill {rows} rows: expected "
                f"{self.shape[0]}, dimension 0 of shape {list(self.shape)}"
            )

    @property
    def _place(self) -> str:
        return f"weight map: parameter {self.name!r}"

    @property
    def elements(self) -> int:
        """Length in elements."""
        return math.prod(self.shape)

    @property
    def row_elements(self) -> int:
        """Elements of one row, an entry of dimension 0."""
        return math.prod(self.shape[1:])

    def part_rows(self, part: Part) -> int:
        """Rows that `part` fills."""
        return math.prod(part.shape) // self.row_elements

    def placed(self) -> Iterator[tuple[Part, int]]:
        """Each part with the first row that it fills."""
        first = 0
        for part in self.parts:
            yield part, first
            first += self.part_rows(part)


@frozen
class WeightMap:
    """Every parameter of a model, and the checkpoint tensors that are deliberately not served.

    Attributes:
        parameters: names unique, and each tensor on disk part of one parameter only.
        ignored: glob patterns of tensors on disk that are skipped; any other tensor that no parameter
            names is an error at load.

    Raises:
        PluginError: a name stands twice, or a mapped tensor is also ignored.
    """

    parameters: tuple[ParameterSpec, ...] = field(converter=_parameters)
    ignored: tuple[str, ...] = field(converter=_patterns, default=())

    def __attrs_post_init__(self) -> None:
        names: set[str] = set()
        owners: dict[str, str] = {}
        for parameter in self.parameters:
            if parameter.name in names:
                raise PluginError(f"weight map: two parameters are called {parameter.name!r}")
            names.add(parameter.name)
            for part in parameter.parts:
                if part.name in owners:
                    raise PluginError(
                        f"weight map: tensor {part.name!r} fills both {owners[part.name]!r} and "
                        f"{parameter.name!r}: expected one parameter for each tensor"
                    )
                owners[part.name] = parameter.name
                if self.ignores(part.name):
                    raise PluginError(
                        f"weight map: tensor {part.name!r} fills {parameter.name!r} and matches a pattern of "
                        f"ignored tensors, {list(self.ignored)}"
                    )

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint tensor `name` is deliberately not served."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def layout(self, dtype: str) -> BufferLayout:
        """One flat buffer for each parameter, under its name, when the model is served in `dtype`."""
        specs = tuple(
            BufferSpec(parameter.name, parameter.elements, parameter.dtype or dtype) for parameter in self.parameters
        )
        return BufferLayout(LAYOUT_NAME, specs)

    def parameter_bytes(self, dtype: str) -> int:
        """Bytes of all parameters when the model is served in `dtype`."""
        return self.layout(dtype).total_bytes
