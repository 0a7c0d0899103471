// Weights in the order in which the product reads them, and the memory they lie in.
//
// A panel is 32 outputs. Within it, float32 and int8 go [K][32]; bfloat16 goes [K / 2][32][2], the pairs that a dot
// product instruction takes. Two panels are a piece of work of 64 outputs. Padding is zero.
#pragma once

#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "vec.h"

namespace outrider {

constexpr int PANEL = 32;
constexpr int PIECE = 2 * PANEL;

enum class Kind : int32_t { float32 = 0, bfloat16 = 1, int8 = 2 };

static inline int64_t element_bytes(Kind kind) { return kind == Kind::float32 ? 4 : kind == Kind::bfloat16 ? 2 : 1; }

// The kind to which activations are rounded before a product with such weights.
static inline Kind input_kind(Kind weights) { return weights == Kind::bfloat16 ? Kind::bfloat16 : Kind::float32; }

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Pages of zeros, huge ones where the kernel has them: a forward reads all of them.
class Memory {
   public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
    ~Memory() { release(); }

    void* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

    // Replace the memory; its contents are lost. Throws bad_alloc.
    void resize(int64_t bytes) {
        release();
        const int64_t huge = 2 << 20;
        const int64_t wanted = round_up(bytes < 64 ? 64 : bytes, bytes >= huge ? huge : 64);
        if (posix_memalign(&data_, bytes >= huge ? huge : 64, wanted)) {
            data_ = nullptr;
            throw std::bad_alloc();
        }
        bytes_ = wanted;
#if defined(__linux__)
        if (bytes >= huge) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
        std::memset(data_, 0, bytes_);
    }

    // Have at least so many bytes; contents are lost where that takes new memory.
    void fit(int64_t bytes) {
        if (bytes > bytes_) resize(bytes);
    }

   private:
    void release() {
        std::free(data_);
        data_ = nullptr;
        bytes_ = 0;
    }

    void* data_ = nullptr;
    int64_t bytes_ = 0;
};

// Which outputs source rows become: consecutive ones, or every other panel, so that a piece has the gate and the up
// projection of the same 32 neurons.
enum class Part : int32_t { straight = 0, gate = 1, up = 2 };

static inline int64_t output_of(int64_t row, Part part) {
    if (part == Part::straight) return row;
    return row / PANEL * PIECE + row % PANEL + (part == Part::up ? PANEL : 0);
}

struct Matrix {
    Kind kind = Kind::float32;
    int64_t outputs = 0, inputs = 0;  // outputs padded to pieces, inputs to 2
    Memory weights;
    std::vector<float> scale, bias;  // [outputs], empty when there is none

    int num_pieces() const { return static_cast<int>(outputs / PIECE); }

    void shape(Kind what, int64_t num_outputs, int64_t num_inputs) {
        kind = what;
        outputs = round_up(num_outputs, PIECE);
        inputs = round_up(num_inputs, 2);
        weights.resize(outputs * inputs * element_bytes(kind));
        if (kind == Kind::int8) scale.assign(outputs, 0.0f);
    }

    const char* panel(int64_t index) const {
        return static_cast<const char*>(weights.data()) + index * PANEL * inputs * element_bytes(kind);
    }

    void set(int64_t output, int64_t input, float value) {
        char* base = const_cast<char*>(panel(output / PANEL));
        int64_t lane = output % PANEL;
        if (kind == Kind::float32) reinterpret_cast<float*>(base)[input * PANEL + lane] = value;
        else if (kind == Kind::int8) reinterpret_cast<int8_t*>(base)[input * PANEL + lane] = static_cast<int8_t>(value);
        else narrow(&reinterpret_cast<bf16*>(base)[(input / 2 * PANEL + lane) * 2 + input % 2], value);
    }

    // The weight as it was set, without its scale.
    float at(int64_t output, int64_t input) const {
        const char* base = panel(output / PANEL);
        const int64_t lane = output % PANEL;
        if (kind == Kind::float32) return reinterpret_cast<const float*>(base)[input * PANEL + lane];
        if (kind == Kind::int8) return reinterpret_cast<const int8_t*>(base)[input * PANEL + lane];
        return widen(reinterpret_cast<const bf16*>(base)[(input / 2 * PANEL + lane) * 2 + input % 2]);
    }

    // Rows of a [rows, columns] source to the outputs from `first` on. Integers are taken as they are; `scales` has one
    // for each row, by which its sum is multiplied in the end.
    template <class Source>
    void pack(const Source* source, const float* scales, int64_t rows, int64_t columns, int64_t first, Part part) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t output = first + output_of(r, part);
            for (int64_t c = 0; c < columns; ++c) set(output, c, widen(source[r * columns + c]));
            if (kind == Kind::int8) scale[output] = scales[r];
        }
    }
};

}  // namespace outrider
