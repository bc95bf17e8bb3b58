// Matrix transpose, three ways: out[x][y] = in[y][x] (CUDA C++ Best Practices Guide 9.2.3, where a tile in shared memory turns the
// strided accesses of C = A A^T into coalesced ones, and a padded tile frees them of bank conflicts; the transpose is that without the
// arithmetic).
//
// All three handle the same tiles with the same loads in flight: a block reads TILE x TILE elements, TILE / ROWS by each thread before
// the first is written. They differ in how a tile is turned. Tiles at the right and lower edge may be ragged, and any grid gives the
// same result.

using size = unsigned long long;

// Rows of a tile that a block of TILE x ROWS threads reads or writes at once.
constexpr int ROWS = 4;

// A thread's elements of the tile whose first element is in[top][left], one from each of its rows; zero where that lies outside.
template <class T, int TILE>
__device__ void load(T (&value)[TILE / ROWS], T const* in, size width, size height, size left, size top)
{
    size const x = left + threadIdx.x % TILE, first = top + threadIdx.x / TILE;
#pragma unroll
    for (int k = 0; k < TILE / ROWS; ++k) {
        size const y = first + k * ROWS;
        value[k] = x < width && y < height ? in[y * width + x] : T{};
    }
}

// Coalesced reads, strided writes: each word that a warp writes lies in a row of its own. Without __restrict__, a write could change
// what is read after it as far as the compiler knows, so that it leaves all loads before the first write.
template <class T, int TILE>
__global__ void transpose(T* out, T const* in, size width, size height)
{
    size const across = (width + TILE - 1) / TILE, tiles = across * ((height + TILE - 1) / TILE);
    for (size t = blockIdx.x; t < tiles; t += gridDim.x) {
        size const left = t % across * TILE, top = t / across * TILE;
        T value[TILE / ROWS];
        load<T, TILE>(value, in, width, height, left, top);

        size const x = left + threadIdx.x % TILE, first = top + threadIdx.x / TILE;
#pragma unroll
        for (int k = 0; k < TILE / ROWS; ++k) {
            size const y = first + k * ROWS;
            if (x < width && y < height) {
                out[x * height + y] = value[k];
            }
        }
    }
}

// Coalesced reads and writes: the tile is turned in shared memory, written by rows and read by columns. With rows of PITCH = TILE
// words, a multiple of 32, a warp finds all words of a column in one bank; with PITCH = TILE + 1, each in another.
template <class T, int TILE, int PITCH>
__global__ void transpose_tiled(T* __restrict__ out, T const* __restrict__ in, size width, size height)
{
    __shared__ T tile[TILE][PITCH];
    int const column = threadIdx.x % TILE, row = threadIdx.x / TILE;

    size const across = (width + TILE - 1) / TILE, tiles = across * ((height + TILE - 1) / TILE);
    for (size t = blockIdx.x; t < tiles; t += gridDim.x) {
        size const left = t % across * TILE, top = t / across * TILE;
        T value[TILE / ROWS];
        load<T, TILE>(value, in, width, height, left, top);
#pragma unroll
        for (int k = 0; k < TILE / ROWS; ++k) {
            tile[row + k * ROWS][column] = value[k];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE / ROWS; ++k) {
            value[k] = tile[column][row + k * ROWS];
        }
        __syncthreads();  // before the next tile replaces this one

        size const y = top + column, first = left + row;
#pragma unroll
        for (int k = 0; k < TILE / ROWS; ++k) {
            size const x = first + k * ROWS;
            if (x < width && y < height) {
                out[x * height + y] = value[k];
            }
        }
    }
}
