// One step of a GPT in float32 arithmetic: one or a few tokens per row in, logits out, K and V written
// to the cache's own storage. What `model.py` computes, in the same order; `engine/native/__init__.py`
// compiles this file, fills in the structs and says what it can serve.
//
// Notation: m tokens, H query heads of D, Hkv K/V heads of D (a latent is one of its own width), a part:
// a range of the keys of a token.
#include "slots.h"

#include "chunks.h"
#include "tokens.h"

// Queries `first` to first + n - 1 of a run.
struct Block { int64_t run, first, n; };

// How the tokens of a step attend to a slot: in blocks those of runs that attend together. The parts of
// another token i are first[i] .. first[i + 1] - 1, of at most `size` keys each.
struct Work {
    std::vector<Part> parts;
    std::vector<int64_t> first;
    std::vector<Block> blocks;
    std::vector<Ordered> ordered;  // of each run, if the slot is a ring
    int64_t size, most = 0;        // most: queries of a block

    Work(const Model& model, const Slot& slot, const Step& step, const std::vector<Run>& runs)
        : ordered(slot.ring ? runs.size() : 0) {
        int64_t total = 0, wanted = std::max<int64_t>(1, 4 * step.threads / slot.n_kv_head);
        std::vector<int64_t> n_keys(step.m);
        for (int64_t i = 0; i < step.m; i++) {
            n_keys[i] = step.positions[i] + 1;
            if (slot.ring) n_keys[i] = std::min(n_keys[i], slot.capacity);
        }
        for (size_t r = 0; r < runs.size(); r++) {
            const Run& run = runs[r];
            if (!together(slot, run.n)) continue;
            std::fill_n(n_keys.begin() + run.i, run.n, 0);
            const int64_t n = block_size(model.n_head / slot.n_kv_head, slot.n_kv_head, run.n, step.threads);
            for (int64_t a = (run.n - 1) / n * n; a >= 0; a -= n)  // the last first: they see the most keys
                blocks.push_back({(int64_t)r, a, std::min(n, run.n - a)});
            most = std::max(most, n);
        }
        for (int64_t n : n_keys) total += n;
        size = ((total + wanted - 1) / wanted + TILE - 1) / TILE * TILE;
        for (int64_t i = 0; i < step.m; i++) {
            first.push_back(parts.size());
            for (int64_t s = 0; s < n_keys[i]; s += size) parts.push_back({i, s, std::min(s + size, n_keys[i])});
        }
        first.push_back(parts.size());
    }
};

// -- the step -------------------------------------------------------------------------------------

static void add_row(const void* table, int32_t dtype, int64_t row, int64_t n, float* x) {
    for (int64_t i = 0; i < n; i++)
        x[i] += dtype == FLOAT32 ? ((const float*)table)[row * n + i]
                                 : from_bfloat16(((const uint16_t*)table)[row * n + i]);
}

// The same from an INT8 weight: see `int8_tile`
static void add_int8_row(const Linear& l, int64_t row, float* x) {
    const uint8_t* block = (const uint8_t*)l.weight + row / LANES * LANES * l.k;
    for (int64_t i = 0; i < l.k; i++)
        x[i] += (block[i / 4 * 64 + row % LANES * 4 + i % 4] - 128) * ((const float*)l.scale)[row];
}

struct Workspace {
    Buffer<float> x, h, y, qkv, gates, mlp, results, scale, to_latents, of_latents;
    Buffer<activation_t> values;
    Buffer<int32_t> sum;
    std::vector<Run> runs;
    std::vector<int64_t> run_of;  // each token: its run, or -1
    std::vector<int64_t> positions, rows, none;  // of the tokens of `trimmed`
    std::vector<int32_t> table;
};

