// AMX tile registers: eight registers of up to 16 rows of 64 bytes, with load, store and dot-product instructions.
//
// Used by attention/amx_attention.h and linear/amx_*.h, each thread for itself. Without AMX (MILLRACE_EMULATE_AMX)
// plain C++ stands in for the instructions, so that tests run on any machine. The emulation gives the same results
// except for the last bits of a sum.

#pragma once

#include <cstdlib>

#include "machine/simd.h"

namespace millrace {

constexpr int AMX_ROWS = 16;                   // rows of a register
constexpr int AMX_PAIRS = 16;                  // bf16 pairs in a register row
constexpr int AMX_COLUMNS = 16;                // float32 sums in a register row
constexpr int AMX_TILE_ROWS = 2 * AMX_ROWS;    // rows of a product tile: two registers
constexpr int64_t AMX_K_STEP = 2 * AMX_PAIRS;  // elements of k per dot-product instruction

// The tile configuration that `ldtilecfg` reads: the used rows and bytes of each register.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_pairs) {
        rows[tile] = uint8_t(num_rows), row_bytes[tile] = uint16_t(4 * num_pairs);
    }
};

#if defined(__AMX_BF16__)

// Inline assembly, because the intrinsics do not accept a template argument as the register number.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
// Like load_tile, with a non-temporal hint. For data that is read once beside data that must stay in the L1 cache.
template <int TILE>
inline void stream_tile(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// SUMS [rows][16] float32 += bf16 pairs ROWS [rows][pairs] * COLUMNS [pairs][16].
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}
// SUMS [rows][16] int32 += signed bytes ROWS [rows][quads] * unsigned bytes COLUMNS [quads][16], four bytes per quad.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_int8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}
inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
inline void release_tiles() { asm volatile("tilerelease"); }

#else

struct TileRegisters {
    TileConfig config;
    alignas(64) uint32_t rows[8][AMX_ROWS][AMX_PAIRS];
};
inline thread_local TileRegisters tile_registers;

template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    TileRegisters& all = tile_registers;
    for (int row = 0; row < all.config.rows[TILE]; row++)
        std::memcpy(all.rows[TILE][row], static_cast<const char*>(from) + row * stride, all.config.row_bytes[TILE]);
}
template <int TILE>
inline void stream_tile(const void* from, int64_t stride) {
    load_tile<TILE>(from, stride);
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    TileRegisters& all = tile_registers;
    for (int row = 0; row < all.config.rows[TILE]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, all.rows[TILE][row], all.config.row_bytes[TILE]);
}
template <int TILE>
inline void clear_tile() {
    std::memset(tile_registers.rows[TILE], 0, sizeof tile_registers.rows[TILE]);
}
// Aborts on operand shapes that would make the processor fault.
template <int SUMS, int ROWS, int COLUMNS>
inline void check_shapes() {
    auto rows = tile_registers.config.rows;
    auto bytes = tile_registers.config.row_bytes;
    bool fits = rows[SUMS] > 0 && rows[SUMS] == rows[ROWS] && bytes[ROWS] == 4 * rows[COLUMNS]
        && bytes[SUMS] == bytes[COLUMNS];
    if (!fits) std::abort();
}
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_bf16() {
    check_shapes<SUMS, ROWS, COLUMNS>();
    TileRegisters& all = tile_registers;
    auto rows = all.config.rows;
    for (int row = 0; row < rows[SUMS]; row++) {
        float even[AMX_COLUMNS] = {}, odd[AMX_COLUMNS] = {}, sums[AMX_COLUMNS];
        for (int pair = 0; pair < rows[COLUMNS]; pair++) {
            uint32_t x = all.rows[ROWS][row][pair];
            for (int i = 0; i < AMX_COLUMNS; i++) {
                uint32_t y = all.rows[COLUMNS][pair][i];
                even[i] += widen(bf16(x)) * widen(bf16(y)), odd[i] += widen(bf16(x >> 16)) * widen(bf16(y >> 16));
            }
        }
        std::memcpy(sums, all.rows[SUMS][row], sizeof sums);
        for (int i = 0; i < AMX_COLUMNS; i++) sums[i] += even[i] + odd[i];
        std::memcpy(all.rows[SUMS][row], sums, sizeof sums);
    }
}
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_int8() {
    check_shapes<SUMS, ROWS, COLUMNS>();
    TileRegisters& all = tile_registers;
    auto rows = all.config.rows;
    for (int row = 0; row < rows[SUMS]; row++)
        for (int quad = 0; quad < rows[COLUMNS]; quad++)
            for (int i = 0; i < AMX_COLUMNS; i++)
                for (int byte = 0; byte < 32; byte += 8) {
                    int x = int8_t(all.rows[ROWS][row][quad] >> byte), y = uint8_t(all.rows[COLUMNS][quad][i] >> byte);
                    all.rows[SUMS][row][i] += uint32_t(x * y);
                }
}
inline void load_tile_config(const TileConfig& config) { tile_registers.config = config; }
inline void release_tiles() { tile_registers.config = TileConfig(); }

#endif

// Scope in which a thread uses the tile registers. It assumes nothing about the configuration it finds, because other
// code may run on the thread in between. It releases the registers at the end, because the system saves live registers
// at each context switch.
class TileScope {
  public:
    TileScope() = default;
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
    ~TileScope() {
        if (current_) release_tiles();
    }

    // Selects the tile configuration; register contents are lost if it changes. `config` must outlive this scope.
    void configure(const TileConfig& config) {
        if (current_ == &config) return;
        load_tile_config(config);
        current_ = &config;
    }

  private:
    const TileConfig* current_ = nullptr;
};

}  // namespace millrace
