// Leapfrog trajectories of a perceptron with a softmax, its gradient over all rows included:
//
//     p += eps/2 g;  steps times: z += eps p,  w = offset + scale z,  g = (scale dL/dw - stiffness z) / T,  p += eps g
//     h_l = W_l a_(l-1) + b_l,  a_l = s(h_l);   dW_l += g_l a_(l-1)^T,  g_(l-1) = s'(h_(l-1)) (W_l^T g_l)
//
// (the last p by eps/2). In a small network a step of such arithmetic takes less time than the calls that ask for it, so
// that a whole trajectory is one call. Rows go through in blocks that stay in a core's first cache, and all chains go
// over a block before the next is read. Numbers of a row lie side by side, filled up with zeros to whole vectors: a
// product reads one number of a row against vectors of weights, or one number of a gradient against vectors of the row,
// and no sum runs across a vector. Threads divide the rows; one of them moves the chains.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, TALL = 8;
#elif defined(__AVX__)
constexpr int BYTES = 32, TALL = 4;
#else
constexpr int BYTES = 16, TALL = 4;
#endif
constexpr int64_t BLOCK = 48;  // rows
constexpr int64_t FILLED = 64;  // bytes that the numbers of a row are filled up to

enum Activation { NONE, RELU, SILU, TANH };

template <class T>
struct Of;
template <>
struct Of<float> {
    typedef float vector __attribute__((vector_size(BYTES), aligned(4), may_alias));
    typedef int32_t integers __attribute__((vector_size(BYTES), aligned(4), may_alias));
    static constexpr float lowest = -80.0f, highest = 80.0f, least = -1e30f;
    static constexpr float round = 0x1.8p23f + 127, to_exponent = 127;
    static constexpr int mantissa = 23;
    static constexpr float log2_high = 0x1.62e4p-1f, log2_low = 0x1.7f7d1cp-20f;
    static constexpr int degree = 7;
};
template <>
struct Of<double> {
    typedef double vector __attribute__((vector_size(BYTES), aligned(8), may_alias));
    typedef int64_t integers __attribute__((vector_size(BYTES), aligned(8), may_alias));
    static constexpr double lowest = -700.0, highest = 700.0, least = -1e300;
    static constexpr double round = 0x1.8p52 + 1023, to_exponent = 1023;
    static constexpr int mantissa = 52;
    static constexpr double log2_high = 0x1.62e42fee00000p-1, log2_low = 0x1.a39ef35793c76p-33;
    static constexpr int degree = 13;
};
template <class T>
using Vector = typename Of<T>::vector;
template <class T>
constexpr int64_t LANES = BYTES / int64_t(sizeof(T));

template <class T>
inline Vector<T> load(const T* from) { return *reinterpret_cast<const Vector<T>*>(from); }
template <class T>
inline void store(T* to, Vector<T> value) { *reinterpret_cast<Vector<T>*>(to) = value; }
template <class T>
inline Vector<T> larger(Vector<T> a, Vector<T> b) { return a < b ? b : a; }

template <class T, int K>
inline Vector<T> rotated(Vector<T> x) {
#ifdef __clang__
    Vector<T> y;
    for (int i = 0; i < LANES<T>; ++i) y[i] = x[(i + K) % LANES<T>];
    return y;
#else
    typename Of<T>::integers places;
    for (int i = 0; i < LANES<T>; ++i) places[i] = (i + K) % LANES<T>;
    return __builtin_shuffle(x, places);
#endif
}
// The largest number of a vector, and the sum of its numbers, in every place of one.
template <class T, int K = LANES<T> / 2>
inline Vector<T> largest(Vector<T> x) {
    x = larger<T>(x, rotated<T, K>(x));
    if constexpr (K > 1) x = largest<T, K / 2>(x);
    return x;
}
template <class T, int K = LANES<T> / 2>
inline Vector<T> total(Vector<T> x) {
    x += rotated<T, K>(x);
    if constexpr (K > 1) x = total<T, K / 2>(x);
    return x;
}