// Multi-head latent attention scores latents c (S,) themselves: (q k_up) c = q (k_up c). Queries
// (m, H, D), `stride` apart -> (m, H, S).
static void queries_of_latents(const Model& model, const float* k_up, const float* q, int64_t stride, int64_t S,
                               int64_t m, float* y) {
    const int64_t D = model.head_dim, H = model.n_head;
    share(H, 1, [=](int64_t head) {
        for (int64_t i = 0; i < m; i++) {
            float* to = y + (i * H + head) * S;
            std::fill(to, to + S, 0.0f);
            for (int64_t d = 0; d < D; d++) {
                const float *row = k_up + (head * D + d) * S, factor = q[i * stride + head * D + d];
                for (int64_t c = 0; c < S; c++) to[c] += row[c] * factor;
            }
        }
    });
}

// Weighted sums of latents (m, H, S) -> of values (m, H, D).
static void values_of_latents(const Model& model, const float* v_up, const float* sums, int64_t S, int64_t m,
                              float* y) {
    const int64_t D = model.head_dim, H = model.n_head;
    share(H, 1, [=](int64_t head) {
        for (int64_t i = 0; i < m; i++) {
            const float* from = sums + (i * H + head) * S;
            for (int64_t d = 0; d < D; d++) {
                const float* row = v_up + (head * D + d) * S;
                float total = 0;
                #pragma omp simd reduction(+ : total)
                for (int64_t c = 0; c < S; c++) total += row[c] * from[c];
                y[(i * H + head) * D + d] = total;
            }
        }
    });
}

// The queries of a block, `stride` apart, -> y.
static void attend_run(const Model& model, const Layer& layer, const Step& step, const Work& work, const Run& run,
                       const Block& block, int64_t g, const float* q, int64_t stride, float* y, int64_t y_stride, ChunkRoom& room) {
    const Slot& slot = model.slots[layer.slot];
    const Ordered* ordered = slot.ring ? &work.ordered[block.run] : nullptr;
    const int32_t* table = ordered ? nullptr : slot.paged ? step.table + run.i * step.table_width : &run.row;
    const int64_t S = slot.head_dim, window = slot.ring ? slot.capacity : 0;
    const Chunk chunk{ordered ? ordered->slot : slot, q + run.i * stride, y + run.i * y_stride,
                      ordered ? &ordered->before : &step.positions[run.i], &run.n, table, layer.sink, 0, S, stride, 0, S, y_stride,
                      1, model.n_head, run.n, slot.paged ? step.table_width : 1, window, step.threads, 0};
    attend_block_of(slot)(chunk, 0, g, block.first, block.n, 1, room);
}

// K and V of an owner -> its slot, and for runs in a ring to where they are read.
static void store_keys(const Model& model, const Slot& slot, const Step& step, int64_t width, Work& work, Workspace& w) {
    const int64_t S = slot.head_dim, HD = model.n_head * model.head_dim, n_ordered = work.ordered.size();
    share(n_ordered, 1, [&](int64_t r) { work.ordered[r].begin(slot, w.runs[r], step.positions[w.runs[r].i]); });
    share(step.m, [&](int64_t i) {
        float* k = &w.qkv[i * width] + HD;
        const int64_t r = n_ordered ? w.run_of[i] : -1;
        if (r < 0) append(model, slot, place_of(slot, step, i, index_of(slot, step.positions[i])), k, k + slot.n_kv_head * S);
        else append(model, work.ordered[r].slot, {0, work.ordered[r].before + i - w.runs[r].i}, k, k + slot.n_kv_head * S);
    });
    share(n_ordered, 1, [&](int64_t r) { work.ordered[r].end(slot, w.runs[r], step.positions[w.runs[r].i]); });
}

