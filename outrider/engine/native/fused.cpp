// The C functions that library.py calls. The caller checks all sizes first.
#include "model.h"
#include "noise.h"

using outrider::Kind;
using outrider::Matrix;
using outrider::Model;
using outrider::Part;

namespace {

enum Which : int32_t { QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, LM_HEAD = 4 };
enum Vector : int32_t { ATTENTION_NORM = 0, MLP_NORM = 1, QUERY_NORM = 2, KEY_NORM = 3, LAST_NORM = 4, COSINE = 5, SINE = 6,
                        READ_NORM = 7, ATTENTION_OUT_NORM = 8, MLP_OUT_NORM = 9 };

Matrix& matrix_of(Model& model, int32_t layer, int32_t which) {
    switch (which) {
        case QKV: return model.layers[layer].qkv;
        case OUT: return model.layers[layer].out;
        case GATE_UP: return model.layers[layer].gate_up;
        case DOWN: return model.layers[layer].down;
        default: return model.lm_head;
    }
}

std::vector<float>& vector_of(Model& model, int32_t layer, int32_t which) {
    switch (which) {
        case ATTENTION_NORM: return model.layers[layer].attention_norm;
        case MLP_NORM: return model.layers[layer].mlp_norm;
        case QUERY_NORM: return model.layers[layer].query_norm;
        case KEY_NORM: return model.layers[layer].key_norm;
        case LAST_NORM: return model.last_norm;
        case COSINE: return model.rotary[model.layers[layer].rotary].cosine;
        case SINE: return model.rotary[model.layers[layer].rotary].sine;
        case ATTENTION_OUT_NORM: return model.layers[layer].attention_out_norm;
        case MLP_OUT_NORM: return model.layers[layer].mlp_out_norm;
        default: return model.read_norm;
    }
}

// Run f; return 0, or -1 when memory ran out.
template <class F>
int64_t guarded(F f) {
    try {
        return f();
    } catch (const std::exception&) {
        return -1;
    }
}

}  // namespace

extern "C" {

void* outrider_new(const outrider::Spec* spec, const int32_t* windows, const int32_t* rotaries) {
    try {
        return new Model(*spec, windows, rotaries);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void outrider_free(void* model) { delete static_cast<Model*>(model); }

// Pack source rows [rows, columns] of the matrix's kind, for int8 with a scale for each, into the outputs from `first` on.
int64_t outrider_pack(void* handle, int32_t layer, int32_t which, const void* source, const float* scales,
                      int64_t rows, int64_t columns, int64_t first, int32_t part_number) {
    return guarded([&] {
        Matrix& matrix = matrix_of(*static_cast<Model*>(handle), layer, which);
        const Part part = static_cast<Part>(part_number);
        switch (matrix.kind) {
            case Kind::float32:
                matrix.pack(static_cast<const float*>(source), scales, rows, columns, first, part);
                break;
            case Kind::bfloat16:
                matrix.pack(static_cast<const outrider::bf16*>(source), scales, rows, columns, first, part);
                break;
            case Kind::int8:
                matrix.pack(static_cast<const int8_t*>(source), scales, rows, columns, first, part);
                break;
        }
        return 0;
    });
}

int64_t outrider_bias(void* handle, int32_t layer, int32_t which, const float* source, int64_t rows, int64_t first,
                      int32_t part) {
    return guarded([&] {
        Matrix& matrix = matrix_of(*static_cast<Model*>(handle), layer, which);
        if (matrix.bias.empty()) matrix.bias.assign(matrix.outputs, 0.0f);
        for (int64_t r = 0; r < rows; ++r) matrix.bias[first + outrider::output_of(r, static_cast<Part>(part))] = source[r];
        return 0;
    });
}

int64_t outrider_vector(void* handle, int32_t layer, int32_t which, const float* source, int64_t count) {
    return guarded([&] {
        auto& vector = vector_of(*static_cast<Model*>(handle), layer, which);
        vector.assign(outrider::round_up(count, outrider::LANES), 0.0f);
        std::copy(source, source + count, vector.begin());
        return 0;
    });
}

int64_t outrider_weight_bytes(void* handle) { return static_cast<Model*>(handle)->weight_bytes(); }

// The caller keeps all three alive until the next call or the end.
void outrider_storage(void* handle, const void* embedding, void* keys, void* values, int64_t num_blocks) {
    Model& model = *static_cast<Model*>(handle);
    model.embedding = embedding;
    model.keys = keys;
    model.values = values;
    model.num_blocks = num_blocks;
}

// Set the hidden states that later forwards copy, by the layer that reads them; -1 for those after the last norm.
int64_t outrider_taps(void* handle, const int32_t* taps, int64_t count) {
    return guarded([&] {
        static_cast<Model*>(handle)->taps.assign(taps, taps + count);
        return 0;
    });
}

void outrider_residual(void* handle, int32_t normed) { static_cast<Model*>(handle)->residual_normed = normed; }

// Returns 0, 1 + the index of a token id outside the vocabulary, or -1 when memory ran out.
int64_t outrider_forward(void* handle, const int32_t* plan, int32_t num_tokens, int32_t num_rows, float* logits,
                         float* features, const float* read) {
    return guarded([&] {
        return static_cast<Model*>(handle)->forward(plan, num_tokens, num_rows, logits, features, read);
    });
}

// ids: n of them, or null for 0 .. n - 1.
void outrider_id_uniforms(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n, double* out) {
    outrider::id_uniforms(seed, position, purpose, ids, n, out);
}

int64_t outrider_may_win(uint64_t seed, uint32_t position, uint32_t purpose, const int64_t* ids, int64_t n,
                         const double* weights, int64_t* places) {
    return outrider::may_win(seed, position, purpose, ids, n, weights, places);
}

}  // extern "C"
