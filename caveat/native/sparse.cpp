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

// Vectors of N floats, and how many of them a tile takes: half of the registers there are. Loads that begin anywhere
// are faster by halves of a cache line (20% on Zen 4), those that begin with one, as they do with lanes, by whole ones.
template <int N>
struct Vectors {
    typedef float type __attribute__((vector_size(N * 4), aligned(4), may_alias));
};
template <int N>
using Vector = typename Vectors<N>::type;
#if defined(__AVX512F__)
constexpr int ALIGNED = 16, ANYWHERE = 8, DEPTH = 16;
#elif defined(__AVX__)
constexpr int ALIGNED = 8, ANYWHERE = 8, DEPTH = 8;
#else
constexpr int ALIGNED = 4, ANYWHERE = 4, DEPTH = 8;
#endif
constexpr int64_t LANES = 16;  // rows of the batch side by side, where the plan says so; positions come in sixteens

template <int N>
inline Vector<N> load(const float* from) { return *reinterpret_cast<const Vector<N>*>(from); }
template <int N>
inline void store(float* to, Vector<N> value) { *reinterpret_cast<Vector<N>*>(to) = value; }
template <int N>
inline Vector<N> spread(float value) { return Vector<N>{} + value; }

// One side of a layer, its inputs or its outputs. A unit is a channel, or sixteen features of a linear layer.
struct Side {
    int64_t units, rows;         // units, and rows of the grid that a unit takes
    int64_t size, run, step;     // numbers in a unit; in runs, of which every step-th lie in sequence in the grid
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

// Short copies, for which a call would take longer; ends may be written twice.
template <int N>
inline void copy_ends(float* to, const float* from, int64_t count) {
    float first[N], last[N];
    std::memcpy(first, from, sizeof(first)), std::memcpy(last, from + count - N, sizeof(last));
    std::memcpy(to, first, sizeof(first)), std::memcpy(to + count - N, last, sizeof(last));
}
inline void copy(float* to, const float* from, int64_t count) {
    if (count >= 16) {
        for (int64_t i = 0; i + 16 <= count; i += 16) std::memcpy(to + i, from + i, 64);
        std::memcpy(to + count - 16, from + count - 16, 64);
    } else if (count >= 8) copy_ends<8>(to, from, count);
    else if (count >= 4) copy_ends<4>(to, from, count);
    else for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Sixteen by sixteen numbers change rows for columns, in four rounds: in each, blocks of half the size change places.
typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));
typedef int Lanes __attribute__((vector_size(64)));
#define TURN(i, j, low, high)                              \
    {                                                      \
        const Line a = line[i], b = line[j];               \
        line[i] = __builtin_shuffle(a, b, low);            \
        line[j] = __builtin_shuffle(a, b, high);           \
    }
#ifdef __clang__
#undef TURN
#define TURN(i, j, low, high)                                                   \
    {                                                                           \
        const Line a = line[i], b = line[j];                                    \
        for (int l = 0; l < 16; ++l) {                                          \
            line[i][l] = low[l] < 16 ? a[low[l]] : b[low[l] - 16];              \
            line[j][l] = high[l] < 16 ? a[high[l]] : b[high[l] - 16];           \
        }                                                                       \
    }
#endif
template <int HALF>
inline void turn(Line* line) {
    Lanes low, high;
    for (int l = 0; l < 16; ++l) {
        low[l] = l & HALF ? 16 + l - HALF : l;
        high[l] = l & HALF ? 16 + l : l + HALF;
    }
    for (int i = 0; i < 16; ++i)
        if (!(i & HALF)) TURN(i, i + HALF, low, high)
}
inline void transpose(Line* line) { turn<8>(line), turn<4>(line), turn<2>(line), turn<1>(line); }

inline Line line_of(const float* from, int64_t count) {
    Line found = {};
    if (count >= 16) std::memcpy(&found, from, 64);
    else for (int64_t i = 0; i < count; ++i) found[i] = from[i];
    return found;
}