// 2^n and e^r - 1, where x = n log 2 + r: the first terms of the series are far below rounding at |r| <= log(2) / 2.
template <class T>
inline void exponential(Vector<T> x, Vector<T>& power, Vector<T>& rest) {
    typedef Of<T> K;
    x = x < K::lowest ? Vector<T>{} + K::lowest : x;
    x = x > K::highest ? Vector<T>{} + K::highest : x;
    Vector<T> shifted = x * T(1.4426950408889634074) + K::round;  // n + the exponent of 1, in the last digits
    Vector<T> n = shifted - K::round;
    typename K::integers bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= K::mantissa;
    std::memcpy(&power, &bits, sizeof bits);
    Vector<T> r = x - n * K::log2_high;
    r -= n * K::log2_low;
    double factor = 1;
    for (int k = 2; k <= K::degree; ++k) factor /= k;
    Vector<T> sum = Vector<T>{} + T(factor);
    for (int k = K::degree; k > 2; --k) {
        factor *= k;
        sum = sum * r + T(factor);  // ... + r^(k - 3) / (k - 1)!
    }
    rest = sum * r * r + r;
}
template <class T>
inline Vector<T> exp(Vector<T> x) {
    Vector<T> power, rest;
    exponential<T>(x, power, rest);
    return power * rest + power;
}
template <class T>
inline Vector<T> tanh(Vector<T> x) {
    Vector<T> power, rest;
    exponential<T>(T(2) * x, power, rest);
    Vector<T> less = power * rest + (power - T(1));  // e^2x - 1, exact to rounding near zero as well
    return x > T(20) ? Vector<T>{} + T(1) : less / (less + T(2));
}

// An activation in place, and its derivative.
template <class T>
inline Vector<T> activated(int64_t kind, Vector<T> h, Vector<T>& derivative) {
    if (kind == RELU) {
        derivative = h > T(0) ? Vector<T>{} + T(1) : Vector<T>{};
        return h < T(0) ? Vector<T>{} : h;
    }
    if (kind == SILU) {
        Vector<T> sigmoid = T(1) / (T(1) + exp<T>(-h)), a = h * sigmoid;
        derivative = sigmoid + a * (T(1) - sigmoid);
        return a;
    }
    if (kind == TANH) {
        Vector<T> a = tanh<T>(h);
        derivative = T(1) - a * a;
        return a;
    }
    derivative = Vector<T>{} + T(1);
    return h;
}

// acc[n][c] = sum_k a[n][k] b[k][c], for N numbers a[n][k] at a + n * row + k * step against vectors of b's rows.
template <class T, int N, int C>
inline void products(const T* a, int64_t row, int64_t step, const T* b, int64_t width, int64_t depth, Vector<T> (&acc)[N][C]) {
    for (int64_t k = 0; k < depth; ++k) {
        Vector<T> vectors[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) vectors[c] = load(b + k * width + c * LANES<T>);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[n][c] += a[n * row + k * step] * vectors[c];
    }
}

// Which product: of weights (from a bias), of gradients on the way back (times a derivative), or a sum over rows.
enum Kind { FORWARD, BACKWARD, SUM };

template <class T, int K, int N, int C>
inline void tile(const T* a, int64_t row, int64_t step, const T* b, int64_t width, int64_t depth, const T* bias, T* y, int64_t y_row) {
    Vector<T> acc[N][C];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) acc[n][c] = K == FORWARD ? load(bias + c * LANES<T>) : Vector<T>{};
    products<T, N, C>(a, row, step, b, width, depth, acc);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) {
            T* at = y + n * y_row + c * LANES<T>;
            store<T>(at, K == FORWARD ? acc[n][c] : K == BACKWARD ? load(at) * acc[n][c] : load(at) + acc[n][c]);
        }
}

