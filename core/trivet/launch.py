"""Launches of Triton kernels for a fraction of the host time that Triton's own take.

At each launch Triton classifies every argument, makes a text of that, and looks its kernel up by the text; then its
launcher asks the driver about every pointer. `lean` keeps what Triton compiled under a key of plain values, which code
that is generated for the kernel's parameters computes, and hands addresses to the same launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from trivet.installed import TESTED_TRITON

OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
"""Launch options that are part of the key; None is Triton's own default."""

OWN = "lean_"
"""How names in generated code begin that are not the kernel's parameters."""


def lean(kernel: Any) -> Any:
    """``kernel[grid](*arguments, **named)`` as Triton launches it, for less host time: see `LeanKernel`.

    A decorator to stand above ``@triton.jit``. What is interpreted, what another version of Triton than the tested ones
    made, and a kernel whose parameters have the names of launch options, are returned as they are.
    """
    if not isinstance(kernel, JITFunction) or not triton.__version__.startswith(TESTED_TRITON):
        return kernel
    if any(name in OPTIONS or name.startswith(OWN) for name in kernel.arg_names):
        return kernel
    return LeanKernel(kernel)


class LeanKernel:
    """A kernel whose launches are kept, by device and by all that Triton compiles anew for.

    That is: the types of arguments, dtypes, whether addresses and integers are multiples of 16, which integers are 1 or
    need more than 32 bits, constants, and launch options. The first launch of a kind is Triton's own. So is every
    launch

    - while hooks are set, such as a profiler's;
    - with a tensor that is not on a CUDA device, which Triton refuses, or with an argument that is none of tensor, int,
      float, bool and None;
    - with an option that is not in `OPTIONS`, or with a grid that is not a tuple;
    - of a kernel that wants scratch memory.

    Triton's environment and the globals that the kernel names count as they are when a launch is first made. A kept
    launch allocates nothing and waits for nothing on the device, so that it may be captured. It returns None.

    Attributes:
        plain: the kernel as Triton launches it.
    """

    __slots__ = ("_launch", "plain")

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        # One function for each combination of types that was seen, the newest first; each passes others on to the one
        # before it, and the first of all makes a new one.
        body = f"return {OWN}new_types({OWN}grid, {_arguments(plain)}, {_options()})"
        self._launch = _function(plain, [body], {"new_types": self._new_types})

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """What launches the kernel on `grid`, a tuple of one to three numbers of programs."""
        if type(grid) is not tuple:
            launch: Callable[..., Any] = self.plain[grid]
            return launch
        return partial(self._launch, grid)

    def _new_types(self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kinds = [
            Kind.CONSTANT if parameter.is_constexpr else _kind(argument)
            for parameter, argument in zip(self.plain.params, arguments, strict=True)
        ]
        if Kind.OTHER in kinds or not options.keys() <= set(OPTIONS):
            _launch_plainly(self.plain, grid, arguments, options)
            return
        self._launch = _launch_of_kinds(self.plain, arguments, kinds, self._launch)
        self._launch(grid, *arguments, **options)


class Kind(Enum):
    """What of an argument is part of a key, and how it is passed."""

    CONSTANT = auto()
    """Compiled into the kernel: its value."""
    TENSOR = auto()
    """Its dtype and whether it is aligned; passed as its address."""
    INTEGER = auto()
    """See `_divisible` and `_wide`."""
    TYPE = auto()
    """None, a float or a bool: its type alone."""
    OTHER = auto()
    """Nothing that launches are kept for."""


def _kind(argument: Any) -> Kind:
    if isinstance(argument, Tensor):
        return Kind.TENSOR
    if type(argument) is int:
        return Kind.INTEGER
    return Kind.TYPE if argument is None or type(argument) in (float, bool) else Kind.OTHER


def _launch_plainly(plain: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch in Triton's way, and return what it compiled."""
    return plain[grid](*arguments, **{name: value for name, value in options.items() if value is not None})


def _launch_and_keep(
    plain: Any,
    kept: dict[tuple[Any, ...], tuple[Any, ...]],
    key: tuple[Any, ...],
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Launch in Triton's way, and keep what it launched, unless its launcher does more than to launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    compiled = _launch_plainly(plain, grid, arguments, options)
    launcher = getattr(compiled, "run", None)
    if isinstance(launcher, CudaLauncher) and not launcher.global_scratch_size and not launcher.profile_scratch_size:
        cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
        kept[key] = (launcher.launch, compiled.function, cooperative, dependent, compiled.packed_metadata)


def _launch_of_kinds(
    plain: Any, arguments: tuple[Any, ...], kinds: list[Kind], following: Callable[..., None]
) -> Callable[..., None]:
    """A function that launches `plain` with arguments of these types, and calls `following` with others."""
    parameters = list(zip(plain.params, arguments, kinds, strict=True))
    tensors = [parameter for parameter, _, kind in parameters if kind is Kind.TENSOR]
    integers = [parameter for parameter, _, kind in parameters if kind is Kind.INTEGER]
    constants = [parameter.name for parameter, _, kind in parameters if kind is Kind.CONSTANT]
    aligned = [f"{OWN}at_{tensor.name}" for tensor in tensors if _by_alignment(tensor)]

    get_device = driver.active.get_current_device
    if get_device is torch.cuda.current_device:  # which first makes sure of CUDA: here are tensors on it
        get_device = torch._C._cuda_getDevice
    hooks = type(knobs.runtime)
    kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    names = {
        "type": type,
        "len": len,
        "following": following,
        "plainly": partial(_launch_plainly, plain),
        "plain": plain,
        "kept": kept,
        "keep": partial(_launch_and_keep, plain, kept),
        "current_device": get_device,
        "stream": driver.active.get_current_stream,
        "runtime": knobs.runtime,
        "enter": hooks.launch_enter_hook,
        "exit": hooks.launch_exit_hook,
    }
    same_types = []
    for parameter, argument, kind in parameters:
        if kind is not Kind.CONSTANT:
            names[f"type_{parameter.name}"] = type(argument)
            same_types.append(f"{OWN}type({parameter.name}) is {OWN}type_{parameter.name}")

    key = [f"{OWN}device", *OPTIONS, *constants, *(f"{tensor.name}.dtype" for tensor in tensors)]
    if aligned:
        each = ", ".join(f"not {address} & 15" for address in aligned)
        key.append(f"not ({' | '.join(aligned)}) & 15 or ({each},)")
    key.extend(_divisible(integer) for integer in integers if not integer.do_not_specialize)
    if integers:
        key.append(_wide([integer.name for integer in integers]))

    passed = [f"{OWN}at_{p.name}" if kind is Kind.TENSOR else p.name for p, _, kind in parameters]
    everything = f"({OWN}grid, {_arguments(plain)}, {_options()})"
    by_name = "".join(f", {parameter.name}" for parameter in plain.params)
    named = "".join(f", {option}={option}" for option in OPTIONS)
    lines = [
        f"if {OWN}others or not ({' and '.join(same_types) or True}):",
        f"    return {OWN}following({OWN}grid{by_name}{named}, **{OWN}others)",
        f"if {_hooked()} or not ({' and '.join(f'{tensor.name}.is_cuda' for tensor in tensors) or True}):",
        f"    {OWN}plainly{everything}",
        "    return",
        *(f"{OWN}at_{tensor.name} = {tensor.name}.data_ptr()" for tensor in tensors),
        f"{OWN}device = {OWN}current_device()",
        f"{OWN}key = ({', '.join(key)},)",
        f"{OWN}found = {OWN}kept.get({OWN}key)",
        f"if {OWN}found is None:",
        f"    return {OWN}keep({OWN}key, {everything[1:]}",
        f"{OWN}launcher, {OWN}function, {OWN}cooperative, {OWN}dependent, {OWN}metadata = {OWN}found",
        f"{OWN}size = {OWN}len({OWN}grid)",
        f"{OWN}launcher(",
        f"    {OWN}grid[0], {OWN}grid[1] if {OWN}size > 1 else 1, {OWN}grid[2] if {OWN}size > 2 else 1,",
        f"    {OWN}stream({OWN}device), {OWN}function, {OWN}cooperative, {OWN}dependent,",
        "    None, None,",  # scratch memory
        f"    {OWN}metadata,",
        "    None, None, None,",  # what hooks are told, and the hooks
        *(f"    {argument}," for argument in passed),
        ")",
    ]
    return _function(plain, lines, names)


def _by_alignment(parameter: Any) -> bool:
    """Whether Triton compiles anew for multiples of 16."""
    return not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment


def _divisible(parameter: Any) -> str:
    """An expression that tells integers that are 1, are multiples of 16 (if that matters), and are neither, apart."""
    is_not_1 = f"{parameter.name} != 1"
    return f"2 if not {parameter.name} & 15 else {is_not_1}" if _by_alignment(parameter) else is_not_1


def _wide(integers: list[str]) -> str:
    """An expression that tells integers of 32 bits, of 64, and of 64 without a sign, apart."""
    return f"({' | '.join(integers)}) >> 31 and ({', '.join(f'{integer} >> 31' for integer in integers)},)"


def _hooked() -> str:
    """An expression for whether somebody asked Triton to be called at launches."""
    return (
        f"{OWN}runtime.launch_enter_hook is not {OWN}enter or {OWN}enter.calls or "
        f"{OWN}runtime.launch_exit_hook is not {OWN}exit or {OWN}exit.calls or {OWN}plain.pre_run_hooks"
    )


def _arguments(plain: Any) -> str:
    """The kernel's arguments as a tuple."""
    return "(" + "".join(f"{parameter.name}, " for parameter in plain.params) + ")"


def _options() -> str:
    """The launch options as a dictionary."""
    return "{" + "".join(f"'{option}': {option}, " for option in OPTIONS) + f"**{OWN}others}}"


def _function(plain: Any, lines: list[str], names: dict[str, Any]) -> Callable[..., None]:
    """A function of a grid, the kernel's parameters and launch options, that runs `lines`.

    `names` are what the lines name beside these, without `OWN` before them.
    """
    known = {f"{OWN}{name}": value for name, value in names.items()}
    signature = [f"{OWN}grid", "/"]
    for parameter in plain.params:
        if parameter.has_default:
            known[f"{OWN}default_{parameter.name}"] = parameter.default
            signature.append(f"{parameter.name}={OWN}default_{parameter.name}")
        else:
            signature.append(parameter.name)
    signature += ["*", *(f"{option}=None" for option in OPTIONS), f"**{OWN}others"]
    name = plain.__name__
    exec("\n    ".join([f"def {name}({', '.join(signature)}):", *lines]), known)
    made: Callable[..., None] = known[name]
    return made
