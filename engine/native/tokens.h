// Attention of one token over the keys of its row, in parts that threads share, where they are stored.
// Included by decode.cpp.
#pragma once

// Keys `start` to `end` - 1 of token i, by their index in its row's storage.
struct Part { int64_t i, start, end; };

// Keys as stored: K transposed, (D, stride), or like V, (n, D).
template <typename T>
struct Tile {
    const T *k, *v;
    bool transposed;
    int64_t stride, n;
    const half_t *k_scale, *v_scale;  // INT8, INT4: (n,)
};

// Where n keys from `place` on lie.
template <typename T>
static Tile<T> stored_tile(const Slot& slot, Place place, int64_t head, int64_t n, int64_t D) {
    const int64_t start = head * slot.capacity, first = start + place.index;
    const T* k = (const T*)slot.k + (slot.transposed ? start * D + place.index : first * D);
    return {k, (const T*)slot.v + first * D, slot.transposed != 0, slot.capacity, n, slot.scaled() ? slot.k_scale + first : nullptr,
            slot.scaled() ? slot.v_scale + first : nullptr};
}

// The same with room for TILE keys. K that ends before, or is not stored transposed, is copied to
// `copy` (D, TILE), zeros behind; INT4 is unpacked there (what lies behind is masked), and V after it.
template <typename T>
static Tile<T> read_tile(const Slot& slot, Place place, int64_t head, int64_t n, int64_t D, T* copy) {
    Tile<T> tile = stored_tile<T>(slot, place, head, n, D);
    if (slot.transposed && place.index + TILE <= slot.capacity) return tile;  // the rest is masked
    if constexpr (sizeof(T) == 1)
        if (slot.dtype == INT4) {
            const int64_t first = head * slot.capacity + place.index;
            int8_t* values = copy + TILE * D;
            for (int64_t s = 0; s < n; s++) {
                unpack(slot.k, first + s, D, copy + s, TILE);
                unpack(slot.v, first + s, D, values + s * D, 1);
            }
            return {copy, values, true, TILE, n, tile.k_scale, tile.v_scale};
        }
    for (int64_t d = 0; d < D; d++) {
        if (slot.transposed) memcpy(copy + d * TILE, tile.k + d * slot.capacity, n * sizeof(T));
        else for (int64_t s = 0; s < n; s++) copy[d * TILE + s] = tile.k[s * D + d];
        memset(copy + d * TILE + n, 0, (TILE - n) * sizeof(T));
    }
    tile.k = copy, tile.stride = TILE, tile.transposed = true;
    return tile;
}

// Start to fetch a tile: in a row's storage K's lines lie far apart, which the processor does not
// foresee.
template <typename T>
static void prefetch_tile(const Slot& slot, Place place, int64_t head, int64_t D) {
    if (slot.dtype == INT4) return;
    const int64_t start = head * slot.capacity, n = std::min(TILE, slot.capacity - place.index);
    const char* v = (const char*)((const T*)slot.v + (start + place.index) * D);
    for (int64_t byte = 0; byte < n * D * (int64_t)sizeof(T); byte += 64)
        __builtin_prefetch(v + byte, 0, 2);
    if (!slot.transposed) return;
    const T* k = (const T*)slot.k + start * D + place.index;
    for (int64_t d = 0; d < D; d++, k += slot.capacity)
        for (int64_t byte = 63; byte < n * (int64_t)sizeof(T) + 63; byte += 64)
            __builtin_prefetch((const char*)k + byte, 0, 2);
}

// Vectors of sums for each of n queries: as many as there are registers for
constexpr int columns_at_once(int n) { return WIDE ? 4 : n > 2 ? 1 : 4 / n; }

// scores (N, TILE) of N queries, q (D, N): each key is loaded once for all of them
template <int N, typename T>
static void tile_scores(const float* q, const Tile<T>& tile, int64_t D, float* scores) {
    constexpr int J = columns_at_once(N);
    for (int64_t first = 0; first < TILE; first += J * LANES) {
        f16x acc[N][J] = {};
        const T* k = tile.k + first;
        for (int64_t d = 0; d < D; d++, k += tile.stride) {
            f16x keys[J];
            for (int j = 0; j < J; j++) keys[j] = load(k + j * LANES);
            for (int h = 0; h < N; h++)
                for (int j = 0; j < J; j++) acc[h][j] += keys[j] * q[d * N + h];
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < J; j++) store(scores + h * TILE + first + j * LANES, acc[h][j]);
    }
}

