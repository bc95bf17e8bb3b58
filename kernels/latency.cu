// Latency by a pointer chase: each load's address is the result of the load before.

using size = unsigned long long;

// Follows a cycle for `steps` steps from node `start` and leaves the index of the node that it reached. The first 4 bytes of a
// node of NODE bytes hold the index of the next one. One thread. The loads bypass L1 (ld.global.cg), so that a small footprint
// shows L2 and a large one DRAM.
template <int NODE>
__global__ void chase(int const* nodes, int* out, size steps, size start)
{
    constexpr size WORDS = NODE / sizeof(int);
    size node = start;
    for (size step = 0; step < steps; ++step) {
        node = static_cast<unsigned>(__ldcg(nodes + node * WORDS));
    }
    *out = static_cast<int>(node);
}
