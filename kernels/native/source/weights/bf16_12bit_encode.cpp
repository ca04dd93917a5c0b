#include "weights/bf16_12bit_encode.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <vector>

#include "weights/bf16_12bit.h"

namespace millrace {

#if defined(MILLRACE_BF16_DOT)

namespace {

constexpr int64_t BATCH_BYTES = 16 << 20;  // of panels that are encoded at a time in place
constexpr int64_t MIN_BLOCKS_PER_RAW = 8;  // a linear with more than one raw block per this many stays bf16

// Distance of a byte from the most common one; larger magnitudes come last. Of normally distributed numbers each power
// of 4 below is a quarter as common as the one before, and those above soon do not occur.
int rarity(int byte, int most_common) {
    int below = (most_common & 127) - (byte & 127);
    return below >= 0 ? below : 128 - below;
}

// The codebook of a panel: the most common upper bytes in one of SAMPLED blocks, filled up with the most probable
// others.
Codebook make_codebook(const bf16* panel, int64_t num_blocks) {
    constexpr int64_t SAMPLED = 4;
    std::array<int32_t, 256> counts{};
    for (int64_t block = 0; block < num_blocks; block += SAMPLED)
        for (int64_t i = 0; i < BLOCK_NUMBERS; i++) counts[panel[block * BLOCK_NUMBERS + i] >> 8]++;
    int most_common = int(std::max_element(counts.begin(), counts.end()) - counts.begin());
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), uint8_t(0));
    std::stable_sort(bytes.begin(), bytes.end(), [&](uint8_t a, uint8_t b) {
        return counts[a] != counts[b] ? counts[a] > counts[b] : rarity(a, most_common) < rarity(b, most_common);
    });
    Codebook book{};
    std::copy(bytes.begin(), bytes.begin() + 16, book.upper);
    return book;
}

// Encodes one pair of k, [32][2], to lower bytes and codes, [64] each. False if the codebook lacks an upper byte.
bool encode_pair(const Codebook& book, const bf16* numbers, uint8_t* lower, __m512i* codes) {
    const __m512i first = _mm512_loadu_si512(numbers), second = _mm512_loadu_si512(numbers + PANEL);
    const __m512i low = _mm512_set1_epi16(255);
    _mm512_storeu_si512(lower, _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low)));
    const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    __mmask64 known = 0;
    *codes = _mm512_setzero_si512();
    for (int encode = 0; encode < 16; encode++) {
        __mmask64 are = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(char(book.upper[encode])));
        *codes = _mm512_mask_mov_epi8(*codes, are, _mm512_set1_epi8(char(encode)));
        known |= are;
    }
    return known == ~__mmask64(0);
}