// Numbers i + phase, i + phase + step, ... of a run, into their grid, where they lie in sequence.
inline void spread_out(const Side& side, float* grid, const float* from, int64_t i, int64_t phase) {
    const int64_t count = (side.run - phase + side.step - 1) / side.step, place = side.table[i + phase];
    if (place < 0) return;
    from += i + phase;
    if (side.step == 1) copy(grid + place, from, count);
    else if (side.step == 2) for (int64_t j = 0; j < count; ++j) grid[place + j] = from[2 * j];
    else for (int64_t j = 0; j < count; ++j) grid[place + j] = from[j * side.step];
}

// One unit of a chunk into its rows of the grid, zeros wherever there is nothing.
void pack(const Plan& plan, const Side& side, const float* values, int64_t images, int64_t unit, float* grid) {
    float* rows = grid + unit * side.rows * plan.length;
    std::memset(rows, 0, side.rows * plan.length * sizeof(float));
    const int64_t size = std::min(side.size, side.stride - unit * side.size);
    for (int64_t image = 0; image < images; image += plan.lanes) {
        const float* from = values + image * side.stride + unit * side.size;
        float* to = rows + plan.front + image * plan.area;  // a group of lanes takes lanes * area numbers
        if (plan.lanes == 1) {
            for (int64_t i = 0; i < size; i += side.run)
                for (int64_t phase = 0; phase < std::min(side.step, side.run); ++phase) spread_out(side, to, from, i, phase);
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            Line line[LANES];
            const int64_t items = std::min(LANES, size - i), lanes = std::min(LANES, images - image);
            for (int64_t lane = 0; lane < LANES; ++lane)
                line[lane] = lane < lanes ? line_of(from + lane * side.stride + i, items) : Line{};
            transpose(line);
            for (int64_t j = 0; j < items; ++j)
                if (side.table[i + j] >= 0) std::memcpy(to + side.table[i + j], &line[j], sizeof(Line));
        }
    }
}

// Numbers i + phase, i + phase + step, ... of a run, from their grid.
inline void collect(const Side& side, float* to, const float* grid, int64_t i, int64_t phase) {
    const int64_t count = (side.run - phase + side.step - 1) / side.step, place = side.table[i + phase];
    to += i + phase;
    if (side.step == 1 && place >= 0) return copy(to, grid + place, count);
    for (int64_t j = 0; j < count; ++j) to[j * side.step] = place < 0 ? 0 : grid[place + j];
}

// The way back: rows of a unit to its numbers; with a second set of rows and x, `first + 2 x second`.
void unpack(const Plan& plan, const Side& side, const float* first, const float* second, const float* x,
            int64_t images, int64_t unit, float* values, float* spare) {
    const int64_t size = std::min(side.size, side.stride - unit * side.size);
    for (int64_t image = 0; image < images; image += plan.lanes) {
        const int64_t at = image * side.stride + unit * side.size, lanes = std::min(plan.lanes, images - image);
        const int64_t group = plan.front + image * plan.area;
        if (plan.lanes == 1) {
            for (int64_t i = 0; i < size; i += side.run)
                for (int64_t phase = 0; phase < std::min(side.step, side.run); ++phase) collect(side, values + at, first + group, i, phase);
            if (!second) continue;
            for (int64_t i = 0; i < size; i += side.run)
                for (int64_t phase = 0; phase < std::min(side.step, side.run); ++phase) collect(side, spare, second + group, i, phase);
            for (int64_t i = 0; i < size; ++i) values[at + i] += 2 * x[at + i] * spare[i];
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t items = std::min(LANES, size - i);
            Line line[LANES], line2[LANES];
            for (int64_t j = 0; j < LANES; ++j) {
                const int64_t place = j < items ? side.table[i + j] : -1;
                line[j] = place < 0 ? Line{} : line_of(first + group + place, LANES);
                if (second) line2[j] = place < 0 ? Line{} : line_of(second + group + place, LANES);
            }
            transpose(line);
            if (second) transpose(line2);
            for (int64_t lane = 0; lane < lanes; ++lane) {
                const int64_t to = at + lane * side.stride + i;
                if (second) line[lane] += 2 * line_of(x + to, items) * line2[lane];
                std::memcpy(values + to, &line[lane], items * sizeof(float));
            }
        }
    }
}

