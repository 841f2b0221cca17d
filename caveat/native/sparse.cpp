// Sparse linear and convolutional layers on flat grids: y = W x, the gradient of x, and the gradient at W's non-zeros.
//
// Both sides of a layer are packed into rows of one length in which a step of the kernel is a step of fixed length
// (grids.py lays them out and says why that is so):
//
//     y[o][t]  = b[o] + sum_k w[k] x[row(k)][t + shift(k)]         k over the non-zeros of output o
//     dx[r][t] = sum_k w[k] dy[o(k)][t - shift(k)]                 k over the non-zeros that read row r
//     dw[k]    = sum_t dy[o][t] x[row(k)][t + shift(k)]
//
// without a test of bounds. Positions that are no output hold sums of no meaning and are left out on the way back.
// A tile of positions stays in registers over all non-zeros of a row. The batch goes through in chunks whose grids stay
// in a core's cache. Every number is summed by one thread in an order that does not depend on how many threads there are.
//
// A pair is a layer of means on x together with one of variances on x squared, with the same non-zeros: x is read once.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {

// Width of a vector register in floats, and how many of them a tile takes: half of the registers there are.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, DEPTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8, DEPTH = 8;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, DEPTH = 16;
#else
constexpr int WIDTH = 4, DEPTH = 8;
#endif
constexpr int64_t LANES = 16;  // rows of the batch side by side, where the plan says so; positions come in sixteens
typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector spread(float value) { return Vector{} + value; }

// One side of a layer, its inputs or its outputs. A unit is a channel, or sixteen features of a linear layer.
struct Side {
    int64_t units, rows;         // units, and rows of the grid that a unit takes
    int64_t size, run;           // numbers in a unit; numbers in sequence that also lie in sequence in the grid
    int64_t stride;              // numbers in a row of the batch, over all units
    int64_t span;                // positions up to the last that counts
    const int32_t* table;        // where each number of a unit lies in its rows; -1: nowhere (no output reads it)
};

struct Plan {
    int64_t batch, lanes, chunk;   // rows of the batch; side by side; groups of lanes in a chunk
    int64_t area, length, front;   // positions of a group; length of a row of the grid; zeros before its first position
    Side in, out;
    int64_t images() const { return chunk * lanes; }
    int64_t positions(const Side& side, int64_t images) const {  // the last group needs no more than its span
        return (((images + lanes - 1) / lanes - 1) * area + side.span) * lanes;
    }
};

// The non-zeros of a matrix by rows: those of row r are start[r] to start[r + 1], each with its place in the other grid.
struct Structure {
    const int32_t *start, *offset;
};

struct Memory {  // what one calling thread needs besides its arguments, kept for its next call
    float* at = nullptr;
    int64_t size = 0;
    ~Memory() { std::free(at); }
    float* of(int64_t wanted) {
        if (wanted > size) {
            std::free(at);
            at = static_cast<float*>(std::aligned_alloc(64, (wanted * 4 + 63) / 64 * 64));
            size = at ? wanted : 0;
        }
        return at;
    }
};
thread_local Memory memory;

// to[j][i] = from[i][j] for i < lanes, j < items; zeros where i is beyond.
void gather(const float* from, int64_t stride, int64_t lanes, int64_t items, float* to) {
    if (lanes < LANES) std::memset(to, 0, LANES * LANES * sizeof(float));
    for (int64_t i = 0; i < lanes; ++i)
        for (int64_t j = 0; j < items; ++j) to[j * LANES + i] = from[i * stride + j];
}

