"""A breakdown by kernel is printed in short and kept in full."""

from __future__ import annotations

import pytest

from trivet.bench.kernels import SHOWN, breakdown_record, kernel_table, short_name
from trivet.bench.timeline import Breakdown, KernelTime

COPY = "std::array<char*, 2ul>"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_rows_kernel", "_rows_kernel"),
        ("nvjet_sm90_tst_64x16_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x16_64x16_4x1_v_bz_TNT"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel"),
        ("void flashinfer::MergeStates<8u, 16u, __nv_bfloat16>(__nv_bfloat16*, float*)", "MergeStates"),
        (
            f"void at::native::vectorized_elementwise_kernel<8, at::native::AbsFunctor<c10::BFloat16>, {COPY} >(int, "
            f"at::native::AbsFunctor<c10::BFloat16>, {COPY})",
            "vectorized_elementwise_kernel<AbsFunctor>",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float>, 4> >"
            "(at::native::ReduceOp<float, at::native::MaxOps<float>, 4>)",
            "reduce_kernel<MaxOps>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<2, at::native::(anonymous namespace)::masked_fill_kernel"
            "(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::{lambda()#4}>(int)",
            "vectorized_elementwise_kernel<masked_fill_kernel>",
        ),
    ],
)
def test_a_short_name_says_what_a_kernel_does_without_its_types(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_record_keeps_names_in_full_and_the_table_is_of_one_step() -> None:
    name = "void at::native::reduce_kernel<512, at::native::MaxOps<float> >(float)"
    found = Breakdown((KernelTime("_rows_kernel", 640, 6000.0004), KernelTime(name, 16, 1000.0)), 8000.0, 999.9996)
    assert breakdown_record(found) == {
        "span_us": 8000.0,
        "idle_us": 1000.0,
        "kernels": [
            {"name": "_rows_kernel", "count": 640, "total_us": 6000.0},
            {"name": name, "count": 16, "total_us": 1000.0},
        ],
    }
    header, _, first, second, idle = kernel_table(found, 16).splitlines()
    assert header.split("|")[2:5] == [" per step ", " us per step ", " share "]
    assert [cell.strip() for cell in first.split("|")[1:-1]] == ["_rows_kernel", "40", "375", "75.0%"]
    assert [cell.strip() for cell in second.split("|")[1:-1]] == ["reduce_kernel<MaxOps>", "1", "62.50", "12.5%"]
    assert idle == "device idle 62.5 us of a step of 500.0 us"


def test_kernels_beyond_those_shown_are_summed_in_one_row() -> None:
    kernels = tuple(KernelTime(f"k{index}", 2, 10.0) for index in range(SHOWN + 3))
    lines = kernel_table(Breakdown(kernels, 270.0, 0.0), 2, "call").splitlines()
    assert len(lines) == 2 + SHOWN + 1 + 1
    assert [cell.strip() for cell in lines[-2].split("|")[1:-1]] == ["3 others", "3", "15.00", "11.1%"]