// scores (n,) of one query: K is read from its beginning to its end, the order that memory is fastest
// in. Where a group of queries shares K, `tile_scores` does more with a key once it is there.
template <typename T>
static void long_scores(const float* q, const Tile<T>& tile, int64_t D, float* scores) {
    constexpr int ROWS = 8;
    if (!tile.transposed) {
        for (int64_t s = 0; s < tile.n; s++) {
            const T* k = tile.k + s * D;
            f16x acc{};
            int64_t d = 0;
            for (; d + LANES <= D; d += LANES) acc += load(k + d) * load(q + d);
            if (d < D) acc += load_half(k + d) * load_half(q + d);
            scores[s] = sum(acc);
        }
        return;
    }
    memset(scores, 0, sizeof(float) * tile.n);
    for (int64_t d = 0; d < D; d += ROWS) {
        const T* k = tile.k + d * tile.stride;
        int64_t s = 0;
        for (; s + LANES <= tile.n; s += LANES) {
            f16x acc = load(scores + s);
            for (int j = 0; j < ROWS; j++) acc += load(k + j * tile.stride + s) * q[d + j];
            store(scores + s, acc);
        }
        for (; s < tile.n; s++)
            for (int j = 0; j < ROWS; j++) scores[s] += to_float(k[j * tile.stride + s]) * q[d + j];
    }
}

// out (N, width) += weights (N, SIZE) @ v (n, D), of J * 16 columns from d on (the last may be 8)
template <int N, int J, int64_t SIZE, typename T>
static void add_values(const float* weights, const T* v, int64_t n, int64_t D, int64_t d, int64_t width,
                       float* out) {
    const bool whole = d + J * LANES <= D;
    f16x acc[N][J];
    for (int h = 0; h < N; h++)
        for (int j = 0; j < J; j++) acc[h][j] = load(out + h * width + d + j * LANES);
    for (int64_t s = 0; s < n; s++) {
        f16x values[J];
        for (int j = 0; j < J; j++) {
            const T* from = v + s * D + d + j * LANES;
            values[j] = whole ? load(from) : load_half(from);
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < J; j++) acc[h][j] += values[j] * weights[h * SIZE + s];
    }
    for (int h = 0; h < N; h++)
        for (int j = 0; j < J; j++) store(out + h * width + d + j * LANES, acc[h][j]);
}

// N query heads over one tile of up to SIZE keys: the running softmax of FlashAttention. q (D, N);
// top, total (N,); out (N, padded(D))
template <int N, int64_t SIZE, typename T>
static void attend_tile(const float* q, const Tile<T>& tile, int64_t D, float* top, float* total,
                        float* out) {
    alignas(64) float scores[N * SIZE], k_scale[SIZE], v_scale[SIZE];
    if constexpr (SIZE == TILE) tile_scores<N>(q, tile, D, scores);
    else long_scores(q, tile, D, scores);
    const bool scaled = tile.k_scale;
    const int64_t width = padded(D), end = padded(tile.n);
    for (int64_t s = 0; scaled && s < tile.n; s++) {
        k_scale[s] = from_half(tile.k_scale[s]);
        v_scale[s] = from_half(tile.v_scale[s]);
    }
    for (int h = 0; h < N; h++) {
        float *row = scores + h * SIZE, most = top[h];
        for (int64_t s = 0; scaled && s < tile.n; s++) row[s] *= k_scale[s];
        for (int64_t s = tile.n; s < end; s++) row[s] = -INFINITY;  // of weight 0
        #pragma omp simd reduction(max : most)
        for (int64_t s = 0; s < end; s++) most = row[s] > most ? row[s] : most;
        f16x sums{};
        for (int64_t s = 0; s < end; s += LANES) {
            f16x weights = exp16(load(row + s) - most);
            sums += weights;
            store(row + s, scaled ? weights * load(v_scale + s) : weights);
        }
        total[h] += sum(sums);
        if (most == top[h]) continue;
        float before = exp1(top[h] - most);  // what has been added so far was relative to it
        total[h] = (total[h] - sum(sums)) * before + sum(sums);
        for (int64_t d = 0; d < D; d++) out[h * width + d] *= before;
        top[h] = most;
    }
    int64_t d = 0;
    constexpr int J = columns_at_once(N);
    for (; d + J * LANES <= D; d += J * LANES)
        add_values<N, J, SIZE>(scores, tile.v, tile.n, D, d, width, out);
    for (; d < D; d += LANES) add_values<N, 1, SIZE>(scores, tile.v, tile.n, D, d, width, out);
}