enum Kind { SINGLE, SQUARED, TWO };  // a pair's second sum is over the squared grid, or over a grid of its own

// M vectors of positions, held over all non-zeros of a row.
template <int N, int M, Kind KIND>
inline void tile(const float* grid, const float* grid2, const int32_t* offset, const float* w, const float* w2,
                 int64_t count, float start, float* to, float* to2) {
    Vector<N> sum[M], sum2[M];
    for (int m = 0; m < M; ++m) sum[m] = spread<N>(start), sum2[m] = Vector<N>{};
    for (int64_t k = 0; k < count; ++k) {
        const float* at = grid + offset[k];
        const Vector<N> weight = spread<N>(w[k]), weight2 = KIND == SINGLE ? Vector<N>{} : spread<N>(w2[k]);
        for (int m = 0; m < M; ++m) {
            const Vector<N> x = load<N>(at + m * N);
            sum[m] += weight * x;
            if (KIND == SQUARED) sum2[m] += weight2 * (x * x);
            if (KIND == TWO) sum2[m] += weight2 * load<N>(grid2 + offset[k] + m * N);
        }
    }
    for (int m = 0; m < M; ++m) {
        store<N>(to + m * N, sum[m]);
        if (KIND != SINGLE) store<N>(to2 + m * N, sum2[m]);
    }
}

// All positions of a row, in tiles as large as what is left.
template <int N, int M, Kind KIND>
void row(const float* grid, const float* grid2, const int32_t* offset, const float* w, const float* w2, int64_t count,
         float start, float* to, float* to2, int64_t t, int64_t end) {
    for (; t + M * N <= end; t += M * N)
        tile<N, M, KIND>(grid + t, grid2 + t, offset, w, w2, count, start, to + t, to2 + t);
    if constexpr (M > 1)
        if (t < end) row<N, M / 2, KIND>(grid, grid2, offset, w, w2, count, start, to, to2, t, end);
}

template <int N, Kind KIND>
void rows(const Plan& plan, const Structure& of, const float* grid, const float* grid2, const float* w,
          const float* w2, const float* start, int64_t first, int64_t last, int64_t end, float* to, float* to2) {
    // A linear layer's last unit has rows without an output, and these no start.
    for (int64_t r = first; r < last; ++r, to += plan.length, to2 += plan.length) {
        const int64_t k = of.start[r], count = of.start[r + 1] - k;
        row<N, KIND == SINGLE ? DEPTH : DEPTH / 2, KIND>(grid, grid2, of.offset + k, w + k, KIND == SINGLE ? w : w2 + k, count,
                                                      start && r < plan.out.stride ? start[r] : 0, to + plan.front, to2 + plan.front, 0, end);
    }
}

// sums[k] += over M vectors of positions, lane by lane: the lanes are added up when the row is done.
template <int N, int M, bool PAIR>
inline void products(const float* g, const float* g2, const float* grid, const int32_t* offset, int64_t count,
                     float* sums, float* sums2) {
    Vector<N> held[M], held2[M];
    for (int m = 0; m < M; ++m) held[m] = load<N>(g + m * N), held2[m] = PAIR ? load<N>(g2 + m * N) : Vector<N>{};
    constexpr int PARTS = M < 4 ? M : 4;  // sums that do not wait for each other
    for (int64_t k = 0; k < count; ++k) {
        const float* at = grid + offset[k];
        Vector<N> part[PARTS], part2[PARTS];
        for (int m = 0; m < PARTS; ++m) part[m] = part2[m] = Vector<N>{};
        for (int m = 0; m < M; ++m) {
            const Vector<N> x = load<N>(at + m * N);
            part[m % PARTS] += held[m] * x;
            if (PAIR) part2[m % PARTS] += held2[m] * (x * x);
        }
        for (int m = 1; m < PARTS; ++m) part[0] += part[m], part2[0] += part2[m];
        store<N>(sums + k * N, load<N>(sums + k * N) + part[0]);
        if (PAIR) store<N>(sums2 + k * N, load<N>(sums2 + k * N) + part2[0]);
    }
}

