// 3x3 convolutions by Winograd's minimal filtering (Lavin and Gray, 2016): fewer products, on transformed tiles.
//
//     Y = A' [(G g G') * (B' d B)] A      d: inputs of a tile, g: kernel, Y: outputs of a tile, *: elementwise
//
// summed over input channels, so that each place of * is a matrix product, tiles x inputs by inputs x outputs.
// Plain: stride 1, 6x6 inputs to 4x4 outputs with 36 products instead of 144. Spread: the gradient at the inputs of a
// convolution of stride 2 and padding 1, 5x5 to 8x8 with 81 instead of 144; see there.
// Images are [image, row, column, channel]; channels go through in vectors of sixteen, outputs in panels of 64.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t LANES = 16, VECTORS = 4, PANEL = VECTORS * LANES, ROWS = 6;
constexpr int KERNELS = 6, GROUPS = KERNELS * KERNELS;  // transformed kernels along an axis, and in all
constexpr int64_t STEP = 4;                             // from tile to tile, along the inputs
constexpr int64_t CACHE = 1 << 17;         // numbers of tiles in work that a core's cache holds (half a megabyte)
constexpr int64_t SHARED_CACHE = 1 << 21;  // and the cache of all cores (8 MB)

Vector load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
void store(float* at, Vector value) { *reinterpret_cast<Vector*>(at) = value; }