// A part's result: top, total and the sums of weighted values (D,) of each query head of K/V head g.
template <typename T>
static void attend_part(const Model& model, const Slot& slot, const Step& step, const Part& part,
                        int64_t g, const float* q, float* result, char* scratch) {
    const int64_t D = slot.head_dim, group = model.n_head / slot.n_kv_head, width = padded(D);
    float *top = result, *total = top + group, *out = total + group, *turned = (float*)scratch;
    T* copy = (T*)(turned + group * D);
    const bool in_rows = group == 1 && slot.dtype != INT4 && (!slot.transposed || slot.capacity > TILE);
    const int64_t most = in_rows ? LONG_TILE : TILE;
    std::fill(top, total, -3e38f);
    std::fill(total, out + group * width, 0.0f);
    const int sizes[] = {6, 4, 2, 1};  // of the blocks that the heads are taken in
    auto block_of = [&](int64_t h) { return *std::find_if(sizes, sizes + 4, [&](int n) { return h + n <= group; }); };
    for (int64_t h = 0, n; h < group; h += n) {
        n = block_of(h);
        for (int64_t j = 0; j < n; j++)
            for (int64_t d = 0; d < D; d++) turned[h * D + d * n + j] = q[(h + j) * D + d];
    }
    for (int64_t key = part.start, n; key < part.end; key += n) {
        Place place = place_of(slot, step, part.i, key);
        int64_t head = place.unit * slot.n_kv_head + g;
        n = std::min({most, part.end - key, slot.capacity - place.index});
        if (in_rows) {
            Tile<T> tile = stored_tile<T>(slot, place, head, n, D);
            attend_tile<1, LONG_TILE>(turned, tile, D, top, total, out);
            continue;
        }
        if (key + n < part.end) {
            Place next = place_of(slot, step, part.i, key + n);
            prefetch_tile<T>(slot, next, next.unit * slot.n_kv_head + g, D);
        }
        Tile<T> tile = read_tile<T>(slot, place, head, n, D, copy);
        for (int64_t h = 0, block; h < group; h += block) {
            block = block_of(h);
            auto attend = block == 6 ? attend_tile<6, TILE, T> : block == 4 ? attend_tile<4, TILE, T>
                        : block == 2 ? attend_tile<2, TILE, T> : attend_tile<1, TILE, T>;
            attend(turned + h * D, tile, D, top + h, total + h, out + h * width);
        }
    }
}

// y (H * D,) of a row from the results of its parts: (parts, Hkv, group * (padded(D) + 2))
static void join_parts(const Model& model, const Slot& slot, const float* sink, const float* results,
                       int64_t n_parts, float* y) {
    const int64_t D = slot.head_dim, group = model.n_head / slot.n_kv_head;
    const int64_t width = padded(D), size = group * (width + 2), stride = size * slot.n_kv_head;
    for (int64_t head = 0; head < model.n_head; head++) {
        const float* first = results + head / group * size + head % group;
        float most = -3e38f, total = 0, *out = y + head * D;
        for (int64_t p = 0; p < n_parts; p++) most = std::max(most, first[p * stride]);
        std::fill(out, out + D, 0.0f);
        for (int64_t p = 0; p < n_parts; p++) {
            const float* part = first + p * stride;
            const float* values = results + p * stride + head / group * size + 2 * group + head % group * width;
            float weight = exp1(part[0] - most);
            total += part[group] * weight;
            for (int64_t d = 0; d < D; d++) out[d] += values[d] * weight;
        }
        if (sink) total += std::exp(sink[head] - most);
        for (int64_t d = 0; d < D; d++) out[d] /= total;
    }
}
