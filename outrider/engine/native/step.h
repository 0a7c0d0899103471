// One forward: its phases in order, each divided into pieces that any thread may take. Part of model.h.
#pragma once

namespace outrider {

inline void Model::read_plan(const int32_t* plan) {
    ids_ = plan;
    const int32_t* numbers = plan + num_tokens_;
    const int32_t* table = numbers + 5 * rows_.size();
    positions_.resize(num_tokens_);
    all_.resize(num_tokens_);
    wanted_.clear();
    int32_t token = 0;
    for (auto& row : rows_) {
        row = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], token, table, nullptr};
        numbers += 5;
        table += row.num_blocks;
        for (int32_t i = 0; i < row.num_new; ++i, ++token) {
            all_[token] = token;
            positions_[token] = row.num_cached + i;
            if (i >= row.num_new - row.num_logits) wanted_.push_back(token);
        }
    }
    const int32_t* parents = table;
    for (auto& row : rows_) {
        if (row.num_nodes == 0) continue;
        row.parents = parents;
        parents += row.num_nodes;
        place_tree(row);
    }
}

// Set the positions of a row's nodes: start + depth, as in a chain that ends with the node.
inline void Model::place_tree(const RowPlan& row) {
    const int32_t start = row.tree().start, num_before = row.num_nodes - row.num_new;
    int32_t deepest = 0;
    depths_.resize(row.num_nodes);
    for (int32_t node = 0; node < row.num_nodes; ++node) {
        const int32_t parent = row.parents[node];
        depths_[node] = parent < 0 ? 0 : depths_[parent] + 1;
        deepest = std::max(deepest, depths_[node]);
        if (node >= num_before) positions_[row.first_token + node - num_before] = start + depths_[node];
    }
    const int64_t bytes = element_bytes(static_cast<Kind>(spec.dtype));
    for (auto& scratch : scratch_) scratch.branch.fit(start, deepest, spec.head_size, padded_head(), bytes);
}

inline HeadWork Model::head_work(int32_t row_number, int32_t head, int32_t from, int32_t to) const {
    const RowPlan& row = rows_[row_number];
    const auto [first, last] = std::minmax_element(positions_.begin() + row.first_token + from,
                                                   positions_.begin() + row.first_token + to);
    const int32_t pieces = (row.num_nodes ? row.tree().start / TILE * TILE : *last) / SPAN + 1;
    return {row_number, head, from, to, *first, *last, pieces, false, 0};
}

// Short rows are prepared and attended together, head by head. Where a row is long, all heads of all rows are prepared
// before one is attended.
inline void Model::split_heads() {
    const int32_t most = std::max(1, MOST_QUERIES / group());
    works_.clear();
    prepares_apart_ = false;
    for (int32_t r = 0; r < static_cast<int32_t>(rows_.size()); ++r) {
        prepares_apart_ = prepares_apart_ || rows_[r].num_new > most;
        for (int32_t from = 0; from < rows_[r].num_new; from += most)
            for (int32_t head = 0; head < spec.kv_heads; ++head)
                works_.push_back(head_work(r, head, from, std::min(from + most, rows_[r].num_new)));
    }
}

// Split each work that is more than half of a thread's share. The results have the same bits either way.
inline void Model::share_heads() {
    int64_t pieces = 0, partials = 0, most = 0;
    for (const HeadWork& work : works_) pieces += work.pieces;
    whole_.clear();
    pieces_.clear();
    tokens_.clear();
    for (int32_t w = 0; w < static_cast<int32_t>(works_.size()); ++w) {
        HeadWork& work = works_[w];
        work.is_split = pool_.num_threads() > 1 && work.pieces > 1 && 2 * pool_.num_threads() * work.pieces > pieces;
        if (!work.is_split) {
            whole_.push_back(w);
            most = std::max<int64_t>(most, (work.spans() - work.pieces + 2) * num_queries(work));
            continue;
        }
        prepares_apart_ = true;
        work.partials = partials;
        partials += work.spans() * num_queries(work);
        for (int32_t piece = 0; piece < work.pieces; ++piece) pieces_.push_back({w, piece});
        for (int32_t token = work.from; token < work.to; ++token) tokens_.push_back({w, token});
    }
    partials_.fit(Partial::bytes(partials, padded_head()));
    for (Scratch& scratch : scratch_) scratch.partials.fit(Partial::bytes(most, padded_head()));
}