// The queries of all tokens, in place, and an owner's K and V, which are stored.
static void queries_and_keys(const Model& model, const Layer& layer, const Step& step, Work& work, Workspace& w) {
    const Slot& slot = model.slots[layer.slot];
    const int64_t D = model.head_dim, S = slot.head_dim, HD = model.n_head * D, Hkv = slot.n_kv_head, width = layer.c_attn.n;
    Buffer<float> turned(std::max(S, D));  // of each thread
    share(step.m, [&](int64_t i) {
        float *q = &w.qkv[i * width], *k = q + HD;
        const float* cos = layer.cos ? layer.cos + step.positions[i] * D : nullptr;
        const float* sin = layer.sin ? layer.sin + step.positions[i] * D : nullptr;
        for (int64_t head = 0; head < model.n_head; head++) {
            norm_and_rotate(q + head * D, layer.q_norm, cos, sin, D, turned.data());
            for (int64_t d = 0; d < D; d++) q[head * D + d] /= std::sqrt((float)D);
        }
        for (int64_t g = 0; layer.owns && g < Hkv; g++)
            norm_and_rotate(k + g * S, layer.k_norm, cos, sin, S, turned.data());
    });
    if (layer.owns && slot.last_key)
        share(Hkv, [&](int64_t g) { offset_keys(slot, step, g, &w.qkv[HD], width); });
    if (layer.owns) store_keys(model, slot, step, width, work, w);
}

static void attention(const Model& model, const Layer& layer, const Step& step, const Work& work, Workspace& w) {
    const Slot& slot = model.slots[layer.slot];
    const int64_t D = model.head_dim, S = slot.head_dim, HD = model.n_head * D, Hkv = slot.n_kv_head;
    const int64_t width = layer.c_attn.n, group = model.n_head / Hkv, size = group * (padded(S) + 2);
    Buffer<char> scratch((group + TILE) * std::max(S, D) * sizeof(float));  // of each thread
    std::optional<ChunkRoom> room;
    if (work.most) room.emplace(group * work.most, slot);
    float* turned = (float*)scratch.data();
    const float* queries = w.qkv.data();
    int64_t stride = width;
    if (layer.k_up) {
        queries_of_latents(model, layer.k_up, queries, stride, S, step.m, w.to_latents.data());
        queries = w.to_latents.data(), stride = model.n_head * S;
    }
    float* y = layer.v_up ? w.of_latents.data() : w.y.data();
    const int64_t y_stride = layer.v_up ? stride : HD, n_blocks = work.blocks.size() * Hkv;
    share(n_blocks + work.parts.size() * Hkv, 1, [&](int64_t item) {
        if (item < n_blocks) {
            const Block& block = work.blocks[item / Hkv];
            return attend_run(model, layer, step, work, w.runs[block.run], block, item % Hkv, queries, stride, y, y_stride, *room);
        }
        item -= n_blocks;
        const Part& part = work.parts[item / Hkv];
        auto attend = slot.scaled() ? attend_part<int8_t>
                    : slot.dtype == BFLOAT16 ? attend_part<uint16_t> : attend_part<float>;
        attend(model, slot, step, part, item % Hkv, queries + part.i * stride + item % Hkv * group * S, &w.results[item * size],
               scratch.data());
    });
    share(step.m, [&](int64_t i) {
        float* row = y + i * y_stride;
        const int64_t first = work.first[i], n_parts = work.first[i + 1] - first;
        if (n_parts) join_parts(model, slot, layer.sink, &w.results[first * Hkv * size], n_parts, row);
        if (slot.k != slot.v || !layer.cos) return;
        for (int64_t head = 0; head < model.n_head; head++)  // V is rotated: rotate back
            norm_and_rotate(row + head * D, nullptr, layer.cos + step.positions[i] * D,
                            layer.sin + step.positions[i] * D, D, turned, -1);
    });
    if (layer.v_up) values_of_latents(model, layer.v_up, w.of_latents.data(), S, step.m, w.y.data());
}

// y (m, H, D): each head's result times the sigmoid of its gate
static void gate_heads(const Model& model, const float* gates, int64_t m, float* y) {
    const int64_t D = model.head_dim;
    share(m * model.n_head, [=](int64_t head) {
        const float factor = 1 / (1 + std::exp(-gates[head]));
        for (int64_t d = 0; d < D; d++) y[head * D + d] *= factor;
    });
}

