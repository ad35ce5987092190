// What do ranks of one host need to add and gather? The arguments of shared_memory_avx2.cpp.
#pragma once

#include "dtype.h"

// What a call gives is 0, or one of these plus the number of a rank (recorder.py has the words).
enum RlRanksFault : int {
  RANK_HAS_DIED = 1000,  // its process is over
  RANK_HAS_LEFT = 2000,
  RANK_IS_LATE = 3000,
  RANK_DIFFERS = 4000,  // it does something else, or with another number of bytes
};

struct RlRanks {
  char* begin;               // of the memory, zeros at first
  const int32_t* processes;  // by rank, descriptors that are readable when the process is over
  int64_t buffer_bytes;      // of each of a rank's two buffers, whole lines of 64; longer vectors
                             // are passed in pieces
  int64_t spin_ns;           // before it sleeps
  int64_t timeout_ns;
  int32_t rank, size;
  uint32_t step;       // the last that this rank began
  uint32_t waited_us;  // for others, since the start; goes round at 2^32
};

struct RlRanksCall {
  RlRanks* ranks;
  void* x;    // a sum replaces it
  void* out;  // of gather: size times num_bytes
  int64_t num_bytes, dtype;
};

// Rows of `row_bytes` side by side: those of rank r begin at r * row_bytes of each row of `out`, and
// what would lie behind its `out_row_bytes` is left out. `num_bytes` are those of all rows, which
// begin `out_stride` bytes after each other.
struct RlColumnsCall {
  RlRanksCall rows;
  int64_t row_bytes, out_row_bytes, out_stride;
};
