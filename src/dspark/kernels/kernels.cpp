// A decoder's pass over the new tokens of many requests, a draft's heads, and products with packed matrices, as plain C
// functions. library.py describes the structs to Python.
//
// Pointers are to float32, row-major and contiguous unless a stride is said. One call runs at a time.
#include "attention.hpp"
#include "matrix.hpp"
#include "pack.hpp"
#include "pool.hpp"
#include <pthread.h>

struct Layer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm; // q_norm, k_norm: per head, or null
    Matrix qkv, out, gate_up, down;                           // gate_up: 16 outputs of the gate, 16 of up, and so on
    int64_t window, causal; // window: a token sees keys less than this far away (0: all); causal: none after itself
};

struct Decoder {
    int32_t layers, width, heads, kv_heads, head_dim, rotary_dims, intermediate, padding;
    float eps, scale;
    const Layer *layer;
};

// The new tokens of one request: rows row..row+count at positions start..; K/V per layer, [kv_heads, capacity, head_dim].
struct Segment {
    int64_t row, count, start, capacity;
    float *const *keys, *const *values;
};

namespace {

// Never destroyed: a thread may still be inside a call when the process ends.
std::mutex *one_call = new std::mutex;
enum Buffer { NORMED, QKV, MIXED, INNER, SCORES, SUMS_OF_BLOCKS, BUFFERS };
std::vector<float> *const buffers = new std::vector<float>[BUFFERS];
Team *team = nullptr;

// A forked child has no threads but its own, and whoever was in a call stayed in the parent.
const int at_fork = pthread_atfork(nullptr, nullptr, [] { one_call = new std::mutex, team = nullptr; });

Team &team_of(int threads) {
    if (team && team->asked != threads) delete team, team = nullptr;
    if (!team) team = new Team(threads);
    return *team;
}

float *buffer(Buffer which, int64_t size) {
    if ((int64_t)buffers[which].size() < size) buffers[which].resize(size);
    return buffers[which].data();
}

// To be called before a job that multiplies: room for the sums of blocks of any input.
void make_room(int64_t rows, std::initializer_list<const Matrix *> matrices) {
    for (const Matrix *m : matrices) buffer(SUMS_OF_BLOCKS, rows * (m->inputs / BLOCK));
}

int64_t units(const Matrix &m) { return (m.outputs + 31) / 32; }

enum Then { WRITE, ADD, SWIGLU };

// y [rows, y_stride] = or += x [rows, inputs] times m; SWIGLU: half as many outputs, silu(gate) * up.
void multiply(Team &team, const Matrix &m, const float *x, int64_t rows, float *y, int64_t y_stride, Then then) {
    constexpr int64_t TOGETHER = 128; // rows that stay in the cache beside a unit's weights
    const int64_t all = units(m), blocks = m.inputs / BLOCK;
    float *sums = nullptr;
    if (needs_sums(m)) {
        sums = buffers[SUMS_OF_BLOCKS].data();
        team.each(rows, 2, [&](int64_t r) { block_sums(x + r * m.inputs, m.inputs, sums + r * blocks); });
    }
    const int64_t grain = std::clamp<int64_t>(all / 24, 1, 16); // units that follow each other are read fastest
    team.each(all * ((rows + TOGETHER - 1) / TOGETHER), grain, [&](int64_t item) {
        const int64_t unit = item % all, first = item / all * TOGETHER, end = std::min(rows, first + TOGETHER);
        float out[MOST_ROWS][32];
        for (int64_t row = first; row < end; row += MOST_ROWS) {
            const int count = (int)std::min<int64_t>(MOST_ROWS, end - row);
            compute_unit(m, (int)unit, x + row * m.inputs, sums + row * blocks, count, out);
            for (int r = 0; r < count; r++) {
                float *to = y + (row + r) * y_stride + unit * (then == SWIGLU ? PANEL : 32);
                const int wide = (int)std::min<int64_t>(32, m.outputs - unit * 32);
                if (then == SWIGLU)
                    for (int i = 0; i < PANEL; i += W) {
                        const V gate = load<V>(out[r] + i);
                        store(to + i, gate / (1.0f + exponential(-gate)) * load<V>(out[r] + PANEL + i));
                    }
                else if (then == ADD)
                    for (int i = 0; i < wide; i++) to[i] += out[r][i];
                else
                    memcpy(to, out[r], wide * sizeof(float));
            }
        }
    });
}

// Which segment a row belongs to.
std::vector<int32_t> owners(const Segment *segments, int64_t count, int64_t rows) {
    std::vector<int32_t> owner(rows);
    for (int64_t i = 0; i < count; i++)
        std::fill_n(owner.begin() + segments[i].row, segments[i].count, (int32_t)i);
    return owner;
}

// New rows x [.., stride] hold `heads` queries, then keys, then values: norms and rotates, and writes keys and values where
// they stay.
void place(Team &team, const Decoder &d, int index, float *x, int64_t stride, int heads, const Segment *segments,
           const std::vector<int32_t> &owner, const float *cos, const float *sin) {
    const Layer &layer = d.layer[index];
    const int hd = d.head_dim, dims = d.rotary_dims;
    team.each((int64_t)owner.size(), 2, [&](int64_t row) {
        const Segment &s = segments[owner[row]];
        const int64_t position = s.start + row - s.row;
        for (int head = 0; head < heads + 2 * d.kv_heads; head++) {
            float *part = x + row * stride + head * hd;
            const int kv = head - heads;
            if (kv < d.kv_heads) {
                const float *weight = kv < 0 ? layer.q_norm : layer.k_norm;
                if (weight) rms_norm(part, weight, hd, d.eps, part);
                rotate(part, cos + position * dims, sin + position * dims, dims);
            }
            if (kv < 0) continue;
            float *to = kv < d.kv_heads ? s.keys[index] + kv * s.capacity * hd
                                        : s.values[index] + (kv - d.kv_heads) * s.capacity * hd;
            memcpy(to + position * hd, part, hd * sizeof(float));
        }
    });
}

// Some queries of a K/V head of a segment: query i is of row i / group and of the group's head i % group.
struct Piece {
    int segment, head, count;
    int64_t first;
};

void attention(Team &team, const Decoder &d, int index, const float *qkv, int64_t stride, const Segment *segments,
               const std::vector<Piece> &pieces, float *scores, float *out) {
    const int hd = d.head_dim, group = d.heads / d.kv_heads;
    const Layer &layer = d.layer[index];
    team.each((int64_t)pieces.size(), 1, [&](int64_t item) {
        const Piece &piece = pieces[item];
        const Segment &s = segments[piece.segment];
        Queries q;
        for (int i = 0; i < piece.count; i++) {
            const int64_t row = (piece.first + i) / group, position = s.start + row, all = s.start + s.count;
            const int64_t head = piece.head * group + (piece.first + i) % group;
            q.q[i] = qkv + (s.row + row) * stride + head * hd;
            q.out[i] = out + ((s.row + row) * d.heads + head) * hd;
            q.first[i] = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
            q.end[i] = layer.causal ? position + 1 : layer.window ? std::min(all, position + layer.window) : all;
        }
        const int64_t head = (int64_t)piece.head * s.capacity * hd;
        attend_some(q, piece.count, s.keys[index] + head, s.values[index] + head, hd, d.scale, scores);
    });
}

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// The place of the largest of a row, the first of equals; -1 where it is not finite or something is not a number.
int64_t first_largest(const float *row, int64_t count) {
    V most = splat(NOTHING);
    I odd = {};
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        const V next = load<V>(row + i);
        most = next > most ? next : most;
        odd |= next != next;
    }
    float largest = NOTHING;
    bool bad = false;
    for (int lane = 0; lane < W; lane++) largest = std::max(largest, most[lane]), bad |= odd[lane];
    for (; i < count; i++) largest = std::max(largest, row[i]), bad |= row[i] != row[i];
    return bad || !std::isfinite(largest) ? -1 : std::find(row, row + count, largest) - row;
}

} // namespace