// Encodes a panel to `to` and appends its raw blocks to `raw`. Returns the number of raw blocks.
int64_t encode_panel(const bf16* panel, int64_t num_blocks, uint8_t* to, std::vector<RawBlock>* raw) {
    Codebook book = make_codebook(panel, num_blocks);
    int64_t num_raw = 0;
    int64_t* next = &book.first_raw;  // where the index of the next raw block goes
    for (int64_t block = 0; block < num_blocks; block++, panel += BLOCK_NUMBERS) {
        uint8_t* place = to + CODEBOOK_BYTES + block * BF16_12BIT_BLOCK_BYTES;
        __m512i codes[2];
        bool is_first_known = encode_pair(book, panel, place, &codes[0]);
        bool is_second_known = encode_pair(book, panel + 2 * PANEL, place + 2 * PANEL, &codes[1]);
        _mm512_storeu_si512(place + BLOCK_NUMBERS, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
        if (is_first_known && is_second_known) continue;
        *next = block, num_raw++;
        raw->emplace_back();
        std::copy(panel, panel + BLOCK_NUMBERS, raw->back().numbers);
        next = &raw->back().next;
    }
    *next = NO_RAW_BLOCK;
    std::memcpy(to, &book, sizeof(book));
    return num_raw;
}

// Encodes the layers' linears in memory order, each to where the one before ended. This never passes a linear's own
// start, because encoded weights are smaller.
class Encoder {
  public:
    explicit Encoder(Model& model) : model_(model) {}

    void encode(Linear& linear) {
        if (!linear.weight.num_bytes()) return;
        int64_t num_panels = linear.num_panels();
        if (!can_encode(linear) || !encode_panels(linear, 0, num_panels, max_raw_blocks(linear))
            || !saves_memory(linear, num_raw_))
            return move(linear);
        Memory raw(num_raw_ * int64_t(sizeof(RawBlock)));  // all that may fail is allocated before anything changes
        place(linear, [&](char* to) { copy_panels(linear, 0, num_panels, to), linear.type = BF16_12BIT; });
        copy_raw(raw.as<RawBlock>());
        link_raw(linear, std::move(raw));
    }

    // Encodes a linear that has memory of its own, in place, a batch of panels at a time: the encoded part ends before
    // the rest. A first pass finds whether this saves memory.
    void encode_in_place(Linear& linear) {
        if (!linear.weight.num_bytes() || !can_encode(linear)) return;
        int64_t together = std::max<int64_t>(1, BATCH_BYTES / linear.panel_bytes()), num_raw = 0;
        auto for_each_batch = [&](const auto& use) {
            int64_t first = 0, last = 0;
            do first = last, last = std::min(first + together, linear.num_panels());
            while (first < last && encode_panels(linear, first, last, max_raw_blocks(linear)) && use(first, last));
            return first == last;
        };
        bool is_through = for_each_batch([&](int64_t, int64_t) { return (num_raw += num_raw_) <= max_raw_blocks(linear); });
        if (!is_through || !saves_memory(linear, num_raw)) return;
        Memory raw(num_raw * int64_t(sizeof(RawBlock)));
        auto to = raw.as<RawBlock>();
        for_each_batch([&](int64_t first, int64_t last) {
            copy_panels(linear, first, last, linear.weight.as<char>());
            to = copy_raw(to);
            return true;
        });
        linear.type = BF16_12BIT;
        linear.weight.shrink(linear.weight_bytes());
        link_raw(linear, std::move(raw));
    }

    // Moves a linear as it is to where the one before ended.
    void move(Linear& linear) {
        const char* from = linear.weight.as<char>();
        place(linear, [&](char* to) {
            if (to != from) std::memmove(to, from, linear.weight_bytes());
        });
    }

    // Bytes of all linears so far.
    int64_t end() const { return end_; }

  private:
    int num_threads() const { return model_.pool->size(); }
    static bool can_encode(const Linear& linear) { return linear.type == BFLOAT16 && linear.k % 4 == 0; }

    static int64_t max_raw_blocks(const Linear& linear) { return linear.k / 4 * linear.num_panels() / MIN_BLOCKS_PER_RAW; }

    static Linear encoded_shape(const Linear& linear) {
        Linear encoded;
        encoded.n = linear.n, encoded.k = linear.k, encoded.type = BF16_12BIT;
        return encoded;
    }

    static bool saves_memory(const Linear& linear, int64_t num_raw) {
        return encoded_shape(linear).weight_bytes() + num_raw * int64_t(sizeof(RawBlock)) < linear.weight_bytes();
    }

    // Encodes panels to the workspace. NOTE: space for raw blocks is reserved before the threads start, because a pool
    // thread cannot report a failed allocation. All threads stop once there are more than `max_raw` raw blocks; then
    // the result is false.
    bool encode_panels(const Linear& linear, int64_t begin, int64_t end, int64_t max_raw) {
        int64_t size = encoded_shape(linear).panel_bytes(), num_blocks = linear.k / 4;
        grow(&workspace_, (end - begin) * size);
        raw_.resize(num_threads()), num_raw_of_panel_.resize(linear.num_panels());
        auto panels_of = [&](int thread) {
            std::array<int64_t, 2> panels;
            split_evenly(end - begin, thread, num_threads(), &panels[0], &panels[1]);
            return panels;
        };
        for (int thread = 0; thread < num_threads(); thread++) {
            auto [first, last] = panels_of(thread);
            raw_[thread].clear(), raw_[thread].reserve(std::min(max_raw + num_blocks, (last - first) * num_blocks));
        }
        std::atomic<int64_t> num_raw{0};
        model_.pool->run(num_threads(), [&](int thread) {
            auto [first, last] = panels_of(thread);
            for (int64_t i = first; i < last && num_raw <= max_raw; i++) {
                const bf16* from = linear.weight.as<bf16>() + (begin + i) * linear.k * PANEL;
                uint8_t* to = workspace_.as<uint8_t>() + i * size;
                num_raw += num_raw_of_panel_[begin + i] = encode_panel(from, num_blocks, to, &raw_[thread]);
            }
        });
        num_raw_ = num_raw;
        return num_raw_ <= max_raw;
    }

    // Copies panels from the workspace to their final place; `to` is where panel 0 goes.
    void copy_panels(const Linear& linear, int64_t begin, int64_t end, char* to) {
        int64_t size = encoded_shape(linear).panel_bytes();
        model_.pool->run(num_threads(), [&](int thread) {
            int64_t first, last;
            split_evenly(end - begin, thread, num_threads(), &first, &last);
            std::memcpy(to + (begin + first) * size, workspace_.as<char>() + first * size, (last - first) * size);
        });
    }

    // Copies raw blocks to their final place and returns the end.
    RawBlock* copy_raw(RawBlock* to) const {
        for (const auto& each : raw_) to = std::copy(each.begin(), each.end(), to);
        return to;
    }

    template <class Put>
    void place(Linear& linear, const Put& put) {
        put(model_.weights.as<char>() + end_);
        linear.offset = end_, linear.weight = Memory(model_.weights, end_, linear.weight_bytes());
        end_ += round_up(linear.weight_bytes(), 64);
    }

    // Stores in each panel's codebook where its raw blocks are.
    void link_raw(Linear& linear, Memory raw) const {
        auto own = raw.as<RawBlock>();
        for (int64_t panel = 0; panel < linear.num_panels(); panel++) {
            reinterpret_cast<Codebook*>(linear.weight.as<char>() + panel * linear.panel_bytes())->raw = own;
            own += num_raw_of_panel_[panel];
        }
        linear.raw_blocks = std::move(raw);
    }

    Model& model_;
    Memory workspace_;
    std::vector<std::vector<RawBlock>> raw_;  // per thread, of its panels
    std::vector<int64_t> num_raw_of_panel_;   // per panel
    int64_t num_raw_ = 0, end_ = 0;
};

}  // namespace

void encode_bf16_12bit(Model& model) {
    if (!HAS_BF16_12BIT || !model.weights.num_bytes()) return;
    Encoder encoder(model);
    std::exception_ptr error;
    auto encode = [&](Linear& linear) {
        try {
            encoder.encode(linear);
        } catch (const std::bad_alloc&) {  // a smaller linear may have enough memory
            error = std::current_exception();
            encoder.move(linear);
        }
    };
    for (Layer& layer : model.layers)
        layer.for_each_linear(encode);
    model.weights.shrink(encoder.end());
    try {
        encoder.encode_in_place(model.head);
    } catch (const std::bad_alloc&) {
        error = std::current_exception();
    }
    if (error) std::rethrow_exception(error);
}

#else

void encode_bf16_12bit(Model&) {}

#endif

}  // namespace millrace