inline int64_t Model::forward(const int32_t* plan, int32_t num_tokens, int32_t num_rows, float* logits,
                              float* features, const float* read) {
    for (int32_t i = 0; i < num_tokens; ++i)
        if (plan[i] < 0 || plan[i] >= spec.vocab) return 1 + i;
    num_tokens_ = num_tokens;
    rows_.resize(num_rows);
    logits_ = logits;
    features_ = features;
    read_ = read;
    read_plan(plan);
    split_heads();
    share_heads();
    const int64_t attention = spec.heads * spec.head_size;
    hidden_.fit(num_tokens, spec.hidden, Kind::float32);
    normal_.fit(num_tokens, spec.hidden, input);
    if (spec.paired) paired_.fit(num_tokens, 2 * spec.hidden, input);
    qkv_.fit(num_tokens, attention + 2 * spec.kv_heads * spec.head_size, Kind::float32);
    mixed_.fit(num_tokens, attention, input);
    gated_.fit(num_tokens, round_up(spec.intermediate, PANEL), input);
    if (!layers[0].mlp_out_norm.empty()) added_.fit(num_tokens, spec.hidden, Kind::float32);
    auto job = [this](int thread) {
        if (static_cast<Kind>(spec.dtype) == Kind::bfloat16) run<bf16>(thread);
        else run<float>(thread);
    };
    pool_.run(1 + 11 * spec.num_layers + 3, job);
    return 0;
}

template <class KV>
void Model::widen_token(int32_t token, float* out) const {
    const int64_t id = ids_[token];
    const KV* source = static_cast<const KV*>(embedding) + id * spec.hidden;
    for (int i = 0; i < spec.hidden; ++i)
        out[i] = (embedding == nullptr ? lm_head.at(id, i) : widen(source[i])) * spec.embedding_scale;
}

template <class KV>
void Model::embed(int from, int to) {
    for (int token = from; token < to; ++token) {
        float* x = hidden_.floats(token);
        widen_token<KV>(token, x);
        for (int64_t i = spec.hidden; i < hidden_.stride; ++i) x[i] = 0.0f;
    }
}

// The residual is the states that are read, not the embeddings; layer 0 reads both, after their norms, side by side.
template <class KV>
void Model::pair(int from, int to, Scratch& scratch) {
    const int64_t padded = round_up(spec.hidden, LANES);
    for (int token = from; token < to; ++token) {
        float *x = hidden_.floats(token), *embedded = scratch.embedded.data();
        std::memcpy(x, read_ + static_cast<int64_t>(token) * spec.hidden, spec.hidden * sizeof(float));
        for (int64_t i = spec.hidden; i < hidden_.stride; ++i) x[i] = 0.0f;
        widen_token<KV>(token, embedded);
        rms_norm(embedded, layers[0].attention_norm.data(), spec.hidden, padded, spec.epsilon, input, paired_.at(token));
        rms_norm(x, read_norm.data(), spec.hidden, padded, spec.epsilon, input, paired_.at(token, spec.hidden));
        if (residual_normed) rms_norm(x, read_norm.data(), spec.hidden, padded, spec.epsilon, x);
    }
}

// Compute a product; use(row, piece, sums [64]) is called for each part of it. Returns the next phase.
template <class Use>
int Model::linear(int phase, Scratch& scratch, const Matrix& matrix, const Rows& x, int64_t rows, Use use) {
    const int blocks = static_cast<int>((rows + MOST_ROWS - 1) / MOST_ROWS), pieces = matrix.num_pieces();
    pool_.phase(phase, blocks * pieces, [&](int i) {
        const int64_t block = i / pieces, from = rows * block / blocks, to = rows * (block + 1) / blocks;
        product(matrix, i % pieces, x.at(from), x.stride, static_cast<int>(to - from), scratch.sums);
        for (int64_t row = from; row < to; ++row) use(row, i % pieces, scratch.sums + (row - from) * PIECE);
    });
    return phase + 1;
}