template <int N, int M, bool PAIR>
void product_row(const float* g, const float* g2, const float* grid, const int32_t* offset, int64_t count, float* sums,
                 float* sums2, int64_t t, int64_t end) {
    for (; t + M * N <= end; t += M * N)
        products<N, M, PAIR>(g + t, g2 + t, grid + t, offset, count, sums, sums2);
    if constexpr (M > 1)
        if (t < end) product_row<N, M / 2, PAIR>(g, g2, grid, offset, count, sums, sums2, t, end);
}

template <int N>
inline float total(const float* from) {
    if constexpr (N == 2) return from[0] + from[1];
    else {
        float halves[N / 2];
        store<N / 2>(halves, load<N / 2>(from) + load<N / 2>(from + N / 2));
        return total<N / 2>(halves);
    }
}

template <int N>
void add_up(const float* sums, int64_t count, bool fresh, float* to) {
    for (int64_t k = 0; k < count; ++k) to[k] = total<N>(sums + k * N) + (fresh ? 0 : to[k]);
}

template <Kind KIND, typename... Arguments>
void any_rows(const Plan& plan, Arguments... given) {
    if (plan.lanes > 1) rows<ALIGNED, KIND>(plan, given...);
    else rows<ANYWHERE, KIND>(plan, given...);
}

// The gradients at one output's non-zeros, over one chunk; the first makes a fresh start.
template <int N>
void sums_of_row(const float* g, const float* g2, const float* grid, const int32_t* offset, int64_t count, int64_t end,
                 bool fresh, float* sums, float* sums2, float* to, float* to2) {
    std::memset(sums, 0, count * N * sizeof(float));
    if (g2) {
        std::memset(sums2, 0, count * N * sizeof(float));
        product_row<N, DEPTH / 2, true>(g, g2, grid, offset, count, sums, sums2, 0, end);
        add_up<N>(sums2, count, fresh, to2);
    } else product_row<N, DEPTH, false>(g, g, grid, offset, count, sums, sums2, 0, end);
    add_up<N>(sums, count, fresh, to);
}

int64_t whole(int64_t positions) { return (positions + LANES - 1) / LANES * LANES; }

int64_t longest(const int32_t* start, int64_t rows) {
    int32_t most = 0;
    for (int64_t r = 0; r < rows; ++r) most = std::max(most, start[r + 1] - start[r]);
    return most;
}

// Few chunks are shared by all threads, unit by unit; of many, each thread takes its own and waits for nobody.
template <typename Step>
void each(int64_t count, bool together, Step step) {
    if (!together) {
        for (int64_t i = 0; i < count; ++i) step(i);
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) step(i);
}

// A layer so small that threads would wait longer than they work.
int useful(const Plan& plan, int64_t count, int threads) {
    return count * plan.batch * plan.out.span < 1 << 17 ? 1 : threads;
}

// y = W x + bias, and y2 = W2 x^2 where w2 is given, of one chunk.
struct Forward {
    const Plan& plan;
    Structure by_output;
    const float *x, *w, *w2, *bias;
    float *y, *y2;
    int64_t grid_size() const { return plan.in.units * plan.in.rows * plan.length; }
    int64_t own_size() const { return plan.out.rows * plan.length; }