// Only tokens whose logits are wanted are needed once all K and V are stored; each is the last of its row.
static Step trimmed(const Step& step, Workspace& w) {
    const int64_t n = step.n_wanted, pages = step.table_width;
    w.positions.resize(n), w.rows.resize(n), w.none.assign(n, 0), w.table.resize(n * pages);
    for (int64_t r = 0; r < n; r++) {
        const int64_t i = step.wanted[r];
        w.positions[r] = step.positions[i], w.rows[r] = step.rows[i];
        if (pages) std::copy_n(step.table + i * pages, pages, &w.table[r * pages]);
    }
    return {step.tokens, w.positions.data(), w.rows.data(), w.none.data(), step.wanted, w.table.data(), n, n, pages, step.threads,
            step.logits};
}

static void keep_rows(const Step& step, int64_t n, float* x) {
    for (int64_t r = 0; r < step.n_wanted; r++)
        if (step.wanted[r] != r) std::copy_n(x + step.wanted[r] * n, n, x + r * n);
}

static void norm_rows(const float* x, const float* gain, const float* bias, int64_t m, int64_t n,
                      float* y) {
    share(m, [=](int64_t i) { layer_norm(x + i * n, gain, bias, n, y + i * n); });
}

extern "C" void nanokv_decode(const Model* model_, const Step* step_) {
    const Model& model = *model_;
    const Step& step = *step_;
    const int64_t m = step.m, C = model.n_embd, HD = model.n_head * model.head_dim;
    static thread_local Workspace w;
    const Step last = trimmed(step, w);
    int64_t last_owner = 0;
    std::vector<Work> work, last_work;
    int64_t results = 0, latents = 0, qkv = 0, widest = std::max(C, HD);
    w.runs.clear();
    w.run_of.assign(m, -1);
    for (int64_t i = 0; i < m; i += step.later[i] + 1)
        if (const int64_t n = step.later[i] + 1; n > 1) {
            std::fill_n(w.run_of.begin() + i, n, w.runs.size());
            w.runs.push_back({i, n, (int32_t)step.rows[i]});
        }
    for (int64_t s = 0; s < model.n_slot; s++) {
        const Slot& slot = model.slots[s];
        work.emplace_back(model, slot, step, w.runs);
        last_work.emplace_back(model, slot, last, std::vector<Run>{});
        const int64_t parts = std::max(work.back().parts.size(), last_work.back().parts.size());
        results = std::max(results, parts * model.n_head * (padded(slot.head_dim) + 2));
    }
    for (int64_t l = 0; l < model.n_layer; l++) {
        const Layer& layer = model.layers[l];
        widest = std::max(widest, layer.c_fc.n), qkv = std::max(qkv, layer.c_attn.n);
        if (layer.owns) last_owner = l;
        if (layer.k_up) latents = model.n_head * model.slots[layer.slot].head_dim;
    }
    const Linear& linear = model.layers[0].c_fc;
    const int64_t most_groups = linear.dtype == INT4 ? widest / linear.group : 1;
    w.x.assign(m * C, 0);
    w.h.resize(m * C);
    w.y.resize(m * HD);
    w.qkv.resize(m * qkv);
    w.gates.resize(m * model.n_head);
    w.to_latents.resize(m * latents);
    w.of_latents.resize(m * latents);
    w.mlp.resize((m + LANES) * widest);
    w.results.resize(results);
    w.values.resize(4 * (m + LANES) * widest);
    w.scale.resize(m);
    w.sum.resize(m * most_groups);
    Int8Rows rows{w.values.data(), w.scale.data(), w.sum.data()};
    float *x = w.x.data(), *h = w.h.data();
    Workspace* shared = &w;  // thread_local: the other threads have one of their own

    in_parallel(step.threads, [&] {
        share(m, [&](int64_t i) {
            if (model.wte) add_row(model.wte, model.wte_dtype, step.tokens[i], C, x + i * C);
            else add_int8_row(model.lm_head, step.tokens[i], x + i * C);
            if (model.wpe) add_row(model.wpe, model.wpe_dtype, step.positions[i], C, x + i * C);
        });
        const Step* now = &step;
        for (int64_t l = 0; l < model.n_layer && now->m; l++) {
            const Layer& layer = model.layers[l];
            norm_rows(x, layer.ln_1, layer.ln_1_bias, now->m, C, h);
            matmul(layer.c_attn, h, now->m, shared->qkv.data(), STORE, rows);
            if (layer.gate.weight) matmul(layer.gate, h, now->m, shared->gates.data(), STORE, rows);
            queries_and_keys(model, layer, *now, work[layer.slot], *shared);
            if (l == last_owner && step.n_wanted < m) {
                share(3, 1, [&](int64_t k) {
                    if (k == 0) keep_rows(step, C, x);
                    if (k == 1) keep_rows(step, layer.c_attn.n, shared->qkv.data());
                    if (k == 2 && layer.gate.weight) keep_rows(step, model.n_head, shared->gates.data());
                });
                now = &last;
            }
            attention(model, layer, *now, (now == &step ? work : last_work)[layer.slot], *shared);
            if (layer.gate.weight) gate_heads(model, shared->gates.data(), now->m, shared->y.data());
            matmul(layer.attn_proj, shared->y.data(), now->m, x, ADD, rows);
            norm_rows(x, layer.ln_2, layer.ln_2_bias, now->m, C, h);
            mlp(layer.c_fc, layer.mlp_proj, h, now->m, shared->mlp.data(), x, model.activation, rows);
        }
        share(step.n_wanted, [&](int64_t r) {
            const int64_t row = now == &step ? step.wanted[r] : r;
            layer_norm(x + row * C, model.ln_f, model.ln_f_bias, C, h + r * C);
        });
        matmul(model.lm_head, h, step.n_wanted, step.logits, STORE, rows);
    });
}