// One unit of a chunk into its rows of the grid, zeros wherever there is nothing.
void pack(const Plan& plan, const Side& side, const float* values, int64_t images, int64_t unit, float* grid) {
    float* rows = grid + unit * side.rows * plan.length;
    std::memset(rows, 0, side.rows * plan.length * sizeof(float));
    const int64_t size = std::min(side.size, side.stride - unit * side.size);
    float block[LANES * LANES];
    for (int64_t image = 0; image < images; image += plan.lanes) {
        const float* from = values + image * side.stride + unit * side.size;
        float* to = rows + plan.front + image * plan.area;  // a group of lanes takes lanes * area numbers
        if (plan.lanes == 1) {
            for (int64_t i = 0; i < size; i += side.run)
                if (side.table[i] >= 0) std::memcpy(to + side.table[i], from + i, side.run * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t items = std::min(LANES, size - i);
            gather(from + i, side.stride, std::min(LANES, images - image), items, block);
            for (int64_t j = 0; j < items; ++j)
                if (side.table[i + j] >= 0)
                    std::memcpy(to + side.table[i + j], block + j * LANES, LANES * sizeof(float));
        }
    }
}

// The way back: rows of a unit to its numbers; with a second set of rows and x, `first + 2 x second`.
void unpack(const Plan& plan, const Side& side, const float* first, const float* second, const float* x,
            int64_t images, int64_t unit, float* values) {
    const int64_t size = std::min(side.size, side.stride - unit * side.size);
    for (int64_t image = 0; image < images; image += plan.lanes) {
        const int64_t at = image * side.stride + unit * side.size, lanes = std::min(plan.lanes, images - image);
        const int64_t group = plan.front + image * plan.area;
        const int64_t step = plan.lanes == 1 ? side.run : LANES;
        for (int64_t i = 0; i < size; i += step) {
            const int64_t items = std::min(step, size - i);
            for (int64_t lane = 0; lane < lanes; ++lane) {
                float* to = values + at + lane * side.stride + i;
                if (plan.lanes == 1) {  // a run: it lies in sequence
                    if (side.table[i] < 0) std::memset(to, 0, items * sizeof(float));
                    else std::memcpy(to, first + group + side.table[i], items * sizeof(float));
                    if (second && side.table[i] >= 0) {
                        const float *more = second + group + side.table[i], *of = x + at + i;
                        for (int64_t j = 0; j < items; ++j) to[j] += 2 * of[j] * more[j];
                    }
                    continue;
                }
                for (int64_t j = 0; j < items; ++j) {
                    const int64_t place = group + side.table[i + j] + lane;
                    to[j] = side.table[i + j] < 0 ? 0 : first[place];
                    if (second && side.table[i + j] >= 0) to[j] += 2 * x[at + lane * side.stride + i + j] * second[place];
                }
            }
        }
    }
}

enum Kind { SINGLE, SQUARED, TWO };  // a pair's second sum is over the squared grid, or over a grid of its own

// M vectors of positions, held over all non-zeros of a row.
template <int M, Kind KIND>
inline void tile(const float* grid, const float* grid2, const int32_t* offset, const float* w, const float* w2,
                 int64_t count, float start, float* to, float* to2) {
    Vector sum[M], sum2[M];
    for (int m = 0; m < M; ++m) sum[m] = spread(start), sum2[m] = Vector{};
    for (int64_t k = 0; k < count; ++k) {
        const float* at = grid + offset[k];
        const Vector weight = spread(w[k]), weight2 = KIND == SINGLE ? Vector{} : spread(w2[k]);
        for (int m = 0; m < M; ++m) {
            const Vector x = load(at + m * WIDTH);
            sum[m] += weight * x;
            if (KIND == SQUARED) sum2[m] += weight2 * (x * x);
            if (KIND == TWO) sum2[m] += weight2 * load(grid2 + offset[k] + m * WIDTH);
        }
    }
    for (int m = 0; m < M; ++m) {
        store(to + m * WIDTH, sum[m]);
        if (KIND != SINGLE) store(to2 + m * WIDTH, sum2[m]);
    }
}

// All positions of a row, in tiles as large as what is left.
template <int M, Kind KIND>
void row(const float* grid, const float* grid2, const int32_t* offset, const float* w, const float* w2, int64_t count,
         float start, float* to, float* to2, int64_t t, int64_t end) {
    for (; t + M * WIDTH <= end; t += M * WIDTH)
        tile<M, KIND>(grid + t, grid2 + t, offset, w, w2, count, start, to + t, to2 + t);
    if constexpr (M > 1)
        if (t < end) row<M / 2, KIND>(grid, grid2, offset, w, w2, count, start, to, to2, t, end);
}

template <Kind KIND>
void rows(const Plan& plan, const Structure& of, const float* grid, const float* grid2, const float* w,
          const float* w2, const float* start, int64_t first, int64_t last, int64_t end, float* to, float* to2) {
    // A linear layer's last unit has rows without an output, and these no start.
    for (int64_t r = first; r < last; ++r, to += plan.length, to2 += plan.length) {
        const int64_t k = of.start[r], count = of.start[r + 1] - k;
        row<KIND == SINGLE ? DEPTH : DEPTH / 2, KIND>(grid, grid2, of.offset + k, w + k, KIND == SINGLE ? w : w2 + k, count,
                                                      start && r < plan.out.stride ? start[r] : 0, to + plan.front, to2 + plan.front, 0, end);
    }
}

// sums[k] += over M vectors of positions, lane by lane: the lanes are added up when the row is done.
template <int M, bool PAIR>
inline void products(const float* g, const float* g2, const float* grid, const int32_t* offset, int64_t count,
                     float* sums, float* sums2) {
    Vector held[M], held2[M];
    for (int m = 0; m < M; ++m) held[m] = load(g + m * WIDTH), held2[m] = PAIR ? load(g2 + m * WIDTH) : Vector{};
    constexpr int PARTS = M < 4 ? M : 4;  // sums that do not wait for each other
    for (int64_t k = 0; k < count; ++k) {
        const float* at = grid + offset[k];
        Vector part[PARTS], part2[PARTS];
        for (int m = 0; m < PARTS; ++m) part[m] = part2[m] = Vector{};
        for (int m = 0; m < M; ++m) {
            const Vector x = load(at + m * WIDTH);
            part[m % PARTS] += held[m] * x;
            if (PAIR) part2[m % PARTS] += held2[m] * (x * x);
        }
        for (int m = 1; m < PARTS; ++m) part[0] += part[m], part2[0] += part2[m];
        store(sums + k * WIDTH, load(sums + k * WIDTH) + part[0]);
        if (PAIR) store(sums2 + k * WIDTH, load(sums2 + k * WIDTH) + part2[0]);
    }
}

template <int M, bool PAIR>
void product_row(const float* g, const float* g2, const float* grid, const int32_t* offset, int64_t count, float* sums,
                 float* sums2, int64_t t, int64_t end) {
    for (; t + M * WIDTH <= end; t += M * WIDTH)
        products<M, PAIR>(g + t, g2 + t, grid + t, offset, count, sums, sums2);
    if constexpr (M > 1)
        if (t < end) product_row<M / 2, PAIR>(g, g2, grid, offset, count, sums, sums2, t, end);
}

void add_up(const float* sums, int64_t count, bool fresh, float* to) {
    for (int64_t k = 0; k < count; ++k) {
        float lanes[WIDTH];
        std::memcpy(lanes, sums + k * WIDTH, sizeof(lanes));
        for (int half = WIDTH / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
        to[k] = fresh ? lanes[0] : to[k] + lanes[0];
    }
}

int64_t whole(int64_t positions) { return (positions + LANES - 1) / LANES * LANES; }

int64_t longest(const int32_t* start, int64_t rows) {
    int32_t most = 0;
    for (int64_t r = 0; r < rows; ++r) most = std::max(most, start[r + 1] - start[r]);
    return most;
}

}  // namespace

extern "C" {

// y = W x + bias, and y2 = W2 x^2 where w2 is given. Returns 0, or 1 when there is no memory.
int caveat_forward(const Plan* given, const float* x, const int32_t* start, const int32_t* offset, const float* w,
                   const float* w2, const float* bias, float* y, float* y2, int threads) {
    const Plan& plan = *given;
    const int64_t grid_size = plan.in.units * plan.in.rows * plan.length, own_size = plan.out.rows * plan.length;
    float* grid = memory.of(grid_size + threads * 2 * own_size);
    if (!grid) return 1;
#pragma omp parallel num_threads(threads)
    {
        float *own = grid + grid_size + omp_get_thread_num() * 2 * own_size, *own2 = own + own_size;
        for (int64_t image = 0; image < plan.batch; image += plan.images()) {
            const int64_t images = std::min(plan.images(), plan.batch - image);
            const int64_t end = whole(plan.positions(plan.out, images));
#pragma omp for schedule(static)
            for (int64_t unit = 0; unit < plan.in.units; ++unit)
                pack(plan, plan.in, x + image * plan.in.stride, images, unit, grid);
#pragma omp for schedule(dynamic, 1)
            for (int64_t unit = 0; unit < plan.out.units; ++unit) {
                const int64_t first = unit * plan.out.rows, last = first + plan.out.rows;
                const Structure by_row{start, offset};
                const float* from = grid + plan.front;
                if (w2) rows<SQUARED>(plan, by_row, from, from, w, w2, bias, first, last, end, own, own2);
                else rows<SINGLE>(plan, by_row, from, from, w, w, bias, first, last, end, own, own2);
                unpack(plan, plan.out, own, nullptr, nullptr, images, unit, y + image * plan.out.stride);
                if (w2) unpack(plan, plan.out, own2, nullptr, nullptr, images, unit, y2 + image * plan.out.stride);
            }
        }
    }
    return 0;
}

// From dy (and dy2 of a pair): dx, where it is wanted, by the transposed structure whose k-th weight is w[order[k]],
// and the gradients dw (dw2) at the non-zeros, where they are wanted.
int caveat_backward(const Plan* given, const float* x, const float* dy, const float* dy2, const int32_t* start,
                    const int32_t* offset, const float* w, const float* w2, const int32_t* start_in,
                    const int32_t* offset_in, const int32_t* order, float* dx, float* dw, float* dw2, int threads) {
    const Plan& plan = *given;
    const bool pair = dy2 != nullptr;
    const int64_t rows_in = plan.in.units * plan.in.rows, rows_out = plan.out.units * plan.out.rows;
    const int64_t count = start[rows_out], grid_in = rows_in * plan.length, grid_out = rows_out * plan.length;
    const int64_t own_size = std::max(plan.in.rows * plan.length, dw ? longest(start, rows_out) * WIDTH : 0);
    float* grid = memory.of(grid_in + 2 * grid_out + 2 * whole(count) + threads * 2 * own_size);
    if (!grid) return 1;
    float *grid_g = grid + grid_in, *grid_g2 = grid_g + grid_out;
    float *sorted = grid_g2 + grid_out, *sorted2 = sorted + whole(count), *owns = sorted2 + whole(count);
#pragma omp parallel num_threads(threads)
    {
        float *own = owns + omp_get_thread_num() * 2 * own_size, *own2 = own + own_size;
        if (dx) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < count; ++k) {
                sorted[k] = w[order[k]];
                if (pair) sorted2[k] = w2[order[k]];
            }
        }
        for (int64_t image = 0; image < plan.batch; image += plan.images()) {
            const int64_t images = std::min(plan.images(), plan.batch - image);
            const int64_t end_in = whole(plan.positions(plan.in, images)), end = whole(plan.positions(plan.out, images));
            if (dw) {
#pragma omp for schedule(static) nowait
                for (int64_t unit = 0; unit < plan.in.units; ++unit)
                    pack(plan, plan.in, x + image * plan.in.stride, images, unit, grid);
            }
#pragma omp for schedule(static)
            for (int64_t unit = 0; unit < plan.out.units; ++unit) {
                pack(plan, plan.out, dy + image * plan.out.stride, images, unit, grid_g);
                if (pair) pack(plan, plan.out, dy2 + image * plan.out.stride, images, unit, grid_g2);
            }
            if (dx) {
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t unit = 0; unit < plan.in.units; ++unit) {
                    const int64_t first = unit * plan.in.rows, last = first + plan.in.rows;
                    const Structure by_row{start_in, offset_in};
                    const float *g = grid_g + plan.front, *g2 = grid_g2 + plan.front;
                    if (pair) rows<TWO>(plan, by_row, g, g2, sorted, sorted2, nullptr, first, last, end_in, own, own2);
                    else rows<SINGLE>(plan, by_row, g, g, sorted, sorted, nullptr, first, last, end_in, own, own2);
                    unpack(plan, plan.in, own, pair ? own2 : nullptr, x + image * plan.in.stride, images, unit,
                           dx + image * plan.in.stride);
                }
            }
            if (dw) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t r = 0; r < rows_out; ++r) {
                    const int64_t k = start[r], many = start[r + 1] - k;
                    const float *g = grid_g + r * plan.length + plan.front, *g2 = grid_g2 + r * plan.length + plan.front;
                    std::memset(own, 0, many * WIDTH * sizeof(float));
                    if (pair) std::memset(own2, 0, many * WIDTH * sizeof(float));
                    if (pair) product_row<DEPTH / 2, true>(g, g2, grid + plan.front, offset + k, many, own, own2, 0, end);
                    else product_row<DEPTH, false>(g, g, grid + plan.front, offset + k, many, own, own2, 0, end);
                    add_up(own, many, image == 0, dw + k);
                    if (pair) add_up(own2, many, image == 0, dw2 + k);
                }
            }
#pragma omp barrier
        }
    }
    return 0;
}

}  // extern "C"