extern "C" {

int dspark_vector_width() { return W; }

// Bytes that a matrix takes when packed; 0 when it cannot be: inputs must be a multiple of 32.
int64_t dspark_packed_bytes(int format, int outputs, int inputs) {
    return inputs % BLOCK ? 0 : (int64_t)(outputs + 31) / 32 * UNIT * (inputs / BLOCK) * block_bytes(format);
}

// weight [outputs, inputs] -> data, and for INT8 scales [outputs, padded to 32]. Returns whether every weight is exact;
// with `rounded` the others are rounded, without it packing ends at the first.
int dspark_pack(int format, const float *weight, int outputs, int inputs, uint8_t *data, float *scales, int rounded,
                int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    Team &team = team_of(threads);
    std::atomic<bool> exact{true};
    team.run([&](int) {
        team.each((outputs + 31) / 32 * UNIT, 4, [&](int64_t panel) {
            if (exact || rounded)
                if (!pack_panel(format, weight, outputs, inputs, (int)panel, data, scales, rounded)) exact = false;
        });
    });
    return exact;
}

// y [rows, outputs] = x [rows, inputs] times m.
void dspark_multiply(const Matrix *m, const float *x, int64_t rows, float *y, int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    Team &team = team_of(threads);
    make_room(rows, {m});
    team.run([&](int) { multiply(team, *m, x, rows, y, m->outputs, WRITE); });
}

// New rows x [rows, width] through every layer, in place. tapped [rows, taps * width]: x after the layers `taps`
// (ascending). cos, sin [positions, rotary_dims].
void dspark_decode(const Decoder *decoder, float *x, int64_t rows, const float *cos, const float *sin,
                   const Segment *segments, int64_t count, const int32_t *taps, int64_t tap_count, float *tapped,
                   int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    const Decoder &d = *decoder;
    const int64_t q_width = (int64_t)d.heads * d.head_dim, stride = q_width + 2ll * d.kv_heads * d.head_dim;
    const std::vector<int32_t> owner = owners(segments, count, rows);
    std::vector<Piece> pieces;
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) {
        const Segment &s = segments[i];
        longest = std::max(longest, s.start + s.count);
        const int64_t queries = s.count * (d.heads / d.kv_heads);
        for (int head = 0; head < d.kv_heads; head++)
            for (int64_t first = 0; first < queries; first += TILE)
                pieces.push_back({(int)i, head, (int)std::min<int64_t>(TILE, queries - first), first});
    }
    const int64_t room = TILE * (longest + 2 * W);
    float *normed = buffer(NORMED, rows * d.width), *qkv = buffer(QKV, rows * stride), *mixed = buffer(MIXED, rows * q_width);
    float *inner = buffer(INNER, rows * d.intermediate), *scores = buffer(SCORES, threads * room);
    for (int i = 0; i < d.layers; i++)
        make_room(rows, {&d.layer[i].qkv, &d.layer[i].out, &d.layer[i].gate_up, &d.layer[i].down});
    Team &team = team_of(threads);
    team.run([&](int thread) {
        int64_t tap = 0;
        auto norm = [&](const float *weight) {
            team.each(rows, 2, [&](int64_t r) { rms_norm(x + r * d.width, weight, d.width, d.eps, normed + r * d.width); });
        };
        for (int i = 0; i < d.layers; i++) {
            const Layer &layer = d.layer[i];
            norm(layer.attention_norm);
            multiply(team, layer.qkv, normed, rows, qkv, stride, WRITE);
            place(team, d, i, qkv, stride, d.heads, segments, owner, cos, sin);
            attention(team, d, i, qkv, stride, segments, pieces, scores + thread * room, mixed);
            multiply(team, layer.out, mixed, rows, x, d.width, ADD);
            norm(layer.mlp_norm);
            multiply(team, layer.gate_up, normed, rows, inner, d.intermediate, SWIGLU);
            multiply(team, layer.down, inner, rows, x, d.width, ADD);
            if (tap < tap_count && taps[tap] == i) {
                team.each(rows, 8, [&](int64_t r) {
                    memcpy(tapped + (r * tap_count + tap) * d.width, x + r * d.width, d.width * sizeof(float));
                });
                tap++;
            }
        }
    });
}