extern "C" void nanokv_attend(const Chunk* chunk) {
    const Chunk& c = *chunk;
    const int64_t pairs = c.B * c.slot.n_kv_head, group = c.H / c.slot.n_kv_head;
    const int64_t size = block_size(group, pairs, c.t, c.threads), blocks = (c.t + size - 1) / size;
    const Slot& slot = c.slot;
    const auto attend = attend_block_of(slot);
    in_parallel(c.threads, [&] {
        ChunkRoom room(group * size, slot);
        share(blocks * pairs, 1, [&](int64_t item) {  // the last queries first: they see the most keys
            const int64_t first = (blocks - 1 - item / pairs) * size, b = item % pairs / slot.n_kv_head;
            const int64_t n = std::min(size, c.n[b] - first);
            if (n > 0) attend(c, b, item % slot.n_kv_head, first, n, 1 / std::sqrt((float)slot.head_dim), room);
        });
    });
}

// y (m, n) = x (m, k) @ weight.T + bias
extern "C" void nanokv_linear(const Linear* linear, const float* x, int64_t m, float* y, int64_t threads) {
    bool quantized = linear->dtype == INT8 || linear->dtype == INT4;
    Buffer<activation_t> values((quantized ? 1 : 4) * (m + LANES) * linear->k);
    Buffer<float> scale(m);
    Buffer<int32_t> sums(quantized ? m * linear->k / linear->group : 0);
    Int8Rows rows{values.data(), scale.data(), sums.data()};
    in_parallel(threads, [&] { matmul(*linear, x, m, y, STORE, rows); });
}

extern "C" int64_t nanokv_sizes(int64_t which) {  // of the structs, to compare with those in Python
    const int64_t sizes[] = {sizeof(Linear), sizeof(Slot), sizeof(Layer), sizeof(Model), sizeof(Step),
                             sizeof(Chunk)};
    return sizes[which];
}
