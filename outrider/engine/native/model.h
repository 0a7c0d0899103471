// A decoder like Llama's or Gemma's: its packed weights, the activations of a step, and the step itself.
#pragma once

#include <algorithm>

#include "attention.h"
#include "branch.h"
#include "gemm.h"
#include "rows.h"
#include "threads.h"

namespace outrider {

// Sizes of a model; library.py fills it as NativeSpec.
struct Spec {
    int32_t num_layers, hidden, heads, kv_heads, head_size, intermediate, vocab;
    int32_t lm_head_rows;     // logits of a token
    int32_t paired;        // whether layer 0 reads a state of the caller's with each token's embedding (EAGLE-3)
    int32_t dtype;         // Kind of the embedding and of the cache
    int32_t weights;       // Kind of the linears
    int32_t num_threads;
    int32_t activation;    // Activation of the gates
    float epsilon;         // of every norm
    float attention_scale;
    float embedding_scale;
};

struct Layer {
    Matrix qkv, out, gate_up, down;
    std::vector<float> attention_norm, mlp_norm, query_norm, key_norm;
    std::vector<float> attention_out_norm, mlp_out_norm;  // of the outputs of both; empty, as query_norm, where there is none
    int32_t window = 0;  // keys a query sees, itself included; 0 for all
    int32_t rotary = 0;  // number of its rotary tables
};

struct Rotary {
    std::vector<float> cosine, sine;  // [context, head size / 2]
};

struct RowPlan {
    int32_t num_new, num_cached, num_logits, num_blocks;
    int32_t num_nodes;       // of the token tree that its last tokens are; 0 for a chain
    int32_t first_token;
    const int32_t* table;
    const int32_t* parents;  // [num_nodes]

    Tree tree() const { return {num_cached + num_new - num_nodes, parents}; }
};

// Attention of the tokens `from` to `to - 1` of a row in one key-value head. Their keys are divided into pieces: a span is
// one, and all spans with nodes of a tree are one together.
struct HeadWork {
    int32_t row, head, from, to;
    int32_t first, last;  // least and largest position of the tokens
    int32_t pieces;
    bool is_split;        // whether pieces are attended apart, and their partial results added in a later phase
    int64_t partials;     // index of the first of [spans][queries] partial results, when it is split

    int spans() const { return last / SPAN + 1; }
};

// A piece of the keys, or a token, of a work that is split; works are numbered.
struct WorkPart {
    int32_t work, part;
};

constexpr int FEW = 8;        // rows that each thread normalises for itself instead of waiting for another thread
constexpr int ROWS_AT_ONCE = 8;
constexpr int32_t NORMED = -1;  // the tap after the last norm

// A matrix of activations, with a stride between rows by which they do not share cache sets.
struct Rows {
    Memory memory;
    int64_t stride = 0;
    Kind kind = Kind::float32;

    void fit(int64_t rows, int64_t columns, Kind what) {
        kind = what;
        stride = round_up(columns, PIECE) + PIECE / element_bytes(what);
        const int64_t bytes = (rows * stride + PIECE) * element_bytes(kind);
        if (bytes > memory.bytes()) memory.resize(bytes + bytes / 4);
    }
    char* at(int64_t row, int64_t column = 0) const {
        return static_cast<char*>(memory.data()) + (row * stride + column) * element_bytes(kind);
    }
    float* floats(int64_t row, int64_t column = 0) const { return reinterpret_cast<float*>(at(row, column)); }
};

struct Scratch {
    Rows normal;                            // [FEW, hidden]
    alignas(64) float sums[MOST_ROWS * PIECE];
    Memory partials;                        // partial results of a whole work, and of one piece
    std::vector<Query> queries;
    std::vector<float> embedded;            // [padded hidden], when paired
    Branch branch;
};

class Model {
   public:
    Model(const Spec& spec, const int32_t* windows, const int32_t* rotaries)
        : spec(spec), layers(spec.num_layers), input(input_kind(static_cast<Kind>(spec.weights))),
          pool_(spec.num_threads), scratch_(pool_.num_threads()) {
        const Kind kind = static_cast<Kind>(spec.weights);
        const int64_t attention = spec.heads * spec.head_size;
        for (int i = 0; i < spec.num_layers; ++i) {
            Layer& layer = layers[i];
            layer.window = windows[i];
            layer.rotary = rotaries[i];
            if (layer.rotary >= static_cast<int32_t>(rotary.size())) rotary.resize(layer.rotary + 1);
            layer.qkv.shape(kind, attention + 2 * spec.kv_heads * spec.head_size,
                            spec.paired && i == 0 ? 2 * spec.hidden : spec.hidden);
            layer.out.shape(kind, spec.hidden, attention);
            layer.gate_up.shape(kind, round_up(spec.intermediate, PANEL) * 2, spec.hidden);
            layer.down.shape(kind, spec.hidden, spec.intermediate);
        }
        lm_head.shape(kind, spec.lm_head_rows, spec.hidden);
        for (auto& scratch : scratch_) {
            scratch.normal.fit(FEW, spec.hidden, input);
            scratch.embedded.assign(round_up(spec.hidden, PADDED), 0.0f);
            scratch.queries.resize(std::max(MOST_QUERIES, group()));  // threads allocate nothing in a step
        }
    }