// Stride 1, F(4, 3) along an axis; points 0, 1, -1, 2, -2 and infinity.
struct Plain {
    static constexpr int IN = 6, OUT = 4, PLACES = 6, SHARING = 1;
    static constexpr float G[KERNELS][3] = {{1 / 4.f, 0, 0},
                                            {-1 / 6.f, -1 / 6.f, -1 / 6.f},
                                            {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                            {1 / 24.f, 1 / 12.f, 1 / 6.f},
                                            {1 / 24.f, -1 / 12.f, 1 / 6.f},
                                            {0, 0, 1}};
    static void analyse(const Vector* d, int step, Vector* v, int v_step) {  // B' d
        const Vector even = d[4 * step] - 4.f * d[2 * step], odd = d[3 * step] - 4.f * d[step];
        const Vector apart = d[4 * step] - d[2 * step], twice = 2.f * (d[3 * step] - d[step]);
        v[0] = 4.f * d[0] - 5.f * d[2 * step] + d[4 * step];
        v[v_step] = even + odd;
        v[2 * v_step] = even - odd;
        v[3 * v_step] = apart + twice;
        v[4 * v_step] = apart - twice;
        v[5 * v_step] = 4.f * d[step] - 5.f * d[3 * step] + d[5 * step];
    }
    static void synthesise(const Vector* m, int step, Vector* y, int y_step) {  // A' m
        const Vector sum = m[step] + m[2 * step], difference = m[step] - m[2 * step];
        const Vector sum2 = m[3 * step] + m[4 * step], difference2 = m[3 * step] - m[4 * step];
        y[0] = m[0] + sum + sum2;
        y[y_step] = difference + 2.f * difference2;
        y[2 * y_step] = sum + 4.f * sum2;
        y[3 * y_step] = difference + 8.f * difference2 + m[5 * step];
    }
};

// Back through stride 2 along an axis: y_2i = k_1 d_i, four places that share a kernel, and y_2i+1 = k_2 d_i +
// k_0 d_i+1, F(4, 2) with five places; points 0, 1, -1, 2 and infinity.
struct Spread {
    static constexpr int IN = 5, OUT = 8, PLACES = 9, SHARING = 4;
    static constexpr float G[KERNELS][3] = {{0, 1, 0},         {0, 0, 1 / 2.f},       {-1 / 2.f, 0, -1 / 2.f},
                                            {1 / 6.f, 0, -1 / 6.f}, {1 / 3.f, 0, 1 / 6.f}, {1, 0, 0}};
    static void analyse(const Vector* d, int step, Vector* v, int v_step) {
        for (int i = 0; i < 4; i++) v[i * v_step] = d[i * step];
        const Vector high = d[3 * step] - d[step], low = d[2 * step];
        v[4 * v_step] = 2.f * (d[0] - low) + high;
        v[5 * v_step] = d[3 * step] - low - 2.f * d[step];
        v[6 * v_step] = d[3 * step] - 3.f * low + 2.f * d[step];
        v[7 * v_step] = high;
        v[8 * v_step] = d[4 * step] - low - 2.f * high;
    }
    static void synthesise(const Vector* m, int step, Vector* y, int y_step) {
        for (int i = 0; i < 4; i++) y[2 * i * y_step] = m[i * step];
        const Vector sum = m[5 * step] + m[6 * step], difference = m[5 * step] - m[6 * step], two = m[7 * step];
        y[y_step] = m[4 * step] + sum + two;
        y[3 * y_step] = difference + 2.f * two;
        y[5 * y_step] = sum + 4.f * two;
        y[7 * y_step] = difference + 8.f * two + m[8 * step];
    }
};

// Where the rows of each place lie: those of places that share a kernel are together, so that it meets them at once.
template <class Way>
struct Layout {
    int64_t sharing[GROUPS], before[GROUPS];                       // places of a group, and those of the groups before
    int64_t group[Way::PLACES * Way::PLACES], number[Way::PLACES * Way::PLACES];  // of a place, and its own in the group
    Layout() {
        for (int g = 0, sum = 0; g < GROUPS; g++) {
            sharing[g] = (g / KERNELS ? 1 : Way::SHARING) * (g % KERNELS ? 1 : Way::SHARING);
            before[g] = sum;
            sum += sharing[g];
        }
        for (int i = 0; i < Way::PLACES; i++)
            for (int j = 0; j < Way::PLACES; j++) {
                const int a = std::max(0, i - Way::SHARING + 1), b = std::max(0, j - Way::SHARING + 1);
                group[i * Way::PLACES + j] = a * KERNELS + b;
                number[i * Way::PLACES + j] = (a ? 0 : i) * (b ? 1 : Way::SHARING) + (b ? 0 : j);
            }
    }
    // The first number of every place of a tile.
    void find(int64_t tile, int64_t tiles, int64_t channels, int64_t* at) const {
        for (int place = 0; place < Way::PLACES * Way::PLACES; place++) {
            const int64_t g = group[place];
            at[place] = (before[g] * tiles + tile * sharing[g] + number[place]) * channels;
        }
    }
};

struct Sizes {
    int64_t images, height, width, inputs, outputs, padding, out_height, out_width;
};

// The corner of a tile in its image, in steps.
struct Place {
    int64_t image, down, across;
    Place(const Sizes& s, int out, int64_t tile) {
        const int64_t wide = (s.out_width + out - 1) / out, high = (s.out_height + out - 1) / out;
        image = tile / (wide * high), down = tile % (wide * high) / wide, across = tile % wide;
    }
};

// B' d B of one tile, to its rows of v.
template <class Way>
void read_tile(const Sizes& s, const Layout<Way>& layout, const float* x, int64_t first, int64_t tile, int64_t tiles,
               float* v) {
    constexpr int IN = Way::IN, N = Way::PLACES;
    const Place place(s, Way::OUT, first + tile);
    const int64_t top = place.down * STEP - s.padding, left = place.across * STEP - s.padding;
    x += place.image * s.height * s.width * s.inputs;
    int64_t at[N * N];
    layout.find(tile, tiles, s.inputs, at);
    for (int64_t channel = 0; channel < s.inputs; channel += LANES) {
        Vector d[IN * IN], half[N * IN], whole[N];
        for (int i = 0; i < IN; i++)
            for (int j = 0; j < IN; j++) {
                const int64_t row = top + i, column = left + j;
                const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
                d[IN * i + j] = inside ? load(x + (row * s.width + column) * s.inputs + channel) : Vector{};
            }
        for (int j = 0; j < IN; j++) Way::analyse(d + j, IN, half + j, IN);
        for (int i = 0; i < N; i++) {
            Way::analyse(half + IN * i, 1, whole, 1);
            for (int j = 0; j < N; j++) store(v + at[N * i + j] + channel, whole[j]);
        }
    }
}

// A' m A of one tile, as far as it lies in the image; with `gate`, times `scale` where that is positive, and else 0.
template <class Way>
void write_tile(const Sizes& s, const Layout<Way>& layout, const float* m, int64_t first, int64_t tile, int64_t tiles,
                const float* gate, const float* scale, float* y) {
    constexpr int OUT = Way::OUT, N = Way::PLACES;
    const Place place(s, OUT, first + tile);
    const int64_t rows = std::min<int64_t>(OUT, s.out_height - place.down * OUT);
    const int64_t columns = std::min<int64_t>(OUT, s.out_width - place.across * OUT);
    int64_t from[N * N];
    layout.find(tile, tiles, s.outputs, from);
    const int64_t corner = (place.image * s.out_height + place.down * OUT) * s.out_width + place.across * OUT;
    for (int64_t channel = 0; channel < s.outputs; channel += LANES) {
        Vector all[N * N], half[OUT * N], whole[OUT];
        for (int k = 0; k < N * N; k++) all[k] = load(m + from[k] + channel);
        for (int j = 0; j < N; j++) Way::synthesise(all + j, N, half + j, N);
        for (int64_t i = 0; i < rows; i++) {
            Way::synthesise(half + N * i, 1, whole, 1);
            for (int64_t j = 0; j < columns; j++) {
                const int64_t at = (corner + i * s.out_width + j) * s.outputs + channel;
                store(y + at, gate ? load(gate + at) > 0.f ? whole[j] * load(scale + channel) : Vector{} : whole[j]);
            }
        }
    }
}

// R rows times a panel; sums stay in registers, and the next panel is on its way.
template <int R>
void multiply(const float* v, const float* u, float* m, int64_t inputs, int64_t outputs) {
    Vector sums[R][VECTORS] = {};
    for (int64_t k = 0; k < inputs; k++) {
        Vector row[VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < VECTORS; n++) {
            row[n] = load(u + k * PANEL + n * LANES);
            __builtin_prefetch(u + (inputs + k) * PANEL + n * LANES, 0, 2);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) sums[r][n] += v[r * inputs + k] * row[n];
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < VECTORS; n++) store(m + r * outputs + n * LANES, sums[r][n]);
}

using Multiply = void (*)(const float*, const float*, float*, int64_t, int64_t);
constexpr Multiply MULTIPLY[ROWS] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>};

