"""Which FlashInfer path serves what, and why: told without the library, and without a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tests.support.attention import geometry
from tests.support.flashinfer import H200, flashinfer_capacity

from trivet.attention import PathRequest, select_path
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.library import TESTED_VERSION
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.speeds import HeadDimSpeeds, SpeedTable
from trivet.attention.paths import standard_paths
from trivet.capacity import DeviceProfile, Limits
from trivet.errors import CapacityExceeded, ConfigError

EQUAL = SpeedTable({"h200": {128: HeadDimSpeeds((1, 2, 4), {4: 0.9, 2: 1.5}, None)}})
COMPILED = FlashInferPath(DecodeKernel.COMPILED, EQUAL)
PREFILL = FlashInferPath(DecodeKernel.PAGED_PREFILL, EQUAL)
SPLIT_RATIOS = {1: 0.95, 2: 0.8, 4: 0.7, 5: 0.6, 7: 1.2}
TIMED = SpeedTable({"h200": {128: HeadDimSpeeds((1, 2, 4), {1: 0.9, 2: 1.5, 4: 0.8}, None, SPLIT_RATIOS)}})
SPLIT = FlashInferPath(DecodeKernel.SPLIT_KV, TIMED)
PINNED = FlashInferPath(DecodeKernel.SPLIT_KV, TIMED, pinned=True)


def need(group: int = 5, head_dim: int = 128, device: DeviceProfile = H200, **changes: str) -> PathRequest:
    made = PathRequest(geometry(group, 2, head_dim), device, "bfloat16", "tuned", 16)
    return attrs.evolve(made, **changes)


@pytest.mark.parametrize("path", [COMPILED, PREFILL, SPLIT], ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (need(device=DeviceProfile.named("cpu")), "runs on CUDA devices, and cpu is none"),
        (need(device=attrs.evolve(H200, name="v100", compute_capability=(7, 0))), "compute capability 7.0"),
        (need(dtype="float32"), "not in float32"),
        (need(head_dim=96), "head dim 96"),
        (need(head_dim=72), "head dim 72"),
        (need(numeric_policy="pinned"), "depend on the batch"),
        (need(device=attrs.evolve(H200, present=True)), f"flashinfer-python {TESTED_VERSION} is not installed"),
    ],
)
def test_what_is_not_served_is_refused_with_a_reason(
    path: FlashInferPath, asked: PathRequest, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.installed.util.find_spec", lambda name: None)
    verdict = path.usable(asked)
    assert not verdict.ok
    assert reason in verdict.reason


def test_the_decode_kernel_serves_what_it_is_compiled_for_unless_it_was_measured_slower() -> None:
    verdicts = {group: COMPILED.usable(need(group)) for group in (1, 2, 4, 5)}
    assert {group: verdict.ok for group, verdict in verdicts.items()} == {1: True, 2: False, 4: True, 5: False}
    assert "was never measured against" in verdicts[1].reason
    assert "1.50 times as long" in verdicts[2].reason
    assert "0.90 times as long" in verdicts[4].reason
    assert "not compiled for group size 5" in verdicts[5].reason


def test_the_split_kv_kernel_serves_only_where_it_was_measured_to_be_the_fastest() -> None:
    verdicts = {group: SPLIT.usable(need(group)) for group in (1, 2, 3, 4, 5, 7)}
    served = {group for group, verdict in verdicts.items() if verdict.ok}
    assert served == {2, 4, 5}
    assert "no speed of the split-KV kernel over all numbers of rows is committed on h200" in verdicts[3].reason
    assert "for group size 3 at head dim 128" in verdicts[3].reason and "steps of" not in verdicts[3].reason
    assert "1.06 times as long as FlashInfer's decode kernel" in verdicts[1].reason
    assert "1.20 times as long as the paged-prefill kernel" in verdicts[7].reason
    assert "0.60 times as long as the paged-prefill kernel" in verdicts[5].reason
    assert not SPLIT.usable(need(5, 64)).ok
    assert not SPLIT.usable(need(5, device=attrs.evolve(H200, name="h900"))).ok


@pytest.mark.parametrize(("group", "head_dim", "rows"), [(4, 128, 16), (5, 128, 16), (6, 256, 2)])
def test_where_it_serves_steps_of_few_rows_it_does_not_say_that_it_is_unknown(
    group: int, head_dim: int, rows: int
) -> None:
    refused = FlashInferPath(DecodeKernel.SPLIT_KV).usable(need(group, head_dim))
    assert not refused.ok and f"steps of up to {rows} rows run on it through" in refused.reason


@pytest.mark.parametrize("kernel", DecodeKernel)
def test_a_forced_path_serves_whatever_was_measured(kernel: DecodeKernel) -> None:
    slow = SpeedTable({"h200": {128: HeadDimSpeeds((4,), {4: 9.0}, None, {4: 9.0})}})
    assert FlashInferPath(kernel, slow).usable(need(4)).ok == (kernel is DecodeKernel.PAGED_PREFILL)
    assert FlashInferPath(kernel, slow, forced=True).usable(need(4)).ok
    assert not FlashInferPath(kernel, slow, forced=True).usable(need(4, numeric_policy="pinned")).ok


def test_the_pinned_policy_is_served_by_the_split_kv_kernel_alone_and_that_path_serves_nothing_else() -> None:
    selection = select_path(standard_paths(), need(numeric_policy="pinned"))
    assert selection.path.name == "split-kv-pinned"
    assert "no result depends on the batch" in selection.reason
    refused = PINNED.usable(need())
    assert not refused.ok and "numeric_policy='pinned' alone" in refused.reason
    with pytest.raises(ConfigError, match="cannot serve the pinned policy"):
        FlashInferPath(DecodeKernel.COMPILED, pinned=True)


def test_an_unknown_backend_is_answered_with_the_names_of_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"called 'fast': expected one of 'flashinfer', 'reference', or none"):
        select_path(standard_paths(), attrs.evolve(need(), backend="fast"))


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.attention.flashinfer.paths.missing_library", lambda: None)
    monkeypatch.setattr("trivet.installed.util.find_spec", lambda name: None)
    verdict = SPLIT.usable(need(5, device=attrs.evolve(H200, present=True)))
    assert not verdict.ok and "Triton is not installed" in verdict.reason


@pytest.mark.parametrize("group", [1, 4, 5, 6, 7, 40])
def test_the_paged_prefill_kernel_serves_any_group_size(group: int) -> None:
    assert PREFILL.usable(need(group)).ok


def test_a_device_that_is_here_is_probed_and_the_recorded_probe_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    here = attrs.evolve(H200, present=True)
    asked: list[tuple[str, int, int]] = []

    def probed(dtype: str, head_dim: int, group: int) -> bool:
        asked.append((dtype, head_dim, group))
        return group == 7

    monkeypatch.setattr("trivet.attention.flashinfer.paths.missing_library", lambda: None)
    monkeypatch.setattr("trivet.attention.flashinfer.probe.missing_kernels", lambda *_: None)
    monkeypatch.setattr("trivet.attention.flashinfer.probe.decode_compiles", probed)
    assert COMPILED.usable(need(7, device=here)).ok
    refused = COMPILED.usable(need(1, device=here))
    assert not refused.ok and "probed on h200" in refused.reason
    assert asked == [("bfloat16", 128, 7), ("bfloat16", 128, 1)]


def test_kernels_that_cannot_be_built_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.attention.flashinfer.paths.missing_library", lambda: None)
    monkeypatch.setattr("trivet.attention.flashinfer.probe.missing_kernels", lambda *_: "no CUDA compiler")
    assert PREFILL.usable(need(device=attrs.evolve(H200, present=True))).reason == "no CUDA compiler"


def test_a_device_without_a_recorded_probe_is_planned_on_the_kernel_that_serves_all() -> None:
    unknown = attrs.evolve(H200, name="h900")
    refused = COMPILED.usable(need(4, device=unknown))
    assert not refused.ok and "no probe of such a device is recorded" in refused.reason
    verdict = PREFILL.usable(need(4, device=unknown))
    assert verdict.ok and "h900 is not here" in verdict.reason


def test_the_standard_paths_fall_back_to_the_reference_and_keep_every_reason() -> None:
    selection = select_path(standard_paths(), need(device=DeviceProfile.named("cpu")))
    assert selection.path.name == "reference"
    names = ["split-kv-decode", "flashinfer-decode", "flashinfer-prefill", "split-kv-pinned", "reference"]
    assert [name for name, _ in selection.verdicts] == names
    with pytest.raises(ConfigError, match="runs on CUDA devices"):
        select_path(standard_paths(), need(device=DeviceProfile.named("cpu"), backend="flashinfer"))


@pytest.mark.parametrize("group", [4, 5, 6, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_committed_table_chooses_a_flashinfer_path_for_every_served_shape(group: int, head_dim: int) -> None:
    selection = select_path(standard_paths(), need(group, head_dim))
    assert selection.path.backend == "flashinfer"


def test_answering_for_a_cpu_or_a_planned_gpu_imports_neither_torch_nor_the_library() -> None:
    program = (
        "import sys\n"
        "from trivet.attention import PathRequest\n"
        "from trivet.attention.paths import standard_paths\n"
        "from trivet.capacity import DeviceProfile, Limits, PlanCapacity\n"
        "from trivet.config.rope import Rope\n"
        "from trivet.geometry import AttentionGeometry\n"
        "attention = AttentionGeometry(40, 8, 128, Rope(theta=1e4, rotary_dim=128))\n"
        "for name in ('cpu', 'h200'):\n"
        "    device = DeviceProfile.named(name)\n"
        "    for path in standard_paths():\n"
        "        path.usable(PathRequest(attention, device, 'bfloat16', 'tuned', 16))\n"
        "        path.layout(PlanCapacity(attention, Limits(), path.tile(attention), device=device))\n"
        "print(sorted({'torch', 'flashinfer', 'triton', 'tvm_ffi'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_capacity_without_a_device_has_no_flashinfer_layout() -> None:
    with pytest.raises(ConfigError, match="names none"):
        PREFILL.layout(attrs.evolve(flashinfer_capacity(geometry(), Limits(), PREFILL), device=None))


def test_page_lists_beyond_the_kernels_arithmetic_are_refused_by_name() -> None:
    capacity = flashinfer_capacity(geometry(), Limits(2**11, 16, 2**20, 16), PREFILL)
    with pytest.raises(CapacityExceeded, match="tokens of all page lists"):
        PREFILL.layout(capacity)


def test_more_multiprocessors_take_a_larger_workspace() -> None:
    sizes = [
        PREFILL.layout(
            flashinfer_capacity(geometry(), Limits(), PREFILL, attrs.evolve(H200, multiprocessors=count))
        ).total_bytes
        for count in (66, 132)
    ]
    assert sizes[0] < sizes[1]


def test_the_committed_table_says_what_its_evidence_says() -> None:
    root = Path(__file__).parents[2]
    shipped = (root / "core/trivet/attention/flashinfer/speeds.json").read_text(encoding="utf-8")
    (entry,) = json.loads(shipped).values()
    evidence = json.loads((root / entry["evidence"]).read_text(encoding="utf-8"))
    assert evidence["device"].lower() in entry["names"]
    assert evidence["flashinfer"] == entry["flashinfer"] == TESTED_VERSION
    for head_dim, values in entry["head_dims"].items():
        assert values["compiled_groups"] == evidence["compiled_groups"][head_dim]
        measured = evidence["decode_over_prefill"][head_dim]
        assert values["decode_over_prefill"] == {group: round(ratio, 2) for group, ratio in measured.items()}


def test_the_committed_threshold_loses_little_on_any_measured_chunk() -> None:
    root = Path(__file__).parents[2]
    evidence = json.loads((root / "sdk_docs/evidence/flashinfer-kernels-h200.json").read_text(encoding="utf-8"))
    for figure in evidence["chunks"]:
        speeds = SpeedTable.committed().of(H200, figure["head_dim"])
        assert speeds is not None and speeds.hopper_from is not None
        long = speeds.hopper_from.reached(figure["rows"] * figure["chunk"], figure["rows"])
        chosen, other = ("fa3", "fa2") if long else ("fa2", "fa3")
        assert figure["us"][chosen] <= 1.25 * figure["us"][other], figure


def test_steps_of_few_rows_run_on_the_split_kv_kernel_where_it_was_measured_to_be_the_faster_one() -> None:
    root = Path(__file__).parents[2]
    table = json.loads((root / "core/trivet/attention/flashinfer/speeds.json").read_text(encoding="utf-8"))["h200"]
    figures = json.loads((root / table["few_rows_evidence"]).read_text(encoding="utf-8"))["figures"]
    checked = 0
    for head_dim, speeds in table["head_dims"].items():
        for entry in speeds["few_rows"]:
            for group in entry["groups"]:
                for few in entry["up_to"]:
                    shape = few["shape"]
                    label = (
                        f"{shape['tile_tokens']}/{shape['least_tokens']}/{shape['most_splits']} w{shape['warps']} "
                        f"s{shape['stages']} p{shape['programs_per_multiprocessor']}"
                    )
                    ratios = [
                        figure["us"][label] / figure["us"]["paged_prefill"]
                        for figure in figures
                        if figure["heads"][2] == int(head_dim)
                        and figure["heads"][0] == group * figure["heads"][1]
                        and figure["rows"] == few["rows"]
                    ]
                    assert len(ratios) == 5 and math.prod(ratios) < 1, (head_dim, group, few["rows"], ratios)
                    checked += 1
    assert checked == 7