template <class T, int K, int N>
inline void strip(int64_t count, const T* a, int64_t row, int64_t step, const T* b, int64_t width, int64_t depth, const T* bias, T* y, int64_t y_row) {
    int64_t n = 0;
    for (; n + N <= count; n += N) {
        int64_t c = 0;
        for (; c + 2 * LANES<T> <= width; c += 2 * LANES<T>)
            tile<T, K, N, 2>(a + n * row, row, step, b + c, width, depth, bias + (K == FORWARD ? c : 0), y + n * y_row + c, y_row);
        if (c < width)
            tile<T, K, N, 1>(a + n * row, row, step, b + c, width, depth, bias + (K == FORWARD ? c : 0), y + n * y_row + c, y_row);
    }
    if constexpr (N > 1)
        if (n < count) strip<T, K, N / 2>(count - n, a + n * row, row, step, b, width, depth, bias, y + n * y_row, y_row);
}

struct Shape {
    int64_t rows, stride, chains, steps, size, layers;
    const int64_t *units, *activations;  // of the inputs and of each layer; after each layer
};

inline int64_t filled(int64_t units, int64_t bytes) { return (units * bytes + FILLED - 1) / FILLED * FILLED / bytes; }

// What one thread needs: a copy of all chains' weights as its products read them, and the gradients of its rows.
template <class T>
struct Worker {
    struct Layer {
        int64_t in, out, in_width, out_width, flat;  // `flat`: where its weights begin in a position
        std::vector<T> transposed, weights, bias, gradient, bias_gradient;  // of each chain
        std::vector<T> a, derivative;                                      // of a block of rows, one chain at a time
    };
    std::vector<Layer> layers;
    std::vector<double> likelihood;  // of each chain

    explicit Worker(const Shape& shape) : likelihood(shape.chains) {
        int64_t flat = 0;
        for (int64_t l = 0; l < shape.layers; ++l) {
            Layer layer;
            layer.in = shape.units[l], layer.out = shape.units[l + 1], layer.flat = flat;
            layer.in_width = filled(layer.in, sizeof(T)), layer.out_width = filled(layer.out, sizeof(T));
            flat += layer.out * (layer.in + 1);
            layer.transposed.assign(shape.chains * layer.in * layer.out_width, 0);
            if (l) layer.weights.assign(shape.chains * layer.out * layer.in_width, 0);
            layer.bias.assign(shape.chains * layer.out_width, 0);
            layer.gradient.assign(shape.chains * layer.out * layer.in_width, 0);
            layer.bias_gradient.assign(shape.chains * layer.out_width, 0);
            layer.a.assign(BLOCK * layer.out_width, 0);
            layer.derivative.assign(BLOCK * layer.out_width, 0);
            layers.push_back(std::move(layer));
        }
        Layer& last = layers.back();  // classes that there are not have no probability
        for (int64_t chain = 0; chain < shape.chains; ++chain)
            for (int64_t o = last.out; o < last.out_width; ++o) last.bias[chain * last.out_width + o] = Of<T>::least;
    }

    void read_weights(const Shape& shape, const T* flat) {
        for (int64_t chain = 0; chain < shape.chains; ++chain)
            for (Layer& layer : layers) {
                const T* from = flat + chain * shape.size + layer.flat;
                T* transposed = layer.transposed.data() + chain * layer.in * layer.out_width;
                for (int64_t o = 0; o < layer.out; ++o)
                    for (int64_t i = 0; i < layer.in; ++i) transposed[i * layer.out_width + o] = from[o * layer.in + i];
                if (!layer.weights.empty())
                    for (int64_t o = 0; o < layer.out; ++o)
                        std::copy_n(from + o * layer.in, layer.in, layer.weights.data() + (chain * layer.out + o) * layer.in_width);
                std::copy_n(from + layer.out * layer.in, layer.out, layer.bias.data() + chain * layer.out_width);
            }
    }