// A DFlash draft's context: taps [rows, fc inputs] -> norm(fc taps) -> K/V of every layer, where they stay. kv: keys and
// values of the first layer, then of the next, and so on.
void dspark_context(const Decoder *decoder, const float *taps, int64_t rows, const Matrix *fc, const float *norm,
                    const Matrix *kv, const float *cos, const float *sin, const Segment *segments, int64_t count,
                    int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    const Decoder &d = *decoder;
    const std::vector<int32_t> owner = owners(segments, count, rows);
    float *states = buffer(NORMED, rows * d.width), *pairs = buffer(QKV, rows * kv->outputs);
    make_room(rows, {fc, kv});
    Team &team = team_of(threads);
    team.run([&](int) {
        multiply(team, *fc, taps, rows, states, d.width, WRITE);
        team.each(rows, 2, [&](int64_t r) { rms_norm(states + r * d.width, norm, d.width, d.eps, states + r * d.width); });
        multiply(team, *kv, states, rows, pairs, kv->outputs, WRITE);
        for (int i = 0; i < d.layers; i++)
            place(team, d, i, pairs + 2ll * i * d.kv_heads * d.head_dim, kv->outputs, 0, segments, owner, cos, sin);
    });
}

// norm of chosen rows of x [.., width] -> normed [rows, width]; and where there is a matrix, logits [rows, outputs] and the
// place of the largest of each row (`first_largest`).
void dspark_head(const float *x, int64_t width, const int64_t *chosen, int64_t rows, const float *weight, float eps,
                 float *normed, const Matrix *m, float *logits, int64_t *best, int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    Team &team = team_of(threads);
    if (m) make_room(rows, {m});
    team.run([&](int) {
        team.each(rows, 2, [&](int64_t r) {
            rms_norm(x + chosen[r] * width, weight, (int)width, eps, normed + r * width);
        });
        if (!m) return;
        multiply(team, *m, normed, rows, logits, m->outputs, WRITE);
        team.each(rows, 1, [&](int64_t r) { best[r] = first_largest(logits + r * m->outputs, m->outputs); });
    });
}

