"""Four planted regressions in code as a user's project has it, for `explain_proof.py --cases explain_unseen.py`.

None of the kernels is of the catalogue. The form of a case is described in `explain_cases.py`. Each cause is one edit that a reviewer
might let pass:

kmeans_records      the assignment step of k-means: points that lay in planes, one for each dimension, lie in records of seven floats, one
                    of them unused here; and the sum of distances, taken in the kernel before, goes through an array of all distances.
gated_residual      a gated activation plus a residual, in Triton: the residual stream is kept in float32 instead of float16; and two
                    persistent programs run on an SM instead of eight.
embedding_bags      sums of embedding rows: bags that were sorted by the region of the table that they read come in random order, so that
                    a region no longer stays in L2. Kernel, shapes and bytes asked for are the same.
kepler_steps        Newton's method for Kepler's equation takes nine steps instead of six: arithmetic alone.

Sources: CuPy, "User-Defined Kernels"; Triton, tutorial "Persistent Matmul", for loops of programs over blocks.
"""

from collections.abc import Callable
from typing import Any

try:  # Triton reads a kernel's source from the file, and its names from the module. The cases of CuPy run without Triton.
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Launch = Callable[[], Any]

POINTS = 7 << 20
DIMENSIONS = 6
CENTROIDS = 4
THREADS = 256

KMEANS = r"""
#define DIMENSIONS 6
#define CENTROIDS 4

extern "C" {

__constant__ float centroids[CENTROIDS * DIMENSIONS];

__device__ float nearest(const float (&point)[DIMENSIONS], int& label) {
    float best = 3.4e38f;
    #pragma unroll
    for (int k = 0; k < CENTROIDS; ++k) {
        float distance = 0;
        #pragma unroll
        for (int d = 0; d < DIMENSIONS; ++d) {
            const float difference = point[d] - centroids[k * DIMENSIONS + d];
            distance += difference * difference;
        }
        if (distance < best) {
            best = distance;
            label = k;
        }
    }
    return best;
}

// points: DIMENSIONS planes of n floats; partial: the sum of distances of each block of 256 threads
__global__ void assign_planes(const float* __restrict__ points, int n, int* __restrict__ labels, float* __restrict__ partial) {
    __shared__ float warps[8];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float distance = 0;
    if (i < n) {
        float point[DIMENSIONS];
        #pragma unroll
        for (int d = 0; d < DIMENSIONS; ++d) point[d] = points[d * n + i];
        int label = 0;
        distance = nearest(point, label);
        labels[i] = label;
    }
    for (int offset = 16; offset; offset /= 2) distance += __shfl_down_sync(0xffffffffu, distance, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = distance;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int warp = 0; warp < 8; ++warp) sum += warps[warp];
        partial[blockIdx.x] = sum;
    }
}

// points: n records of DIMENSIONS floats and a time stamp; distances: one of each point
__global__ void assign_records(const float* __restrict__ points, int n, int* __restrict__ labels, float* __restrict__ distances) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float point[DIMENSIONS];
    #pragma unroll
    for (int d = 0; d < DIMENSIONS; ++d) point[d] = points[i * (DIMENSIONS + 1) + d];
    int label = 0;
    distances[i] = nearest(point, label);
    labels[i] = label;
}

}
"""