    void add_rows(const Shape& shape, const T* x, const int64_t* labels, int64_t first, int64_t last) {
        std::fill(likelihood.begin(), likelihood.end(), 0.0);
        for (Layer& layer : layers) {
            std::fill(layer.gradient.begin(), layer.gradient.end(), T(0));
            std::fill(layer.bias_gradient.begin(), layer.bias_gradient.end(), T(0));
        }
        for (int64_t row = first; row < last; row += BLOCK)
            for (int64_t chain = 0; chain < shape.chains; ++chain)
                add_block(shape, x + row * shape.stride, labels + row, std::min(BLOCK, last - row), chain);
    }

    void add_block(const Shape& shape, const T* x, const int64_t* labels, int64_t rows, int64_t chain) {
        const T* before = x;
        int64_t before_width = shape.stride;
        for (size_t l = 0; l < layers.size(); ++l) {
            Layer& layer = layers[l];
            const T* weights = layer.transposed.data() + chain * layer.in * layer.out_width;
            const T* bias = layer.bias.data() + chain * layer.out_width;
            strip<T, FORWARD, TALL>(rows, before, before_width, 1, weights, layer.out_width, layer.in, bias, layer.a.data(), layer.out_width);
            if (l + 1 < layers.size())
                activate(shape.activations[l], layer.a.data(), layer.derivative.data(), rows * layer.out_width);
            before = layer.a.data(), before_width = layer.out_width;
        }
        likelihood[chain] += softmax(layers.back(), labels, rows);
        for (size_t l = layers.size(); l-- > 0;) {
            Layer& layer = layers[l];
            const T* g = l + 1 < layers.size() ? layer.derivative.data() : layer.a.data();  // the outputs' is in place
            const T* in = l ? layers[l - 1].a.data() : x;  // filled up to in_width, both of them
            T* bias = layer.bias_gradient.data() + chain * layer.out_width;
            for (int64_t o = 0; o < layer.out_width; o += LANES<T>) {
                Vector<T> even{}, odd{};
                for (int64_t r = 0; r + 1 < rows; r += 2) {
                    even += load(g + r * layer.out_width + o);
                    odd += load(g + (r + 1) * layer.out_width + o);
                }
                if (rows % 2) even += load(g + (rows - 1) * layer.out_width + o);
                store<T>(bias + o, load(bias + o) + (even + odd));
            }
            T* gradient = layer.gradient.data() + chain * layer.out * layer.in_width;
            strip<T, SUM, TALL>(layer.out, g, 1, layer.out_width, in, layer.in_width, rows, nullptr, gradient, layer.in_width);
            if (l) {
                const T* weights = layer.weights.data() + chain * layer.out * layer.in_width;
                strip<T, BACKWARD, TALL>(rows, g, layer.out_width, 1, weights, layer.in_width, layer.out, nullptr, layers[l - 1].derivative.data(), layer.in_width);
            }
        }
    }

    static void activate(int64_t kind, T* a, T* derivative, int64_t count) {
        for (int64_t i = 0; i < count; i += LANES<T>) {
            Vector<T> slope;
            store<T>(a + i, activated<T>(kind, load(a + i), slope));
            store<T>(derivative + i, slope);
        }
    }