// A vanilla Markov head, slot by slot: token k is the first largest of base[request][k] + w2 w1[token k - 1].
// base [requests, slots, outputs], w1 [vocabulary, rank], first [requests]: the token before slot 0; ids [outputs]: the
// token that an output stands for (null: itself) -> tokens [requests, slots].
void dspark_markov(const float *base, int64_t requests, int64_t slots, const float *w1, const Matrix *w2,
                   const int64_t *first, const int64_t *ids, int64_t *tokens, int threads) {
    std::lock_guard<std::mutex> hold(*one_call);
    Team &team = team_of(threads);
    const int64_t outputs = w2->outputs, rank = w2->inputs;
    float *before = buffer(NORMED, requests * rank), *logits = buffer(QKV, requests * outputs);
    make_room(requests, {w2});
    team.run([&](int) {
        for (int64_t slot = 0; slot < slots; slot++) {
            team.each(requests, 1, [&](int64_t r) {
                const int64_t previous = std::max<int64_t>(0, slot ? tokens[r * slots + slot - 1] : first[r]);
                memcpy(before + r * rank, w1 + previous * rank, rank * sizeof(float));
                memcpy(logits + r * outputs, base + (r * slots + slot) * outputs, outputs * sizeof(float));
            });
            multiply(team, *w2, before, requests, logits, outputs, ADD);
            team.each(requests, 1, [&](int64_t r) {
                const int64_t place = first_largest(logits + r * outputs, outputs);
                tokens[r * slots + slot] = ids && place >= 0 ? ids[place] : place;
            });
        }
    });
}

} // extern "C"