    // Bytes of the packed matrices, without the small norms and rotary tables.
    int64_t weight_bytes() const {
        int64_t sum = lm_head.weights.bytes();
        for (const Layer& layer : layers)
            for (const Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
                sum += matrix->weights.bytes();
        return sum;
    }
    int group() const { return spec.heads / spec.kv_heads; }
    int padded_head() const { return static_cast<int>(round_up(spec.head_size, PADDED)); }

    // plan: token ids, then (new, cached, logits, blocks, nodes) of each row, then the rows' tables, then the nodes'
    // parents: indices among the row's nodes, -1 for the token before the tree.
    // features: [tokens][taps][padded hidden], null where nothing is tapped. read: [tokens][hidden], when paired.
    // Returns 0, or 1 + the index of a token id outside the vocabulary.
    int64_t forward(const int32_t* plan, int32_t num_tokens, int32_t num_rows, float* logits, float* features,
                    const float* read);

    const Spec spec;
    std::vector<Layer> layers;
    Matrix lm_head;
    std::vector<Rotary> rotary;
    std::vector<float> last_norm;                // [padded hidden], as the other norms of hidden states
    std::vector<float> read_norm;                // of the states that are read, when paired
    bool residual_normed = false;                // whether the residual has them after their norm
    const void* embedding = nullptr;             // [vocab, hidden], kept alive by library.py; null where it equals the head
    void* keys = nullptr;                        // [layers, blocks, ...], see Cache
    void* values = nullptr;
    int64_t num_blocks = 0;
    const Kind input;                            // kind of the products' inputs
    std::vector<int32_t> taps;                   // hidden states to copy into `features`, by the layer that reads them

   private:
    template <class KV> void run(int thread);
    template <class KV> void widen_token(int32_t token, float* out) const;
    template <class KV> void embed(int from, int to);
    template <class KV> void pair(int from, int to, Scratch& scratch);
    template <class KV> void prepare(int layer, const HeadWork& work);
    void gather(int layer, const HeadWork& work, int32_t from, int32_t to, Scratch& scratch);
    int32_t first_piece(int layer, const HeadWork& work) const;
    template <class KV> int attend_piece(int layer, const HeadWork& work, int32_t piece, Scratch& scratch, Partial to);
    template <class KV> void attend_work(int layer, const HeadWork& work, Scratch& scratch);
    template <class KV> void attend_part(int layer, const HeadWork& work, int32_t piece, Scratch& scratch);
    void add_pieces(int layer, const HeadWork& work, int32_t token, Scratch& scratch);
    template <class KV> int attention(int phase, int layer, Scratch& scratch);
    int num_copies(int32_t tap) const;
    void copy_tapped(int32_t tap, int32_t from);
    void read_plan(const int32_t* plan);
    void place_tree(const RowPlan& row);
    HeadWork head_work(int32_t row, int32_t head, int32_t from, int32_t to) const;
    int num_queries(const HeadWork& work) const { return (work.to - work.from) * group(); }
    Partial partial(const HeadWork& work, int32_t piece) const {
        const Partial all{static_cast<float*>(partials_.data()), padded_head()};
        return all.from(work.partials + static_cast<int64_t>(piece) * num_queries(work));
    }
    void split_heads();
    void share_heads();
    template <class Use>
    int linear(int phase, Scratch& scratch, const Matrix& matrix, const Rows& x, int64_t rows, Use use);
    template <class Use>
    int normed_linear(int phase, Scratch& scratch, const std::vector<float>& norm, const int32_t* tokens, int64_t rows,
                      const Matrix& matrix, Use use);
    int added_linear(int phase, Scratch& scratch, const Matrix& matrix, const Rows& x, const std::vector<float>& norm);

    template <class KV>
    Cache<KV> cache(int layer) const {
        const int64_t key_size = num_blocks * spec.kv_heads * spec.head_size * BLOCK;
        const int64_t value_size = num_blocks * spec.kv_heads * padded_head() * BLOCK;
        return {static_cast<const KV*>(keys) + layer * key_size, static_cast<const KV*>(values) + layer * value_size,
                spec.kv_heads, spec.head_size, padded_head()};
    }

    Pool pool_;
    std::vector<Scratch> scratch_;
    Rows hidden_, normal_, paired_, qkv_, mixed_, gated_, added_;
    // The running step.
    const int32_t* ids_ = nullptr;
    int32_t num_tokens_ = 0;
    std::vector<RowPlan> rows_;
    std::vector<int32_t> positions_, all_, wanted_;  // by token; token numbers
    std::vector<int32_t> depths_;                    // of a tree's nodes
    std::vector<HeadWork> works_;
    bool prepares_apart_ = false;                    // whether all heads are prepared before one is attended
    std::vector<int32_t> whole_;                     // works that one thread attends alone
    std::vector<WorkPart> pieces_, tokens_;          // of the works that are split
    Memory partials_;
    float *logits_ = nullptr, *features_ = nullptr;
    const float* read_ = nullptr;
};

}  // namespace outrider

#include "step.h"