    // The log likelihood of labels under a softmax of the last layer's outputs, which become its gradient.
    static double softmax(Layer& layer, const int64_t* labels, int64_t rows) {
        const int64_t width = layer.out_width;
        double value = 0, product = 1;  // of sums between 1 and the number of classes: a logarithm of several at once
        for (int64_t r = 0; r < rows; ++r) {
            T* h = layer.a.data() + r * width;
            Vector<T> highest = load(h), sum{};
            for (int64_t c = LANES<T>; c < width; c += LANES<T>) highest = larger<T>(highest, load(h + c));
            highest = largest<T>(highest);
            const T at_label = h[labels[r]];
            for (int64_t c = 0; c < width; c += LANES<T>) {
                Vector<T> power = exp<T>(load(h + c) - highest);
                store<T>(h + c, power);
                sum += power;
            }
            sum = total<T>(sum);
            value += double(at_label - highest[0]);
            product *= double(sum[0]);
            if (r % 8 == 7 || r + 1 == rows) value -= std::log(product), product = 1;
            const Vector<T> inverse = T(-1) / sum;
            for (int64_t c = 0; c < width; c += LANES<T>) store<T>(h + c, load(h + c) * inverse);
            h[labels[r]] += 1;
        }
        return value;
    }
};

template <class T>
struct Chains {
    T *position, *momentum, *gradient, *weights;  // [chains, size]
    const T *scale, *offset, *stiffness;          // [size]
    T step_size, temperature;

    // From the sums of a step's shares: g, p += kick g, and, where there is a next step, z and w of it.
    void move(const Shape& shape, const std::vector<Worker<T>>& shares, T kick, bool end) const {
        std::vector<T> sum(*std::max_element(shape.units, shape.units + shape.layers + 1));
        for (int64_t chain = 0; chain < shape.chains; ++chain)
            for (size_t l = 0; l < shares[0].layers.size(); ++l) {
                const auto& layer = shares[0].layers[l];
                for (int64_t o = 0; o <= layer.out; ++o) {  // the weights of each unit, then all biases
                    const bool biases = o == layer.out;
                    const int64_t count = biases ? layer.out : layer.in;
                    const int64_t from = biases ? chain * layer.out_width : (chain * layer.out + o) * layer.in_width;
                    std::fill_n(sum.begin(), count, T(0));
                    for (const Worker<T>& share : shares) {
                        const auto& of_share = share.layers[l];
                        const T* summand = (biases ? of_share.bias_gradient : of_share.gradient).data() + from;
                        for (int64_t i = 0; i < count; ++i) sum[i] += summand[i];
                    }
                    move(chain * shape.size, layer.flat + o * layer.in, count, sum.data(), kick, end);
                }
            }
    }

    void move(int64_t chain, int64_t place, int64_t count, const T* sum, T kick, bool end) const {
        T *z = position + chain + place, *p = momentum + chain + place, *g = gradient + chain + place;
        for (int64_t i = 0; i < count; ++i) {
            g[i] = (sum[i] * scale[place + i] - stiffness[place + i] * z[i]) / temperature;
            p[i] += kick * g[i];
        }
        if (!end) drift(chain, place, count, step_size);
    }

    void drift(int64_t chain, int64_t place, int64_t count, T length) const {
        T *z = position + chain + place, *p = momentum + chain + place, *w = weights + chain + place;
        for (int64_t i = 0; i < count; ++i) {
            z[i] += length * p[i];
            w[i] = offset[place + i] + scale[place + i] * z[i];
        }
    }
};

// Threads take one share of the rows after the other. Whose thread computes a share does not matter to the sums, and
// nobody waits for a thread that has no share, so that others' programs on the machine do not stop this one.
struct Tickets {
    std::atomic<int64_t> next{0};  // step, and the next share of it
    std::atomic<int64_t> done{0};  // shares of this step that are computed
    static constexpr int64_t STEP = int64_t(1) << 32;
};

