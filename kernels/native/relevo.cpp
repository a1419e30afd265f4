// The C interface of the native kernels: raw pointers, no exceptions. Shapes are checked by the Python side.
#include "step.h"

namespace {

// A row-wise quantized copy of floats [count, cols].
struct Quantized {
    std::vector<int8_t> codes;
    std::vector<float> scales, sums;
    std::vector<int32_t> lifts;
    Activations view;

    Quantized(const float* x, int count, int cols)
        : codes(size_t(count + amx::ROWS - 1) * cols),
          scales(size_t(count) * cols / GROUP),
          sums(scales.size()),
          lifts(2 * scales.size()),
          view{codes.data(), scales.data(), sums.data(), lifts.data(), cols, count} {
        for (int row = 0; row < count; row++)
            for (int g = 0; g < cols / GROUP; g++) view.put(row, g, x + size_t(row) * cols + g * GROUP);
    }
};

// All heads of one row, for `relevo_attention`.
void attend_row(const Pages& pages, int num_heads, const float* queries, int64_t first, int64_t last, float* out) {
    const auto scratch = std::make_unique<AttentionScratch>();
    const int size = pages.shape.head_size, group = num_heads / pages.shape.kv_heads, stride = num_heads * size,
              most = std::max(1, std::min(16, MAX_QUERIES / group));
    std::vector<float> scaled(queries + first * stride, queries + last * stride);
    for (float& x : scaled) x *= 1.0f / std::sqrt(static_cast<float>(size));
    for (int head = 0; head < pages.shape.kv_heads; head++)
        for (int token = 0; token < last - first; token += most) {
            const int position = pages.num_keys - static_cast<int>(last - first) + token,
                      tokens = std::min(most, static_cast<int>(last - first) - token);
            const float* lines = scaled.data() + size_t(token) * stride + head * group * size;
            attend(pages, head, 1, position, tokens, lines, stride, group, *scratch, nullptr,
                   [&](int i, int, const Partial* sums) {
                       for (int g = 0; g < group; g++)
                           for (int d = 0; d < size; d++)
                               out[size_t(first + token + i) * stride + (head * group + g) * size + d] =
                                   sums[g].values[d] / sums[g].total;
                   });
        }
}

template <class Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (...) {  // memory or threads are lacking
        return 1;
    }
}

}  // namespace

extern "C" {

const char* relevo_instructions() { return amx::permitted() ? "AVX-512 VNNI and AMX" : simd::NAME; }

int32_t relevo_piece() { return PIECE; }

size_t relevo_packed_bytes(int32_t kind, int32_t rows, int32_t cols) {
    const Matrix shape{nullptr, kind, rows, cols};
    return shape.num_pieces() * (PIECE / LANES) * shape.tile_bytes();
}

void relevo_pack(int32_t kind, const uint8_t* codes, const Half* scales, const Half* minima, int32_t rows, int32_t cols,
                 uint8_t* out) {
    pack(static_cast<Kind>(kind), codes, scales, minima, rows, cols, out);
}

void relevo_read_row(const Matrix* matrix, int32_t row, float* out) { read_row(*matrix, row, out); }

int relevo_multiply(const Matrix* matrix, const float* x, int32_t count, float* out) {
    return guarded([&] {
        const Quantized a(x, count, matrix->cols);
        const amx::Registers registers;
        for (int piece = 0; piece < matrix->num_pieces(); piece++)
            multiply<1>(*matrix, piece, a.view, count, [&](int row, const float* values) {
                const int first = piece * PIECE;
                std::memcpy(out + size_t(row) * matrix->rows + first, values,
                            sizeof(float) * std::min(PIECE, matrix->rows - first));
            });
    });
}

// As `paged_attention` in kernels/reference.py; queries [tokens, num_heads, head_size] are not scaled yet.
int relevo_attention(const float* queries, const uint8_t* cache, const CacheShape* shape, const int64_t* tables,
                     int32_t table_width, const int64_t* row_starts, const int64_t* seq_lens, int32_t num_rows,
                     int32_t num_heads, float* out) {
    return guarded([&] {
        for (int row = 0; row < num_rows; row++) {
            const Pages pages{cache, tables + size_t(row) * table_width, *shape, static_cast<int>(seq_lens[row])};
            attend_row(pages, num_heads, queries, row_starts[row], row_starts[row + 1], out);
        }
    });
}

Engine* relevo_open(const Model* model, int32_t num_threads, int32_t max_tokens) {
    Engine* engine = nullptr;
    guarded([&] { engine = new Engine(*model, num_threads, max_tokens); });
    return engine;
}

void relevo_close(Engine* engine) { delete engine; }

int relevo_forward(Engine* engine, const Step* step, double* seconds) {
    if (!engine->is_valid(*step)) return 2;
    return guarded([&] { engine->forward(*step, seconds); });
}

double relevo_dot_rate(Engine* engine) { return engine->dot_rate(); }

int relevo_logits(Engine* engine, const float* hidden, int32_t count, float* out, double* seconds) {
    if (count > engine->max_tokens()) return 2;
    return guarded([&] { engine->logits(hidden, count, out, seconds); });
}

// As `sample_rows` in engine/sampler.py: logits [count, size]; `seats`, `positions` and `token_ids` [count].
int relevo_draw(Engine* engine, const float* logits, int32_t count, int32_t size, const Seats* columns,
                const int64_t* seats, const int64_t* positions, int64_t* token_ids) {
    auto drawing_of = [&](int row) { return columns->drawing(seats[row], positions[row]); };
    return guarded([&] { engine->sample(logits, count, size, drawing_of, token_ids); });
}

}  // extern "C"
