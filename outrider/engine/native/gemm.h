// One piece of a product: [rows, K] activations times 64 packed outputs.
//
// Every output element is one chain of additions over K from first to last, whatever the number of rows and whichever
// kernel does it. That is what makes a token's logits the same bits in every batch.
#pragma once

#include "matrix.h"

namespace outrider {

#if defined(__AVX512F__)
constexpr int WIDE_VECTORS = 2, WIDE_ROWS = 12;    // 24 accumulators of 32 registers
constexpr int NARROW_VECTORS = 4, NARROW_ROWS = 6;
#else
constexpr int WIDE_VECTORS = 1, WIDE_ROWS = 6;     // a vector is two registers of sixteen
constexpr int NARROW_VECTORS = 1, NARROW_ROWS = 6;
#endif
constexpr int MOST_ROWS = 10 * WIDE_ROWS;          // of a piece: activations stay in the second-level cache
constexpr int64_t MOST_INPUTS = 2048;              // between two stores of the sums: a panel does too
constexpr int AHEAD = 24;                          // steps of K to fetch ahead of a product that waits for memory

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

// sums[ROWS][64] (from `column`) (+)= x[ROWS][steps] times VECTORS vectors of weights, beginning at `first`; the upper
// half of four vectors comes from the panel at `second`.
template <class W, int ROWS, int VECTORS>
static void kernel(const W* first, const W* second, const typename Step<W>::Input* x, int64_t x_stride, int64_t steps,
                   float* sums, bool more) {
    using S = Step<W>;
    vf acc[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = more ? load(sums + r * PIECE + v * LANES) : splat(0.0f);
    for (int64_t k = 0; k < steps; ++k) {
        constexpr int half = VECTORS == 4 ? 2 : VECTORS;
        vf w[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            const W* panel = v < half ? first : second;
            w[v] = S::weights(panel + (k * PANEL + (v % half) * LANES) * S::inputs);
        }
        if (VECTORS == 4) {
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                const W* panel = v < half ? first : second;
                __builtin_prefetch(panel + ((k + AHEAD) * PANEL + (v % half) * LANES) * S::inputs, 0, 3);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            vf in = S::input(x + r * x_stride + k * S::inputs);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) acc[r][v] = S::add(acc[r][v], w[v], in);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) store(sums + r * PIECE + v * LANES, acc[r][v]);
}

template <class W, int ROWS, int VECTORS>
static void kernel_of(int rows, const W* first, const W* second, const typename Step<W>::Input* x, int64_t x_stride,
                      int64_t steps, float* sums, bool more) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) {
            kernel_of<W, ROWS - 1, VECTORS>(rows, first, second, x, x_stride, steps, sums, more);
            return;
        }
    }
    kernel<W, ROWS, VECTORS>(first, second, x, x_stride, steps, sums, more);
}

// sums [rows][64] of outputs 64 * piece on. `rows` is at most MOST_ROWS; x has x_stride elements a row.
template <class W>
static void multiply(const Matrix& matrix, int piece, const void* x_any, int64_t x_stride, int rows, float* sums) {
    using S = Step<W>;
    const auto* x = static_cast<const typename S::Input*>(x_any);
    const W* panels[2] = {reinterpret_cast<const W*>(matrix.panel(2 * piece)),
                          reinterpret_cast<const W*>(matrix.panel(2 * piece + 1))};
    const int64_t steps = matrix.inputs / S::inputs;
    if (rows <= NARROW_ROWS) {
        for (int v = 0; v < PIECE / LANES; v += NARROW_VECTORS)
            kernel_of<W, NARROW_ROWS, NARROW_VECTORS>(rows, panels[v / 2] + v % 2 * LANES * S::inputs, panels[1], x,
                                                      x_stride, steps, sums + v * LANES, false);
        return;
    }
    const int tiles = (rows + WIDE_ROWS - 1) / WIDE_ROWS;
    for (int64_t k = 0; k < steps; k += MOST_INPUTS / S::inputs) {
        const int64_t some = std::min<int64_t>(MOST_INPUTS / S::inputs, steps - k);
        for (int v = 0; v < PIECE / LANES; v += WIDE_VECTORS) {
            const W* weights = panels[v / 2] + (k * PANEL + v % 2 * LANES) * S::inputs;
            for (int tile = 0; tile < tiles; ++tile) {
                const int from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
                kernel_of<W, WIDE_ROWS, WIDE_VECTORS>(to - from, weights, weights, x + from * x_stride + k * S::inputs,
                                                      x_stride, some, sums + from * PIECE + v * LANES, k > 0);
            }
        }
    }
}

// With the scale and the bias.
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
