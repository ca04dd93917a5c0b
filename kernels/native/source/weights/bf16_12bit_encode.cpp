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

constexpr int64_t TOGETHER_BYTES = 16 << 20;  // of panels that are coded at a time where their linear is
constexpr int64_t BLOCKS_A_WHOLE = 8;  // a linear with more than one whole block in so many stays as it is

// How far a byte's size is from that of the most common one; larger ones come last: of normally distributed numbers each
// power of 4 below is a quarter as common as the one before, and above it there are soon none.
int rarity(int byte, int most_common) {
    int below = (most_common & 127) - (byte & 127);
    return below >= 0 ? below : 128 - below;
}

// A panel's book: the most common upper bytes of one block in SAMPLED, filled up with the likeliest of the rest.
CodeBook book_of(const bf16* panel, int64_t num_blocks) {
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
    CodeBook book{};
    std::copy(bytes.begin(), bytes.begin() + 16, book.upper);
    return book;
}

// Codes the numbers of one pair of k, [32][2]: their lower bytes, and their codes, [64] each. False if the book lacks any.
bool code_pair(const CodeBook& book, const bf16* numbers, uint8_t* lower, __m512i* codes) {
    const __m512i first = _mm512_loadu_si512(numbers), second = _mm512_loadu_si512(numbers + PANEL);
    const __m512i low = _mm512_set1_epi16(255);
    _mm512_storeu_si512(lower, _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low)));
    const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    __mmask64 known = 0;
    *codes = _mm512_setzero_si512();
    for (int code = 0; code < 16; code++) {
        __mmask64 are = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(char(book.upper[code])));
        *codes = _mm512_mask_mov_epi8(*codes, are, _mm512_set1_epi8(char(code)));
        known |= are;
    }
    return known == ~__mmask64(0);
}