def _kmeans(name: str, shape: tuple[int, int], sums: int) -> Launch:
    """One assignment step: labels of all points, and the sum of their squared distances to the nearest centroid.

    shape: of the array of points; sums: elements of the array whose sum is taken.
    """
    import cupy
    import numpy

    rng = numpy.random.default_rng(1)
    points = cupy.asarray(rng.random(shape, "f4"))
    labels = cupy.empty(POINTS, "i4")
    parts = cupy.empty(sums, "f4")
    module = cupy.RawModule(code=KMEANS)
    centroids = cupy.ndarray((CENTROIDS * DIMENSIONS,), "f4", module.get_global("centroids"))
    centroids[:] = cupy.asarray(rng.random(CENTROIDS * DIMENSIONS, "f4"))
    assign = module.get_function(name)
    cupy.cuda.Device().synchronize()

    def step() -> Any:
        assign((POINTS // THREADS,), (THREADS,), (points, numpy.int32(POINTS), labels, parts))
        return parts.sum()

    return step


def kmeans_planes() -> Launch:
    return _kmeans("assign_planes", (DIMENSIONS, POINTS), POINTS // THREADS)


def kmeans_records() -> Launch:
    return _kmeans("assign_records", (POINTS, DIMENSIONS + 1), POINTS)


ACTIVATIONS = 6400 * 4096  # tokens, hidden

if triton is not None:

    @triton.jit
    def gated_residual(gate, up, residual, out, size, BLOCK: tl.constexpr):  # noqa: N803
        for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            g = tl.load(gate + at, mask=inside).to(tl.float32)
            u = tl.load(up + at, mask=inside).to(tl.float32)
            r = tl.load(residual + at, mask=inside).to(tl.float32)
            tl.store(out + at, (g * tl.sigmoid(g) * u + r).to(tl.float16), mask=inside)


def _gated(residual_type: str, programs_per_sm: int) -> Launch:
    """A persistent kernel over all activations, whose residual has the type given."""
    import torch

    gate, up, residual = (torch.randn(ACTIVATIONS, device="cuda", dtype=torch.float16) for _ in range(3))
    residual = residual.to(getattr(torch, residual_type))
    out = torch.empty_like(gate)
    grid = (programs_per_sm * torch.cuda.get_device_properties("cuda").multi_processor_count,)

    def launch() -> None:
        gated_residual[grid](gate, up, residual, out, ACTIVATIONS, BLOCK=1024, num_warps=4)

    launch()  # compiles it
    torch.cuda.synchronize()
    return launch


def gated_half() -> Launch:
    return _gated("float16", 8)


def gated_wide() -> Launch:
    return _gated("float32", 2)


REGIONS = 8
REGION_ROWS = 1 << 16  # of 64 floats: 16 MiB
BAGS = 3 << 16
BAG_ITEMS = 8


def _bags(sort: bool) -> Launch:
    """Sums of eight rows of an embedding table each. The items of a bag are of one region of the table."""
    import cupy
    import numpy

    rng = numpy.random.default_rng(2)
    region = rng.integers(0, REGIONS, BAGS)
    if sort:
        region.sort()
    items = region[:, None] * REGION_ROWS + rng.integers(0, REGION_ROWS, (BAGS, BAG_ITEMS))
    items = cupy.asarray(items.astype("i4").ravel())
    table = cupy.asarray(rng.random(REGIONS * REGION_ROWS * 64, "f4"))
    pooled = cupy.empty(BAGS * 64, "f4")
    pool = cupy.ElementwiseKernel(
        "raw float32 table, raw int32 items",
        "float32 pooled",
        """
        const int bag = (int)i / 64;
        const int column = (int)i % 64;
        float sum = 0;
        #pragma unroll
        for (int k = 0; k < 8; ++k) sum += table[items[bag * 8 + k] * 64 + column];
        pooled = sum;
        """,
        "embedding_bags",
    )
    cupy.cuda.Device().synchronize()
    return lambda: pool(table, items, pooled)


def bags_sorted() -> Launch:
    return _bags(sort=True)


def bags_unsorted() -> Launch:
    return _bags(sort=False)


ORBITS = 1 << 24


def _kepler(steps: int) -> Launch:
    """Eccentric anomalies of orbits, from mean anomalies and eccentricities, by the given number of Newton steps."""
    import cupy

    mean = cupy.linspace(0, 6.28, ORBITS, dtype="f4")
    eccentricity = cupy.linspace(0, 0.8, ORBITS, dtype="f4")
    anomaly = cupy.empty(ORBITS, "f4")
    solve = cupy.ElementwiseKernel(
        "float32 mean, float32 eccentricity, int32 steps",
        "float32 anomaly",
        """
        float angle = mean;
        for (int step = 0; step < steps; ++step) {
            float sine, cosine;
            sincosf(angle, &sine, &cosine);
            angle -= (angle - eccentricity * sine - mean) / (1 - eccentricity * cosine);
        }
        anomaly = angle;
        """,
        "kepler",
    )
    cupy.cuda.Device().synchronize()
    return lambda: solve(mean, eccentricity, steps, anomaly)


def kepler_six() -> Launch:
    return _kepler(6)


def kepler_nine() -> Launch:
    return _kepler(9)


CASES = [
    ("kmeans_records", kmeans_planes, kmeans_records, ("access pattern", "more bytes")),
    ("gated_residual", gated_half, gated_wide, ("more bytes", "fewer threads", "occupancy")),
    ("embedding_bags", bags_sorted, bags_unsorted, "L2 misses"),
    ("kepler_steps", kepler_six, kepler_nine, "unexplained"),
]