inline void wait_a_little(int& turns) {
    if (++turns > 1000) {
        std::this_thread::yield();
    } else {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
}

template <class T>
void follow(const Shape& shape, const T* x, const int64_t* labels, const Chains<T>& chains, double* likelihood, int threads) {
    const int64_t blocks = (shape.rows + BLOCK - 1) / BLOCK, steps = std::max<int64_t>(shape.steps, 1);
    const int64_t count = threads == 1 ? 1 : std::min<int64_t>(4 * threads, blocks);
    std::vector<Worker<T>> shares(count, Worker<T>(shape));
    Tickets tickets;
    tickets.next = count;  // none to be had yet

    auto take = [&](int64_t step) {  // a share of this step; false where none is left
        int64_t ticket = tickets.next.load(std::memory_order_acquire);
        if (ticket / Tickets::STEP != step || ticket % Tickets::STEP >= count) return false;
        if (!tickets.next.compare_exchange_strong(ticket, ticket + 1)) return true;
        const int64_t share = ticket % Tickets::STEP;
        const int64_t first = blocks * share / count * BLOCK;
        const int64_t last = std::min(shape.rows, blocks * (share + 1) / count * BLOCK);
        shares[share].read_weights(shape, chains.weights);
        shares[share].add_rows(shape, x, labels, first, last);
        tickets.done.fetch_add(1, std::memory_order_release);
        return true;
    };
    auto lead = [&] {
        for (int64_t chain = 0; chain < shape.chains; ++chain) {
            const int64_t at = chain * shape.size;
            if (shape.steps)
                for (int64_t i = at; i < at + shape.size; ++i)
                    chains.momentum[i] += chains.step_size / 2 * chains.gradient[i];
            chains.drift(at, 0, shape.size, shape.steps ? chains.step_size : T(0));
        }
        for (int64_t step = 1; step <= steps; ++step) {
            tickets.done = 0;
            tickets.next.store(step * Tickets::STEP, std::memory_order_release);
            while (take(step)) {}
            for (int turns = 0; tickets.done.load(std::memory_order_acquire) < count;) wait_a_little(turns);
            const bool end = step == steps;
            const T kick = !shape.steps ? T(0) : end ? chains.step_size / 2 : chains.step_size;
            chains.move(shape, shares, kick, end);
        }
        tickets.next.store((steps + 1) * Tickets::STEP, std::memory_order_release);
    };
    auto help = [&] {
        int turns = 0;
        for (int64_t step; (step = tickets.next.load(std::memory_order_acquire) / Tickets::STEP) <= steps;)
            if (take(step))
                turns = 0;
            else
                wait_a_little(turns);
    };
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
    {
        if (omp_get_thread_num() == 0)
            lead();
        else
            help();
    }
    for (int64_t chain = 0; chain < shape.chains; ++chain) {
        likelihood[chain] = 0;
        for (const Worker<T>& share : shares) likelihood[chain] += share.likelihood[chain];
    }
}

template <class T>
int trajectory(const int64_t* s, const double* numbers, void* const* at, double* likelihood, int threads) {
    Shape shape{s[0], s[1], s[2], s[3], s[4], s[5], s + 6, s + 7 + s[5]};
    auto tensor = [&](int i) { return static_cast<T*>(at[i]); };
    const T* x = tensor(0);
    const int64_t* labels = static_cast<const int64_t*>(at[1]);
    std::vector<T> weights(shape.chains * shape.size);
    Chains<T> chains{tensor(2), tensor(3), tensor(4), weights.data(), tensor(5), tensor(6), tensor(7), T(numbers[0]), T(numbers[1])};
    follow<T>(shape, x, labels, chains, likelihood, threads);
    return 0;
}

}  // namespace

extern "C" {
// Shape: rows, numbers of a row as it lies, chains, steps, coordinates, layers, units of inputs and layers, activations.
// Numbers: step size, temperature. Tensors: rows, labels, position, momentum, gradient (of the first step; of the last),
// scale, offset, stiffness. Without steps only the gradient is computed, where the chains are.
int caveat_trajectory_float(const int64_t* shape, const double* numbers, void* const* tensors, double* likelihood, int threads) {
    return trajectory<float>(shape, numbers, tensors, likelihood, threads);
}
int caveat_trajectory_double(const int64_t* shape, const double* numbers, void* const* tensors, double* likelihood, int threads) {
    return trajectory<double>(shape, numbers, tensors, likelihood, threads);
}
}
