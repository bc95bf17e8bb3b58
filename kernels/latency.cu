// Latency by a pointer chase: each load's address is the result of the load before.

using size = unsigned long long;

// The node that a walk of `steps` steps from node `node` reaches. The first 4 bytes of a node of NODE bytes hold the index of the next
// one. One thread. The loads bypass L1 (ld.global.cg), so that a small footprint shows L2 and a large one DRAM; with L1, they look there
// first (ld.global.ca).
template <int NODE, bool L1 = false>
__device__ size reached(int const* nodes, size node, size steps)
{
    constexpr size WORDS = NODE / sizeof(int);
    for (size step = 0; step < steps; ++step) {
        int const* const next = nodes + node * WORDS;
        node = static_cast<unsigned>(L1 ? __ldca(next) : __ldcg(next));
    }
    return node;
}

// Walks a cycle from node `start` and leaves the node that it reached: every launch takes the same walk.
template <int NODE>
__global__ void chase(int const* nodes, int* out, size steps, size start)
{
    *out = static_cast<int>(reached<NODE>(nodes, start, steps));
}

// The same walk with loads through L1, which is empty when a launch begins: a small cycle is there after its first pass.
template <int NODE>
__global__ void chase_l1(int const* nodes, int* out, size steps, size start)
{
    *out = static_cast<int>(reached<NODE, true>(nodes, start, steps));
}

// Walks on from the node that `out` names, and leaves there the one that it reached: a launch meets no node of the launches before until
// the cycle closes, so it finds none of them in a cache that the cycle does not fit into. Any number in `out` names a node, modulo their
// count.
template <int NODE>
__global__ void chase_onward(int const* nodes, int* out, size steps, size count)
{
    *out = static_cast<int>(reached<NODE>(nodes, static_cast<unsigned>(__ldcg(out)) % count, steps));
}