// Rows times one panel of a transformed kernel: [rows, inputs] times [inputs, 64].
void multiply_all(const float* v, const float* u, float* m, int64_t rows, int64_t inputs, int64_t outputs) {
    for (int64_t row = 0; row < rows; row += ROWS)
        MULTIPLY[std::min(ROWS, rows - row) - 1](v + row * inputs, u, m + row * outputs, inputs, outputs);
}

// Threads take tiles of their own, in blocks that a core's cache holds; where the kernels are too large for the cache of
// all cores, they share large blocks, and each takes some of the panels.
template <class Way>
int convolve(const Sizes& s, const float* x, const float* u, const float* gate, const float* scale, float* y,
             int threads) {
    static const Layout<Way> layout;
    constexpr int64_t PLACES = Way::PLACES * Way::PLACES;
    const int64_t panels = s.outputs / PANEL;
    const bool together = GROUPS * s.inputs * s.outputs > 2 * SHARED_CACHE;
    const int64_t high = (s.out_height + Way::OUT - 1) / Way::OUT, wide = (s.out_width + Way::OUT - 1) / Way::OUT;
    const int64_t tiles = s.images * high * wide, of_tile = PLACES * (s.inputs + s.outputs);
    const int64_t most = std::max(ROWS, (together ? SHARED_CACHE : CACHE) / of_tile / ROWS * ROWS);
    const int64_t block = std::min(tiles, most), room = block * of_tile;
    float* memory = static_cast<float*>(std::aligned_alloc(64, room * sizeof(float) * (together ? 1 : threads)));
    if (!memory) return 1;
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        const int me = omp_get_thread_num(), all = omp_get_num_threads();
#else
        const int me = 0, all = 1;
#endif
        const int64_t first = together ? me : 0, step = together ? all : 1;
        float* v = memory + (together ? 0 : me * room);
        float* m = v + block * PLACES * s.inputs;
        for (int64_t start = together ? 0 : me * block; start < tiles; start += together ? block : all * block) {
            const int64_t count = std::min(block, tiles - start);
            for (int64_t t = first; t < count; t += step) read_tile(s, layout, x, start, t, count, v);
            if (together) {
#pragma omp barrier
            }
            for (int64_t unit = first; unit < GROUPS * panels; unit += step) {
                const int64_t g = unit / panels, panel = unit % panels * PANEL, row = layout.before[g] * count;
                multiply_all(v + row * s.inputs, u + (g * s.outputs + panel) * s.inputs, m + row * s.outputs + panel,
                             layout.sharing[g] * count, s.inputs, s.outputs);
            }
            if (together) {
#pragma omp barrier
            }
            for (int64_t t = first; t < count; t += step)
                write_tile(s, layout, m, start, t, count, gate, scale, y);
            if (together) {
#pragma omp barrier
            }
        }
    }
    std::free(memory);
    return 0;
}

}  // namespace

