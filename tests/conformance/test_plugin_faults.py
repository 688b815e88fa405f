"""What an author gets wrong in a plugin of the template is named: the part, the line, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.conformance.projects import project

from trivet.conformance import CHECKS, Asked, Kit, Outcome
from trivet.conformance.origin import origin

GATE = "plugin.tiny-models/1"
PATH = """
from trivet.attention.protocol import Replan
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import ReferencePath


class Owner(ReferenceOwner):
    {owner}


class Path(ReferencePath):
    name = "mine"
    {path}

    def bind(self, capacity, buffers):
        return Owner(capacity, buffers)
"""


@contextmanager
def changed(
    folder: Path, *replaced: tuple[str, str, str], path: str = "", owner: str = "", imports: str = ""
) -> Iterator[Kit]:
    """The kit of a project of the template in which texts of files are replaced; optionally with a path of its own."""
    with project(folder / "sprout", "sprout") as package:
        if path or owner:
            body = imports + PATH.format(path=path or "pass", owner=owner or "pass")
            (package / "path.py").write_text(body)
            declared = "    build=", "    decode_paths=(Path(),),\n    build="
            replaced = (*replaced, ("__init__.py", *declared))
            replaced = (
                *replaced,
                ("__init__.py", "from trivet.plugin import", "from .path import Path\nfrom trivet.plugin import"),
            )
        for name, text, other in replaced:
            source = (package / name).read_text()
            assert text in source
            (package / name).write_text(source.replace(text, other, 1))
        with Kit(Asked("sprout")) as kit:
            yield kit


def run(kit: Kit, id: str) -> Outcome:
    return kit.run(next(check for check in CHECKS if check.id == id))


def alone(kit: Kit, id: str) -> Outcome:
    """One check without the gates before it, which ask other processes."""
    return kit._outcome(next(check for check in CHECKS if check.id == id))


def text_of(outcome: Outcome) -> str:
    assert outcome.status == "failed" and outcome.failure is not None
    return outcome.failure.text()


@pytest.mark.parametrize(
    ("file", "text", "other", "says"),
    [
        ("__init__.py", "return ModelGeometry(", "return dict(", ("read_geometry returned {", "a ModelGeometry")),
        ("__init__.py", "return WeightMap(", "_ = WeightMap(", ("weight_map returned None", "a WeightMap")),
        (
            "__init__.py",
            '"num_attention_heads")',
            '"heads")',
            ("read_geometry raises ConfigError", "sprout/__init__.py:"),
        ),
        ("__init__.py", ".model:build", ".model:bild", ("'bild'", "ModelFamily.build names cannot be imported")),
        ("model.py", "from torch import", "import no_such\nfrom torch import", ("no_such", "ModelFamily.build names")),
        ("model.py", 'below("mlp_norm")', 'below("norm_2")', ("norm_2", "build raises", "sprout/model.py:")),
        ("model.py", "return hidden +", "return [] + hidden +", ("first step", "sprout/model.py:", "in __call__")),
    ],
    ids=["geometry", "weight map", "config", "build", "import", "parameter", "layer"],
)
def test_the_gate_names_the_phase_and_the_line_of_the_plugin(
    file: str, text: str, other: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    with changed(tmp_path, (file, text, other)) as kit:
        told = text_of(alone(kit, GATE))
    assert all(each in told for each in says), told


def test_a_path_that_breaks_every_model_is_blamed_by_what_fails_on_it_alone(tmp_path: Path) -> None:
    owner = (
        "def update(self, batch):\n        super().update(batch)\n        self.buffers['positions'].add_(10**6)\n"
        "        return Replan.REPLANNED"
    )
    with changed(tmp_path, owner=owner) as kit:
        gate, positions, later = (run(kit, id) for id in (GATE, "plan.positions/1", "weights.every-tensor-matters/1"))
    assert "plan.positions/1 fails on the path alone: path 'mine'" in text_of(gate), text_of(gate)
    assert "path 'mine'" in text_of(positions)
    assert (later.status, later.reason) == ("not run", f"{GATE} failed")


def test_scratch_that_is_not_stated_is_told_from_layers_that_keep_too_much(tmp_path: Path) -> None:
    owner = (
        "def attend(self, query, keys, values):\n        waste = query.new_zeros(10**6)\n"
        "        return super().attend(query, keys, values) + waste[0]"
    )
    with changed(tmp_path, owner=owner) as kit:
        told = text_of(alone(kit, GATE))
    assert "its scratch_bytes states" in told, told


WITHOUT_SCRATCH = {
    "a buffer of its own": (
        "if not hasattr(self, 'out'):\n"
        "                self.out = query.new_empty(self.capacity.tokens, *query.shape[1:])\n"
        "            into = self.out[:len(query)]\n"
        "            into.copy_(super().attend(query, keys, values))\n"
        "        return into"
    ),
    "the query": "query.copy_(super().attend(query, keys, values))\n        return query",
    "a new tensor": "out = super().attend(query, keys, values)\n        return torch.empty_like(query).copy_(out)",
}
"""Attention as kernels compute it: beside torch, and what comes of it."""


@pytest.mark.parametrize("result", WITHOUT_SCRATCH)
def test_attention_without_scratch_may_leave_its_result_where_it_likes(result: str, tmp_path: Path) -> None:
    owner = (
        "def append(self, *tensors):\n        with _disable_current_modes():\n            super().append(*tensors)\n\n"
        "    def attend(self, query, keys, values):\n        with _disable_current_modes():\n            "
        + WITHOUT_SCRATCH[result]
    )
    stateless = "def scratch_bytes(self, capacity, dtype):\n        return 0"
    modes = "import torch\nfrom torch.utils._python_dispatch import _disable_current_modes\n"
    deep = "__init__.py", '"num_hidden_layers": 2', '"num_hidden_layers": 24'
    with changed(tmp_path, deep, path=stateless, owner=owner, imports=modes) as kit:
        outcomes = [alone(kit, id) for id in (GATE, "ledger.covers-the-peak/2")]
    assert [(o.id, o.failure and o.failure.text()) for o in outcomes if o.status != "passed"] == []
    assert outcomes[1].measured["attention_over_planned"] == 0.0


OWNERS = {
    "positions beside the buffers": (
        "@property\n    def positions(self):\n        return super().positions.clone()",
        "plan.positions/1",
        "in none of the plan's buffers",
    ),
    "positions of another dtype": (
        "@property\n    def positions(self):\n        return super().positions.long()",
        "plan.positions/1",
        "torch.int64",
    ),
    "arrays of the batch kept": (
        "def update(self, batch):\n        self.pages = batch.page_indices\n        return super().update(batch)\n\n"
        "    def attend(self, query, keys, values):\n"
        "        return super().attend(query, keys, values) + float(self.pages.sum())",
        "plan.pointers-stable/1",
        "keeps an array of the batch",
    ),
}


@pytest.mark.parametrize("fault", OWNERS)
def test_an_owner_that_holds_its_plan_outside_its_buffers_is_refused(fault: str, tmp_path: Path) -> None:
    owner, check, says = OWNERS[fault]
    with changed(tmp_path, owner=owner) as kit:
        assert says in text_of(alone(kit, check))


CONFIGS = {
    "as it stands": ("document.raw('scale')", "scale = 'x' is read without an error"),
    "without a bound": ("document.number('scale')", "scale = -1.0 is read without an error"),
    "with a fault of its own": ("1 / document.number('scale', minimum=0.0)", "ZeroDivisionError"),
}


@pytest.mark.parametrize("read", CONFIGS)
def test_a_value_that_changes_the_geometry_unchecked_is_named(read: str, tmp_path: Path) -> None:
    expression, says = CONFIGS[read]
    with changed(
        tmp_path,
        (
            "__init__.py",
            "def read_geometry",
            "import attrs\n\n@attrs.frozen(kw_only=True)\nclass Scaled(ModelGeometry):\n    scale: object\n\n"
            "def read_geometry",
        ),
        ("__init__.py", "return ModelGeometry(", "return Scaled(\n        scale=" + expression + ","),
        ("__init__.py", '    "vocab_size": 61,', '    "vocab_size": 61,\n    "scale": 4.0,'),
    ) as kit:
        told = text_of(alone(kit, "config.damaged-is-refused/1"))
    assert says in told and "scale" in told


def test_a_whole_number_that_is_read_as_a_number_may_be_a_fraction(tmp_path: Path) -> None:
    with changed(tmp_path, ("__init__.py", '"rope_theta": 10000.0', '"rope_theta": 10000')) as kit:
        assert alone(kit, "config.damaged-is-refused/1").status == "passed"


def test_a_tensor_kept_from_every_step_is_found(tmp_path: Path) -> None:
    kept = "return hidden +", "self.kept = [*getattr(self, 'kept', ()), hidden]\n        return hidden +"
    with changed(tmp_path, ("model.py", *kept)) as kit:
        assert "keeps a tensor of each step" in text_of(alone(kit, "ledger.covers-the-peak/2"))


SET = {
    "threads, by an import": ("torch.set_num_threads(1)", "torch.get_num_threads() is 1, and was 3"),
    "a print, by an import": ("print('built')", "standard output: 'built"),
    "the device": ("torch.set_default_device('cpu')", "torch.set_default_device is cpu,"),
    "a backend": ("torch.backends.mkldnn.enabled = False", "torch.backends.mkldnn.enabled is False"),
    "denormals": ("torch.set_flush_denormal(True)", "torch.set_flush_denormal is True"),
}


@pytest.mark.parametrize("fault", SET)
def test_what_a_family_does_to_its_process_is_named_and_done_to_no_other(fault: str, tmp_path: Path) -> None:
    line, says = SET[fault]
    at_import = f"\n\nimport torch\n{line}\n\n\ndef build("
    in_build = f"\n\ndef build(*inputs):\n    import torch\n    {line}\n    return made(*inputs)\n\n\ndef made("
    source = at_import if "import" in fault else in_build
    with changed(tmp_path, ("model.py", "\n\ndef build(", source)) as kit:
        told = text_of(alone(kit, "process.left-as-it-was/2"))
    assert says in " ".join(told.split()), told
    assert str(torch.get_default_device()) == "cpu" and torch.backends.mkldnn.enabled


def test_a_fault_of_an_import_is_found_after_other_checks_have_caused_the_import(tmp_path: Path) -> None:
    line = "torch.backends.cudnn.benchmark = True"
    with changed(tmp_path, ("model.py", "\n\ndef build(", f"\n\nimport torch\n{line}\n\n\ndef build(")) as kit:
        try:
            assert alone(kit, "ledger.planned-is-loaded/1").status == "passed" and torch.backends.cudnn.benchmark
            assert "cudnn.benchmark is True" in " ".join(text_of(alone(kit, "process.left-as-it-was/2")).split())
        finally:
            torch.backends.cudnn.benchmark = False


def test_the_origin_of_an_error_is_where_its_cause_was_raised() -> None:
    def deep() -> None:
        raise KeyError("x")

    try:
        try:
            deep()
        except KeyError as error:
            raise ValueError("y") from error
    except ValueError as outer:
        assert origin(outer).endswith("in deep")
        assert origin(outer, (__name__.partition(".")[0],)).count("test_plugin_faults.py") == 1
    assert sys.exc_info() == (None, None, None)