// Codes a panel to `to`, and adds its whole blocks. Returns how many these are.
int64_t code_panel(const bf16* panel, int64_t num_blocks, uint8_t* to, std::vector<WholeBlock>* whole) {
    CodeBook book = book_of(panel, num_blocks);
    int64_t num_whole = 0;
    int64_t* next = &book.first_whole;  // where the next whole block is told
    for (int64_t block = 0; block < num_blocks; block++, panel += BLOCK_NUMBERS) {
        uint8_t* place = to + CODE_BOOK_BYTES + block * CODED_BLOCK_BYTES;
        __m512i codes[2];
        bool is_first_known = code_pair(book, panel, place, &codes[0]);
        bool is_second_known = code_pair(book, panel + 2 * PANEL, place + 2 * PANEL, &codes[1]);
        _mm512_storeu_si512(place + BLOCK_NUMBERS, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
        if (is_first_known && is_second_known) continue;
        *next = block, num_whole++;
        whole->emplace_back();
        std::copy(panel, panel + BLOCK_NUMBERS, whole->back().numbers);
        next = &whole->back().next;
    }
    *next = NO_BLOCK;
    std::memcpy(to, &book, sizeof(book));
    return num_whole;
}

// Codes linears in the order in which they lie, each to where the last one ended: never past its own beginning, as what is
// coded is smaller.
class Coder {
  public:
    explicit Coder(Model& model) : model_(model) {}

    void code(Linear& linear) {
        if (!linear.weight.num_bytes()) return;
        int64_t num_panels = linear.num_panels();
        if (!can_code(linear) || !code_panels(linear, 0, num_panels, most_whole(linear)) || !is_worth_it(linear, num_whole_))
            return move(linear);
        Memory whole(num_whole_ * int64_t(sizeof(WholeBlock)));  // like all that may lack, before anything has changed
        place(linear, [&](char* to) { take_panels(linear, 0, num_panels, to), linear.type = CODED; });
        take_whole(whole.as<WholeBlock>());
        tell_whole(linear, std::move(whole));
    }

    // Codes a linear that has memory of its own, within it, so many panels at a time: what is coded ends before what is not
    // yet. Whether that is worth it is seen by going through it once before.
    void code_alone(Linear& linear) {
        if (!linear.weight.num_bytes() || !can_code(linear)) return;
        int64_t together = std::max<int64_t>(1, TOGETHER_BYTES / linear.panel_bytes()), num_whole = 0;
        auto each_stretch = [&](const auto& use) {
            int64_t first = 0, last = 0;
            do first = last, last = std::min(first + together, linear.num_panels());
            while (first < last && code_panels(linear, first, last, most_whole(linear)) && use(first, last));
            return first == last;
        };
        bool is_through = each_stretch([&](int64_t, int64_t) { return (num_whole += num_whole_) <= most_whole(linear); });
        if (!is_through || !is_worth_it(linear, num_whole)) return;
        Memory whole(num_whole * int64_t(sizeof(WholeBlock)));
        auto to = whole.as<WholeBlock>();
        each_stretch([&](int64_t first, int64_t last) {
            take_panels(linear, first, last, linear.weight.as<char>());
            to = take_whole(to);
            return true;
        });
        linear.type = CODED;
        linear.weight.shrink(linear.weight_bytes());
        tell_whole(linear, std::move(whole));
    }

    // A linear as it is, to where the last one ended.
    void move(Linear& linear) {
        const char* from = linear.weight.as<char>();
        place(linear, [&](char* to) {
            if (to != from) std::memmove(to, from, linear.weight_bytes());
        });
    }

    // Bytes of all of them.
    int64_t end() const { return end_; }

  private:
    int num_threads() const { return model_.pool->size(); }
    static bool can_code(const Linear& linear) { return linear.type == BFLOAT16 && linear.k % 4 == 0; }

    static int64_t most_whole(const Linear& linear) { return linear.k / 4 * linear.num_panels() / BLOCKS_A_WHOLE; }

    static Linear coded_of(const Linear& linear) {
        Linear coded;
        coded.n = linear.n, coded.k = linear.k, coded.type = CODED;
        return coded;
    }

    static bool is_worth_it(const Linear& linear, int64_t num_whole) {
        return coded_of(linear).weight_bytes() + num_whole * int64_t(sizeof(WholeBlock)) < linear.weight_bytes();
    }

    // Codes panels to the room. Room for whole blocks is set aside before the threads begin, as none of the pool's can tell
    // of a lack; all stop once there are more of them than `most`, and that is false.
    bool code_panels(const Linear& linear, int64_t begin, int64_t end, int64_t most) {
        int64_t size = coded_of(linear).panel_bytes(), num_blocks = linear.k / 4;
        ensure(&room_, (end - begin) * size);
        whole_.resize(num_threads()), num_whole_of_.resize(linear.num_panels());
        auto share_of = [&](int thread) {
            std::array<int64_t, 2> panels;
            share(end - begin, thread, num_threads(), &panels[0], &panels[1]);
            return panels;
        };
        for (int thread = 0; thread < num_threads(); thread++) {
            auto [first, last] = share_of(thread);
            whole_[thread].clear(), whole_[thread].reserve(std::min(most + num_blocks, (last - first) * num_blocks));
        }
        std::atomic<int64_t> num_whole{0};
        model_.pool->run(num_threads(), [&](int thread) {
            auto [first, last] = share_of(thread);
            for (int64_t i = first; i < last && num_whole <= most; i++) {
                const bf16* from = linear.weight.as<bf16>() + (begin + i) * linear.k * PANEL;
                uint8_t* to = room_.as<uint8_t>() + i * size;
                num_whole += num_whole_of_[begin + i] = code_panel(from, num_blocks, to, &whole_[thread]);
            }
        });
        num_whole_ = num_whole;
        return num_whole_ <= most;
    }

    // Takes panels from the room to where they stay: `to` is where the first one of all does.
    void take_panels(const Linear& linear, int64_t begin, int64_t end, char* to) {
        int64_t size = coded_of(linear).panel_bytes();
        model_.pool->run(num_threads(), [&](int thread) {
            int64_t first, last;
            share(end - begin, thread, num_threads(), &first, &last);
            std::memcpy(to + (begin + first) * size, room_.as<char>() + first * size, (last - first) * size);
        });
    }

    // Copies whole blocks to where they stay, and returns where the next ones do.
    WholeBlock* take_whole(WholeBlock* to) const {
        for (const auto& each : whole_) to = std::copy(each.begin(), each.end(), to);
        return to;
    }

    template <class Put>
    void place(Linear& linear, const Put& put) {
        put(model_.weights.as<char>() + end_);
        linear.offset = end_, linear.weight = Memory(model_.weights, end_, linear.weight_bytes());
        end_ += round_up(linear.weight_bytes(), 64);
    }

    // Tells each panel's book where its whole blocks are.
    void tell_whole(Linear& linear, Memory whole) const {
        auto own = whole.as<WholeBlock>();
        for (int64_t panel = 0; panel < linear.num_panels(); panel++) {
            reinterpret_cast<CodeBook*>(linear.weight.as<char>() + panel * linear.panel_bytes())->whole = own;
            own += num_whole_of_[panel];
        }
        linear.whole_blocks = std::move(whole);
    }

    Model& model_;
    Memory room_;
    std::vector<std::vector<WholeBlock>> whole_;  // of each thread's panels
    std::vector<int64_t> num_whole_of_;           // each panel
    int64_t num_whole_ = 0, end_ = 0;
};

}  // namespace

void code_weights(Model& model) {
    if (!HAS_CODED || !model.weights.num_bytes()) return;
    Coder coder(model);
    std::exception_ptr lack;
    auto code = [&](Linear& linear) {
        try {
            coder.code(linear);
        } catch (const std::bad_alloc&) {  // a smaller one may have enough
            lack = std::current_exception();
            coder.move(linear);
        }
    };
    for (Layer& layer : model.layers)
        for (Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) code(*linear);
    model.weights.shrink(coder.end());
    try {
        coder.code_alone(model.head);
    } catch (const std::bad_alloc&) {
        lack = std::current_exception();
    }
    if (lack) std::rethrow_exception(lack);
}

#else

void code_weights(Model&) {}

#endif

}  // namespace millrace
