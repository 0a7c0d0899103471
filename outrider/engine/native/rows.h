// Functions of one token's row: normalise, rotate, gate.
#pragma once

#include "matrix.h"

namespace outrider {

// out = x / rms(x) * weight over `padded` columns, a multiple of 16, of which `columns` count and the rest are zero.
template <class Out>
static void rms_norm(const float* x, const float* weight, int64_t columns, int64_t padded, float epsilon, Out* out) {
    vf squares[2] = {splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 2 * LANES <= padded; i += 2 * LANES)
        for (int v = 0; v < 2; ++v) {
            vf part = load(x + i + v * LANES);
            squares[v] = fma(part, part, squares[v]);
        }
    for (; i < padded; i += LANES) squares[0] = fma(load(x + i), load(x + i), squares[0]);
    const vf factor = splat(1.0f / std::sqrt(sum(squares[0] + squares[1]) / static_cast<float>(columns) + epsilon));
    for (i = 0; i < padded; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

static void rms_norm(const float* x, const float* weight, int64_t columns, int64_t padded, float epsilon, Kind kind,
                     void* out) {
    if (kind == Kind::bfloat16) rms_norm(x, weight, columns, padded, epsilon, static_cast<bf16*>(out));
    else rms_norm(x, weight, columns, padded, epsilon, static_cast<float*>(out));
}

// Add a row, after its norm, to another of as many columns; x is changed.
static void add_normed(float* x, const float* weight, int64_t columns, int64_t padded, float epsilon, float* to) {
    rms_norm(x, weight, columns, padded, epsilon, x);
    for (int64_t i = 0; i < padded; i += LANES) store(to + i, load(to + i) + load(x + i));
}

// One head in place: an optional norm over its own columns, then rotation by halves, then times `factor`.
__attribute__((noinline)) static void rotate_head(float* head, int size, const float* norm, float epsilon,
                                                  const float* cosine, const float* sine, float factor) {
    if (norm != nullptr) {
        float squares = 0.0f;
        for (int i = 0; i < size; ++i) squares += head[i] * head[i];
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
        for (int i = 0; i < size; ++i) head[i] *= scale * norm[i];
    }
    const int half = size / 2;
    for (int i = 0; i < half; ++i) {
        const float low = head[i], high = head[i + half];
        head[i] = (low * cosine[i] - high * sine[i]) * factor;
        head[i + half] = (high * cosine[i] + low * sine[i]) * factor;
    }
}

enum class Activation : int32_t { silu = 0, gelu = 1 };

// activation(gate) * up of 32 neurons; a piece's sums hold the 32 gates first.
template <class Out>
static void gated(const float* sums, Activation activation, Out* out) {
    for (int v = 0; v < PANEL; v += LANES) {
        const vf gate = load(sums + v), up = load(sums + PANEL + v);
        store(out + v, (activation == Activation::gelu ? gelu(gate) : silu(gate)) * up);
    }
}

}  // namespace outrider