    void operator()(int64_t image, bool together, float* grid, float* own) const {
        const int64_t images = std::min(plan.images(), plan.batch - image);
        const int64_t end = whole(plan.positions(plan.out, images)), to = image * plan.out.stride;
        float* own2 = own + own_size();
        each(plan.in.units, together,
             [&](int64_t unit) { pack(plan, plan.in, x + image * plan.in.stride, images, unit, grid); });
        each(plan.out.units, together, [&](int64_t unit) {
            const int64_t first = unit * plan.out.rows, last = first + plan.out.rows;
            const float* from = grid + plan.front;
            if (w2) any_rows<SQUARED>(plan, by_output, from, from, w, w2, bias, first, last, end, own, own2);
            else any_rows<SINGLE>(plan, by_output, from, from, w, w, bias, first, last, end, own, own2);
            unpack(plan, plan.out, own, nullptr, nullptr, images, unit, y + to, nullptr);
            if (w2) unpack(plan, plan.out, own2, nullptr, nullptr, images, unit, y2 + to, nullptr);
        });
    }
};

// From dy (and dy2 of a pair): dx and dw (and dw2), where they are wanted, of one chunk; dw is added to, unless fresh.
struct Backward {
    const Plan& plan;
    Structure by_output, by_input;
    const float *x, *dy, *dy2, *w, *w2;  // weights in the order of by_input
    float* dx;
    int64_t rows_in() const { return plan.in.units * plan.in.rows; }
    int64_t rows_out() const { return plan.out.units * plan.out.rows; }
    int64_t grid_size() const { return (rows_in() + (dy2 ? 2 : 1) * rows_out()) * plan.length; }
    int64_t own_size(bool sums) const {
        const int64_t rows = plan.in.rows * plan.length + plan.in.size;
        return whole(sums ? std::max(rows, longest(by_output.start, rows_out()) * ALIGNED) : rows);
    }

    void operator()(int64_t image, bool together, bool fresh, float* grid, float* own, float* own2, float* dw,
                    float* dw2) const {
        const int64_t images = std::min(plan.images(), plan.batch - image), from = image * plan.out.stride;
        const int64_t end_in = whole(plan.positions(plan.in, images)), end = whole(plan.positions(plan.out, images));
        float *grid_g = grid + rows_in() * plan.length, *grid_g2 = grid_g + rows_out() * plan.length;
        const float* x_here = x + image * plan.in.stride;
        if (dw) each(plan.in.units, together, [&](int64_t unit) { pack(plan, plan.in, x_here, images, unit, grid); });
        each(plan.out.units, together, [&](int64_t unit) {
            pack(plan, plan.out, dy + from, images, unit, grid_g);
            if (dy2) pack(plan, plan.out, dy2 + from, images, unit, grid_g2);
        });
        const float *g = grid_g + plan.front, *g2 = dy2 ? grid_g2 + plan.front : nullptr;
        if (dx) each(plan.in.units, together, [&](int64_t unit) {
            const int64_t first = unit * plan.in.rows, last = first + plan.in.rows;
            const float* none = nullptr;
            if (g2) any_rows<TWO>(plan, by_input, g, g2, w, w2, none, first, last, end_in, own, own2);
            else any_rows<SINGLE>(plan, by_input, g, g, w, w, none, first, last, end_in, own, own2);
            unpack(plan, plan.in, own, g2 ? own2 : nullptr, x_here, images, unit, dx + image * plan.in.stride,
                   own2 + plan.in.rows * plan.length);
        });
        if (dw) each(rows_out(), together, [&](int64_t r) {
            const int64_t k = by_output.start[r], count = by_output.start[r + 1] - k, at = r * plan.length;
            const auto sums = plan.lanes > 1 ? sums_of_row<ALIGNED> : sums_of_row<ANYWHERE>;
            sums(g + at, g2 ? g2 + at : nullptr, grid + plan.front, by_output.offset + k, count, end, fresh, own, own2,
                 dw + k, g2 ? dw2 + k : nullptr);
        });
    }
};

}  // namespace

