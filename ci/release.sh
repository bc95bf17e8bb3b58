#!/usr/bin/env bash
# Builds the source distribution, and from it the wheel; checks both, and that the wheel works in an environment of its own.
#     ci/release.sh [TAG]       needs the packages build and twine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tag=${1:-}

rm -rf dist
python -m build --outdir dist .
python -m twine check --strict dist/*

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -q dist/*.whl
cd "$scratch" # not the checkout, whose package would be found first
version=$("$scratch/venv/bin/python" -c 'import pytest_gpumem; print(pytest_gpumem.__version__)')
if [ -n "$tag" ] && [ "$tag" != "v$version" ]; then
    echo "release: the tag is $tag, the version in pyproject.toml is $version" >&2
    exit 1
fi
cat > test_it.py <<'TEST'
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(1 << 20) for _ in range(3)), 3.0)
TEST
"$scratch/venv/bin/python" -m pytest -q --gpumem --gpumem-device sim test_it.py
"$scratch/venv/bin/gpumem" schema > /dev/null
echo "release: pytest-gpumem $version is built and checked"
