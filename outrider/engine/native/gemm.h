// One piece of a product: [rows, K] activations times 64 packed outputs.
//
// Every output is one chain of additions over K from first to last, for any number of rows and in any kernel. So a token's
// logits have the same bits in every batch.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace outrider {

constexpr int VECTORS = 2;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;                   // 24 sums of 32 registers
#else
constexpr int TILE_ROWS = 6;                    // 12 of 16
#endif
constexpr int MOST_ROWS = 120;                  // of a piece, so that its activations stay in the second-level cache
constexpr int64_t MOST_INPUTS = 2048;           // between two stores of the sums, so that a panel's weights do, too
// Weights are fetched ahead into the second-level cache, this many steps over K. Measured in whole models, without it:
// on a Xeon 2 rows take 1.18 (float32) and 1.48 (bfloat16) times as long, 5 rows 1.34 and 1.60, and one row 1.00 and
// 1.20; on an EPYC 4 rows up to a twelfth less, 6 the same, 8 rows 1.06 and 20 rows 1.3 times as long.
constexpr int AHEAD = 48;

// What one step over K needs: the weights' lanes, the activations' scalars, a multiply-add.
template <class W>
struct Step {
    using Input = float;
    static constexpr int inputs = 1;
    static inline vf weights(const W* p) { return load(p); }
    static inline vf input(const float* p) { return splat(*p); }
    static inline vf add(vf acc, vf w, vf x) { return fma(w, x, acc); }
};

template <>
struct Step<bf16> {
    using Input = bf16;
    static constexpr int inputs = 2;
    static inline vf weights(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
    static inline vf input(const bf16* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return (vf)((vi){} + pair);
    }
    static inline vf add(vf acc, vf w, vf x) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
        const vi high = (vi){} + static_cast<int32_t>(0xffff0000);
        acc = fma((vf)((vi)w << 16), (vf)((vi)x << 16), acc);
        return fma((vf)((vi)w & high), (vf)((vi)x & high), acc);
#endif
    }
};

// sums[ROWS][64] (+)= x[ROWS][steps] times VECTORS vectors of weights.
template <class W, int ROWS, bool FETCH>
static void kernel(const W* weights, const typename Step<W>::Input* x, int64_t x_stride, int64_t steps, float* sums,
                   bool more) {
    using S = Step<W>;
    vf acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = more ? load(sums + r * PIECE + v * LANES) : splat(0.0f);
    for (int64_t k = 0; k < steps; ++k) {
        vf w[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            w[v] = S::weights(weights + (k * PANEL + v * LANES) * S::inputs);
            if (FETCH) __builtin_prefetch(weights + ((k + AHEAD) * PANEL + v * LANES) * S::inputs, 0, 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const vf in = S::input(x + r * x_stride + k * S::inputs);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) acc[r][v] = S::add(acc[r][v], w[v], in);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) store(sums + r * PIECE + v * LANES, acc[r][v]);
}

template <class W, int ROWS>
static void tile(int rows, bool fetch, const W* weights, const typename Step<W>::Input* x, int64_t x_stride,
                 int64_t steps, float* sums, bool more) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile<W, ROWS - 1>(rows, fetch, weights, x, x_stride, steps, sums, more);
    }
    if (fetch) kernel<W, ROWS, true>(weights, x, x_stride, steps, sums, more);
    else kernel<W, ROWS, false>(weights, x, x_stride, steps, sums, more);
}

// sums [rows][64] of the outputs from 64 * piece on. `rows` is at most MOST_ROWS; x has x_stride elements a row.
template <class W>
static void multiply(const Matrix& matrix, int piece, const void* x_any, int64_t x_stride, int rows, float* sums) {
    using S = Step<W>;
    const auto* x = static_cast<const typename S::Input*>(x_any);
    const int64_t steps = matrix.inputs / S::inputs;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t k = 0; k < steps; k += MOST_INPUTS) {
        const int64_t some = std::min(MOST_INPUTS, steps - k);
        for (int v = 0; v < PIECE / LANES; v += VECTORS) {
            const int column = v * LANES;
            const W* panel = reinterpret_cast<const W*>(matrix.panel(2 * piece + column / PANEL));
            const W* weights = panel + (k * PANEL + column % PANEL) * S::inputs;
            for (int t = 0; t < tiles; ++t) {
                const int from = rows * t / tiles, to = rows * (t + 1) / tiles;
                tile<W, TILE_ROWS>(to - from, t == 0, weights, x + from * x_stride + k * S::inputs, x_stride, some,
                                   sums + from * PIECE + column, k > 0);
            }
        }
    }
}

// Apply the scale and the bias.
static void product(const Matrix& matrix, int piece, const void* x, int64_t x_stride, int rows, float* sums) {
    if (matrix.kind == Kind::float32) multiply<float>(matrix, piece, x, x_stride, rows, sums);
    else if (matrix.kind == Kind::bfloat16) multiply<bf16>(matrix, piece, x, x_stride, rows, sums);
    else multiply<int8_t>(matrix, piece, x, x_stride, rows, sums);
    if (matrix.scale.empty() && matrix.bias.empty()) return;
    for (int v = 0; v < PIECE; v += LANES) {
        const vf scale = matrix.scale.empty() ? splat(1.0f) : load(matrix.scale.data() + piece * PIECE + v);
        const vf bias = matrix.bias.empty() ? splat(0.0f) : load(matrix.bias.data() + piece * PIECE + v);
        for (int r = 0; r < rows; ++r) store(sums + r * PIECE + v, fma(load(sums + r * PIECE + v), scale, bias));
    }
}

}  // namespace outrider
