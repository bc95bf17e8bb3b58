"""Kernels are told by their base names."""

from __future__ import annotations

import pytest

from pytest_gpumem.explain.pairing import base_name, base_names, only

REDUCE = (
    "void cub::DeviceReduceKernel<cub::policy_hub<float, unsigned int, cuda::plus<void>>::Policy1000, float *, unsigned int, "
    "cuda::plus<void>, float, cuda::identity>(T2, T5 *, T3, cub::GridEvenShare<T3>, T4, T6)"
)
CAT = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<(unsigned int)4>, "
    "unsigned int, 1, 64, 64>(T1 *, at::native::(anonymous namespace)::CatArrInputTensorMetadata<T1, T2, T4, T5>, int)"
)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("assign_planes", "assign_planes"),
        ("triad<float>", "triad"),
        ("void triad<float, 1>(T1 *, const T1 *, const T1 *, T1, unsigned long long)", "triad"),
        (REDUCE, "DeviceReduceKernel"),
        (CAT, "CatArrayBatchedCopy"),
        (
            "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64",
            "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64",
        ),
        ("decltype(auto) project::(unnamed)::run<(project::Kind)1>(int)", "run"),
        ("_Z3addIfEvPKT_PS0_y", "add"),
        ("_ZN2at6native18elementwise_kernelILi128ELi4EEEviT_", "elementwise_kernel"),
        ("_ZL5localPf", "local"),
        ("_Z", "_Z"),
        ("", ""),
        ("<unknown>", "<unknown>"),
    ],
)
def test_a_base_name_is_the_function_alone(name: str, base: str) -> None:
    assert base_name(name) == base


def test_each_name_is_told_once() -> None:
    assert base_names([REDUCE, "triad<float>", REDUCE]) == "DeviceReduceKernel, triad"


def test_what_both_run_is_not_told() -> None:
    assert only(["assign_planes", REDUCE], [REDUCE, "assign_records"]) == (
        "assign_planes",
        "assign_records",
    )


def test_template_arguments_are_told_where_only_they_differ() -> None:
    names = [f"void project::triad<{kind}>(T1 *, const T1 *)" for kind in ("float", "double")]
    assert only(names[:1], names[1:]) == ("project::triad<float>", "project::triad<double>")
    long = only([REDUCE], [REDUCE.replace("float", "double")])
    assert all(len(one) < 70 for one in long)