extern "C" {

// Both return 0, or 1 when there is no memory.
int caveat_forward(const Plan* plan, const float* x, const int32_t* start, const int32_t* offset, const float* w,
                   const float* w2, const float* bias, float* y, float* y2, int threads) {
    const Forward forward{*plan, {start, offset}, x, w, w2, bias, y, y2};
    threads = useful(*plan, start[plan->out.units * plan->out.rows], threads);
    const int64_t chunk = plan->images();
    const bool together = plan->batch <= chunk * threads;
    const int64_t grid_size = forward.grid_size(), own_size = 2 * forward.own_size();
    const int64_t grids = together ? 1 : threads;
    float* grid = memory.of(grids * grid_size + threads * own_size);
    if (!grid) return 1;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num();
        float *mine = grid + (together ? 0 : me * grid_size), *own = grid + grids * grid_size + me * own_size;
        if (together) {
            for (int64_t image = 0; image < plan->batch; image += chunk) forward(image, true, mine, own);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t image = 0; image < plan->batch; image += chunk) forward(image, false, mine, own);
        }
    }
    return 0;
}

// `order`: which weight is the k-th of the structure by inputs.
int caveat_backward(const Plan* plan, const float* x, const float* dy, const float* dy2, const int32_t* start,
                    const int32_t* offset, const float* w, const float* w2, const int32_t* start_in,
                    const int32_t* offset_in, const int32_t* order, float* dx, float* dw, float* dw2, int threads) {
    const int64_t count = start[plan->out.units * plan->out.rows], padded = whole(count), pair = dy2 ? 2 : 1;
    const int64_t chunk = plan->images(), chunks = (plan->batch + chunk - 1) / chunk;
    // How dw is summed depends on the layer and batch alone: in parts of several chunks, then over the parts.
    const bool together = chunks < 8;
    const int64_t most = std::max<int64_t>(4, std::min<int64_t>(16, (1 << 22) / (count + 1)));
    const int64_t parts = together ? 1 : std::min(chunks, most), each_part = (chunks + parts - 1) / parts;
    threads = useful(*plan, count, threads);
    if (!together) threads = static_cast<int>(std::min<int64_t>(threads, parts));
    Backward backward{*plan, {start, offset}, {start_in, offset_in}, x, dy, dy2, nullptr, nullptr, dx};
    const int64_t grid_size = backward.grid_size(), own_size = backward.own_size(dw != nullptr);
    const int64_t grids = together ? 1 : threads, sums_size = dw ? (parts - 1) * pair * padded : 0;
    float* grid = memory.of(grids * grid_size + threads * 2 * own_size + pair * padded + sums_size);
    if (!grid) return 1;
    float *owns = grid + grids * grid_size, *sorted = owns + threads * 2 * own_size, *sums = sorted + pair * padded;
    backward.w = sorted, backward.w2 = sorted + padded;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num();
        float *mine = grid + (together ? 0 : me * grid_size), *own = owns + me * 2 * own_size, *own2 = own + own_size;
        if (dx) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < count; ++k) {
                sorted[k] = w[order[k]];
                if (dy2) sorted[padded + k] = w2[order[k]];
            }
        }
        if (together) {
            for (int64_t i = 0; i < chunks; ++i) backward(i * chunk, true, i == 0, mine, own, own2, dw, dw2);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t part = 0; part < parts; ++part) {
                float *to = dw, *to2 = dw2;
                if (dw && part) to = sums + (part - 1) * pair * padded, to2 = to + padded;
                const int64_t first = part * each_part, last = std::min(chunks, first + each_part);
                for (int64_t i = first; i < last; ++i) backward(i * chunk, false, i == first, mine, own, own2, to, to2);
            }
            if (dw) {
                const int64_t filled = (chunks + each_part - 1) / each_part;
#pragma omp for schedule(static)
                for (int64_t k = 0; k < count; ++k)
                    for (int64_t part = 1; part < filled; ++part) {
                        dw[k] += sums[(part - 1) * pair * padded + k];
                        if (dy2) dw2[k] += sums[(part - 1) * pair * padded + padded + k];
                    }
            }
        }
    }
    return 0;
}

}  // extern "C"