template <class Use>
int Model::normed_linear(int phase, Scratch& scratch, const std::vector<float>& norm, const int32_t* tokens,
                         int64_t rows, const Matrix& matrix, Use use) {
    const int64_t padded = round_up(spec.hidden, LANES);
    auto normalise = [&](const Rows& out, int64_t row) {
        rms_norm(hidden_.floats(tokens[row]), norm.data(), spec.hidden, padded, spec.epsilon, input, out.at(row));
    };
    if (rows <= FEW) {
        for (int64_t row = 0; row < rows; ++row) normalise(scratch.normal, row);
        return linear(phase + 1, scratch, matrix, scratch.normal, rows, use);
    }
    pool_.phase(phase, static_cast<int>((rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE), [&](int i) {
        const int64_t end = std::min<int64_t>(rows, (i + 1) * ROWS_AT_ONCE);
        for (int64_t row = i * ROWS_AT_ONCE; row < end; ++row) normalise(normal_, row);
    });
    return linear(phase + 1, scratch, matrix, normal_, rows, use);
}

// Add a product to the hidden states, after its norm where there is one: then all of it has to be computed first.
inline int Model::added_linear(int phase, Scratch& scratch, const Matrix& matrix, const Rows& x,
                               const std::vector<float>& norm) {
    if (norm.empty())
        return linear(phase, scratch, matrix, x, num_tokens_, [&](int64_t row, int piece, const float* sums) {
            float* to = hidden_.floats(row, static_cast<int64_t>(piece) * PIECE);
            for (int v = 0; v < PIECE; v += LANES) store(to + v, load(to + v) + load(sums + v));
        });
    phase = linear(phase, scratch, matrix, x, num_tokens_, [&](int64_t row, int piece, const float* sums) {
        std::memcpy(added_.floats(row, static_cast<int64_t>(piece) * PIECE), sums, PIECE * sizeof(float));
    });
    pool_.phase(phase, num_tokens_, [&](int row) {
        add_normed(added_.floats(row), norm.data(), spec.hidden, round_up(spec.hidden, LANES), spec.epsilon,
                   hidden_.floats(row));
    });
    return phase + 1;
}

// Rotate the heads of a piece of work, and write its keys and values into the cache.
template <class KV>
void Model::prepare(int layer_index, const HeadWork& work) {
    const Layer& layer = layers[layer_index];
    const Rotary& tables = rotary[layer.rotary];
    const RowPlan& row = rows_[work.row];
    const Cache<KV> store_to = cache<KV>(layer_index);
    const int size = spec.head_size, padded = padded_head(), queries = group();
    const float* query_norm = layer.query_norm.empty() ? nullptr : layer.query_norm.data();
    const float* key_norm = layer.key_norm.empty() ? nullptr : layer.key_norm.data();
    for (int32_t i = work.from; i < work.to; ++i) {
        const int32_t token = row.first_token + i, position = positions_[token], place = row.num_cached + i;
        const float* cosines = tables.cosine.data() + static_cast<int64_t>(position) * (size / 2);
        const float* sines = tables.sine.data() + static_cast<int64_t>(position) * (size / 2);
        float* heads = qkv_.floats(token, static_cast<int64_t>(work.head) * queries * size);
        for (int g = 0; g < queries; ++g)
            rotate_head(heads + g * size, size, query_norm, spec.epsilon, cosines, sines,
                        spec.attention_scale * LOG2_E);
        float* key = qkv_.floats(token, static_cast<int64_t>(spec.heads + work.head) * size);
        rotate_head(key, size, key_norm, spec.epsilon, cosines, sines, 1.0f);
        const float* value = qkv_.floats(token, static_cast<int64_t>(spec.heads + spec.kv_heads + work.head) * size);
        const int32_t block = row.table[place / BLOCK], slot = place % BLOCK;
        KV* keys_at = const_cast<KV*>(store_to.key_block(block, work.head)) + slot;
        KV* values_at = const_cast<KV*>(store_to.value_block(block, work.head)) + slot * padded;
        for (int d = 0; d < size; ++d) narrow(keys_at + d * BLOCK, key[d]);
        for (int d = 0; d < size; ++d) narrow(values_at + d, value[d]);
        for (int d = size; d < padded; ++d) narrow(values_at + d, 0.0f);
    }
}

// Collect the queries of the tokens `from` to `to - 1` of the work's row and head.
inline void Model::gather(int layer_index, const HeadWork& work, int32_t from, int32_t to, Scratch& scratch) {
    const int32_t window = layers[layer_index].window;
    int count = 0;
    for (int32_t i = from; i < to; ++i) {
        const int32_t token = rows_[work.row].first_token + i, position = positions_[token];
        for (int g = 0; g < group(); ++g) {
            const int64_t column = (static_cast<int64_t>(work.head) * group() + g) * spec.head_size;
            scratch.queries[count++] = {qkv_.floats(token, column), position,
                                        window ? std::max(0, position - window + 1) : 0, mixed_.at(token, column)};
        }
    }
}

// The first piece with a key that one of the work's queries sees.
inline int32_t Model::first_piece(int layer, const HeadWork& work) const {
    const int32_t window = layers[layer].window;
    return window ? std::min(std::max(0, work.first - window + 1) / SPAN, work.pieces - 1) : 0;
}

// Attend with all of the work's queries, gathered before, over a piece; `to` gets a partial result for each span. Returns
// the number of spans.
template <class KV>
int Model::attend_piece(int layer, const HeadWork& work, int32_t piece, Scratch& scratch, Partial to) {
    const RowPlan& row = rows_[work.row];
    const Keys<KV> keys{cache<KV>(layer), work.head, row.table, work.last};
    const bool is_last = piece + 1 == work.pieces;
    const int spans = is_last ? work.spans() - piece : 1, count = num_queries(work);
    to.clear(spans * count);
    if (is_last && row.num_nodes)
        attend_tree(keys, row.tree(), row.num_nodes - row.num_new + work.from, scratch.queries.data(), count, group(),
                    scratch.branch, to);
    else
        attend_tiles(keys, piece * SPAN, (piece + 1) * SPAN, scratch.queries.data(), count, to);
    return spans;
}

template <class KV>
void Model::attend_work(int layer, const HeadWork& work, Scratch& scratch) {
    const int count = num_queries(work);
    const Partial whole{static_cast<float*>(scratch.partials.data()), padded_head()}, next = whole.from(count);
    const int32_t first = first_piece(layer, work);
    gather(layer, work, work.from, work.to, scratch);
    for (int32_t piece = first; piece < work.pieces; ++piece) {
        const int is_first = piece == first, spans = attend_piece<KV>(layer, work, piece, scratch, is_first ? whole : next);
        for (int span = 0; span < spans - is_first; ++span)
            whole.add(next.from(static_cast<int64_t>(span) * count), count);
    }
    finish(scratch.queries.data(), count, spec.head_size, whole, input);
}

template <class KV>
void Model::attend_part(int layer, const HeadWork& work, int32_t piece, Scratch& scratch) {
    if (piece < first_piece(layer, work)) return;
    gather(layer, work, work.from, work.to, scratch);
    attend_piece<KV>(layer, work, piece, scratch, partial(work, piece));
}

// Add the partial results of a token's queries over all pieces of a split work, and write the output.
inline void Model::add_pieces(int layer, const HeadWork& work, int32_t token, Scratch& scratch) {
    const int32_t first = first_piece(layer, work);
    const int64_t number = static_cast<int64_t>(token - work.from) * group();
    const Partial whole = partial(work, first).from(number);
    for (int32_t span = first + 1; span < work.spans(); ++span) whole.add(partial(work, span).from(number), group());
    gather(layer, work, token, token + 1, scratch);
    finish(scratch.queries.data(), group(), spec.head_size, whole, input);
}

// Number of pieces, of ROWS_AT_ONCE tokens each, in which a tapped state is copied; 0 where it is not tapped.
inline int Model::num_copies(int32_t tap) const {
    const bool tapped = std::find(taps.begin(), taps.end(), tap) != taps.end();
    return tapped ? (num_tokens_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE : 0;
}

// Copy hidden states into `features`, in a phase that does not change them.
inline void Model::copy_tapped(int32_t tap, int32_t from) {
    const int64_t padded = round_up(spec.hidden, PADDED), count = static_cast<int64_t>(taps.size());
    for (int32_t token = from; token < std::min(num_tokens_, from + ROWS_AT_ONCE); ++token)
        for (int64_t i = 0; i < count; ++i) {
            float* out = features_ + (token * count + i) * padded;
            if (taps[i] != tap) continue;
            if (tap == NORMED) rms_norm(hidden_.floats(token), last_norm.data(), spec.hidden,
                                        round_up(spec.hidden, LANES), spec.epsilon, out);
            else std::memcpy(out, hidden_.floats(token), padded * sizeof(float));
        }
}

template <class KV>
int Model::attention(int phase, int layer, Scratch& scratch) {
    const int wholes = static_cast<int>(whole_.size()), pieces = static_cast<int>(pieces_.size());
    pool_.phase(phase, prepares_apart_ ? static_cast<int>(works_.size()) : 0,
                [&](int i) { prepare<KV>(layer, works_[i]); });
    pool_.phase(phase + 1, wholes + pieces + num_copies(layer), [&](int i) {
        if (i >= wholes + pieces) return copy_tapped(layer, (i - wholes - pieces) * ROWS_AT_ONCE);
        if (i >= wholes) {
            const WorkPart& part = pieces_[i - wholes];
            return attend_part<KV>(layer, works_[part.work], part.part, scratch);
        }
        const HeadWork& work = works_[whole_[i]];
        if (!prepares_apart_) prepare<KV>(layer, work);
        attend_work<KV>(layer, work, scratch);
    });
    pool_.phase(phase + 2, static_cast<int>(tokens_.size()), [&](int i) {
        add_pieces(layer, works_[tokens_[i].work], tokens_[i].part, scratch);
    });
    return phase + 3;
}

template <class KV>
void Model::run(int thread) {
    Scratch& scratch = scratch_[thread];
    const Activation activation = static_cast<Activation>(spec.activation);
    auto keep_qkv = [&](int64_t row, int piece, const float* sums) {
        std::memcpy(qkv_.floats(row, static_cast<int64_t>(piece) * PIECE), sums, PIECE * sizeof(float));
    };
    auto keep_gated = [&](int64_t row, int piece, const float* sums) {
        char* out = gated_.at(row, static_cast<int64_t>(piece) * PANEL);
        if (input == Kind::bfloat16) gated(sums, activation, reinterpret_cast<bf16*>(out));
        else gated(sums, activation, reinterpret_cast<float*>(out));
    };
    auto keep_logits = [&](int64_t row, int piece, const float* sums) {
        const int64_t first = static_cast<int64_t>(piece) * PIECE, left = std::min<int64_t>(PIECE, spec.lm_head_rows - first);
        if (left > 0) std::memcpy(logits_ + row * spec.lm_head_rows + first, sums, left * sizeof(float));
    };
    const int64_t rows = num_tokens_;
    pool_.phase(0, (num_tokens_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int i) {
        const int from = i * ROWS_AT_ONCE, to = std::min(num_tokens_, (i + 1) * ROWS_AT_ONCE);
        if (spec.paired) pair<KV>(from, to, scratch);
        else embed<KV>(from, to);
    });
    int phase = 1;
    for (int i = 0; i < spec.num_layers; ++i) {
        const Layer& layer = layers[i];
        if (spec.paired && i == 0) phase = linear(phase + 1, scratch, layer.qkv, paired_, rows, keep_qkv);
        else phase = normed_linear(phase, scratch, layer.attention_norm, all_.data(), rows, layer.qkv, keep_qkv);
        phase = attention<KV>(phase, i, scratch);
        phase = added_linear(phase, scratch, layer.out, mixed_, layer.attention_out_norm);
        phase = normed_linear(phase, scratch, layer.mlp_norm, all_.data(), rows, layer.gate_up, keep_gated);
        phase = added_linear(phase, scratch, layer.down, gated_, layer.mlp_out_norm);
    }
    const int copies = num_copies(spec.num_layers);
    pool_.phase(phase++, copies + num_copies(NORMED), [&](int i) {
        if (i < copies) copy_tapped(spec.num_layers, i * ROWS_AT_ONCE);
        else copy_tapped(NORMED, (i - copies) * ROWS_AT_ONCE);
    });
    normed_linear(phase, scratch, last_norm, wanted_.data(), static_cast<int64_t>(wanted_.size()), lm_head, keep_logits);
}

}  // namespace outrider