extern "C" {

// G g G' of all kernels to u[place][panel][input][64]; sizes: inputs, outputs, the kernels' strides by output, input, row
// and column, and whether for Spread.
int caveat_winograd_weights(const int64_t* sizes, const float* w, float* u, int threads) {
    const int64_t inputs = sizes[0], outputs = sizes[1];
    const float(*G)[3] = sizes[6] ? Spread::G : Plain::G;
#pragma omp parallel for num_threads(threads) collapse(2)
    for (int64_t panel = 0; panel < outputs; panel += PANEL)
        for (int64_t input = 0; input < inputs; input++)
            for (int64_t output = panel; output < panel + PANEL; output += LANES) {
                Vector g[3][3], half[KERNELS][3];
                for (int lane = 0; lane < LANES; lane++)
                    for (int i = 0; i < 3; i++)
                        for (int j = 0; j < 3; j++)
                            g[i][j][lane] =
                                w[(output + lane) * sizes[2] + input * sizes[3] + i * sizes[4] + j * sizes[5]];
                for (int a = 0; a < KERNELS; a++)
                    for (int j = 0; j < 3; j++) half[a][j] = G[a][0] * g[0][j] + G[a][1] * g[1][j] + G[a][2] * g[2][j];
                float* at = u + panel * inputs + input * PANEL + output - panel;
                for (int a = 0; a < KERNELS; a++)
                    for (int b = 0; b < KERNELS; b++)
                        store(at + (KERNELS * a + b) * inputs * outputs,
                              G[b][0] * half[a][0] + G[b][1] * half[a][1] + G[b][2] * half[a][2]);
            }
    return 0;
}

// sizes: images, height, width, inputs, outputs, padding, height and width of the outputs, whether Spread; gate and
// scale, or neither: as in `write_tile`.
int caveat_winograd(const int64_t* sizes, const float* x, const float* u, const float* gate, const float* scale,
                    float* y, int threads) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
    return (sizes[8] ? convolve<Spread> : convolve<Plain>)(s, x, u, gate, scale, y, threads);
}
}
