#!/usr/bin/env bash
# Build a release and check it: the distributions, their metadata, an upload to a local index, and the wheel from there in an environment
# of its own.
#     ci/release.sh           build and check alone
#     ci/release.sh --tag     then tag the commit with the version of pyproject.toml and push the tag: .github/workflows/release.yml
#                             builds and checks the same again and publishes it to PyPI
# On a tag under GitHub Actions, the tag must be that of the version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "release: $1" >&2; exit 1; }
case "${*:-}" in "" | --tag) ;; *) fail "unknown arguments: $*; accepted is --tag" ;; esac

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ "${GITHUB_REF_TYPE:-}" != tag ] || [ "$GITHUB_REF_NAME" = "v$version" ] || fail "the tag is $GITHUB_REF_NAME, the version in pyproject.toml is $version"
if [ "${1:-}" = --tag ]; then
    [ -z "$(git status --porcelain)" ] || fail "there are uncommitted changes"
    grep -q "^## .*${version//./\\.}" CHANGELOG.md || fail "CHANGELOG.md has no section for $version"
    ! git rev-parse -q --verify "refs/tags/v$version" > /dev/null || fail "the tag v$version exists"
fi

scratch=$(mktemp -d)
trap 'kill "${server:-}" 2> /dev/null || true; rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/tools"
tools=$scratch/tools/bin
"$tools/pip" install -q build twine pypiserver

rm -rf dist
"$tools/python" -m build --outdir dist . > "$scratch/build.log" 2>&1 || { cat "$scratch/build.log" >&2; fail "the build failed"; }
"$tools/twine" check --strict dist/*

mkdir "$scratch/index"
port=$("$tools/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$tools/pypi-server" run -i 127.0.0.1 -p "$port" -P . -a . "$scratch/index" 2> "$scratch/server.log" &
server=$!
index=http://127.0.0.1:$port
"$tools/python" - "$index" <<'WAIT'
import sys, time, urllib.request
for _ in range(100):
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5)
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("release: the local index does not answer")
WAIT
"$tools/twine" upload --repository-url "$index/" -u release -p release dist/*
"$tools/pip" download -q --no-deps --no-cache-dir --index-url "$index/simple/" -d "$scratch/wheel" "pytest-gpumem==$version"

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -q "$scratch"/wheel/*.whl
cat > "$scratch/test_it.py" <<'TEST'
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(1 << 20) for _ in range(3)), 3.0)
TEST
# Not in the checkout, whose package would be found first.
(cd "$scratch" && venv/bin/python -m pytest -q --gpumem --gpumem-device sim test_it.py && venv/bin/gpumem --version)

if [ "${1:-}" = --tag ]; then
    git tag -a "v$version" -m "pytest-gpumem $version"
    git push origin "v$version"
fi
echo "release: pytest-gpumem $version is built and checked"
