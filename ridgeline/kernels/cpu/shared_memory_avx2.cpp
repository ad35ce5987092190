// How do the processes of one host add and gather vectors? In memory that all of them have mapped.
//
// Each rank writes to a buffer of its own, puts the number of the step into its line, waits until
// the lines of all others have that number, and reads all buffers in rank order: every rank has the
// same bits. A rank has two buffers and takes them in turns. Whoever wrote step s has read those of
// s - 1, and nobody begins s + 1 before all have written s: so nobody writes what is still read.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "elementwise_wide.h"
#include "pool.h"
#include "shared_memory.h"

namespace {

constexpr int64_t SLEEP_NS = 5'000'000;  // between two looks at who has died
constexpr int PAUSES = 32;               // between two looks at the clock
constexpr int MAX_RANKS = 64;

// What a rank says to the others; the memory begins with one of them for each.
struct alignas(128) Line {
  uint32_t step;      // the last whose buffer is written; sleepers wait on this word
  uint32_t sleepers;  // how many
  uint32_t has_left;
  uint32_t kinds[2];  // of each buffer: what is done with it
  int64_t num_bytes[2];
};

struct F16 {
  uint16_t bits;
};

inline F load(const F16* p) { return from_halves(&p->bits); }

inline void store(F16* p, F x) {
  __m128i halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &halves, sizeof halves);
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

Line* line_of(const RlRanks* g, int rank) { return reinterpret_cast<Line*>(g->begin) + rank; }

char* buffer_of(const RlRanks* g, int rank) {
  int64_t place = int64_t(rank) * 2 + (g->step & 1);
  return g->begin + int64_t(sizeof(Line)) * g->size + place * g->buffer_bytes;
}

void wake(Line* line) { syscall(SYS_futex, &line->step, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

bool has_said(const RlRanks* g, int rank) {
  return int32_t(__atomic_load_n(&line_of(g, rank)->step, __ATOMIC_SEQ_CST) - g->step) >= 0;
}

// 0, or why there is no use in waiting for this rank.
int look_around(const RlRanks* g, int awaited, int64_t began) {
  for (int rank = 0; rank < g->size; ++rank) {
    pollfd end = {g->processes[rank], POLLIN, 0};
    bool is_dead = poll(&end, 1, 0) > 0;
    bool has_left = __atomic_load_n(&line_of(g, rank)->has_left, __ATOMIC_SEQ_CST);
    if ((is_dead || has_left) && !has_said(g, rank)) {
      return (is_dead ? RANK_HAS_DIED : RANK_HAS_LEFT) + rank;
    }
  }
  return now() - began > g->timeout_ns ? RANK_IS_LATE + awaited : 0;
}

int wait_since(const RlRanks* g, int rank, int64_t began) {
  Line* line = line_of(g, rank);
  do {
    for (int i = 0; i < PAUSES; ++i) {
      if (has_said(g, rank)) return 0;
      _mm_pause();
    }
  } while (now() - began < g->spin_ns);
  int failed = 0;
  __atomic_fetch_add(&line->sleepers, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    uint32_t seen = __atomic_load_n(&line->step, __ATOMIC_SEQ_CST);
    if (has_said(g, rank) || (failed = look_around(g, rank, began))) break;
    const timespec nap = {0, SLEEP_NS};
    syscall(SYS_futex, &line->step, FUTEX_WAIT, seen, &nap, nullptr, 0);
  }
  __atomic_fetch_sub(&line->sleepers, 1, __ATOMIC_SEQ_CST);
  return failed;
}

int wait_for(RlRanks* g, int rank) {
  if (has_said(g, rank)) return 0;
  const int64_t began = now();
  const int failed = wait_since(g, rank, began);
  g->waited_us += uint32_t((now() - began) / 1000);
  return failed;
}

// One step: this rank's bytes are written and those of all others are there; else why not.
int meet(RlRanks* g, const void* bytes, int64_t num_bytes, uint32_t kind) {
  ++g->step;
  Line* mine = line_of(g, g->rank);
  std::memcpy(buffer_of(g, g->rank), bytes, size_t(num_bytes));
  mine->kinds[g->step & 1] = kind;
  mine->num_bytes[g->step & 1] = num_bytes;
  __atomic_store_n(&mine->step, g->step, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&mine->sleepers, __ATOMIC_SEQ_CST)) wake(mine);
  for (int rank = 0; rank < g->size; ++rank) {
    if (int failed = wait_for(g, rank)) return failed;
    const Line* line = line_of(g, rank);
    if (line->num_bytes[g->step & 1] != num_bytes || line->kinds[g->step & 1] != kind) {
      return RANK_DIFFERS + rank;
    }
  }
  return 0;
}

// Buffers are whole lines of the cache, so that W numbers can be read where there are fewer.
template <typename T>
void add(const RlRanks* g, void* out, int64_t num_bytes) {
  const T* from[MAX_RANKS];
  for (int rank = 0; rank < g->size; ++rank) {
    from[rank] = reinterpret_cast<const T*>(buffer_of(g, rank));
  }
  T* to = static_cast<T*>(out);
  const int64_t num = num_bytes / int64_t(sizeof(T));
  for (int64_t i = 0; i < num; i += W) {
    F sum = load(from[0] + i);
    for (int rank = 1; rank < g->size; ++rank) sum += load(from[rank] + i);
    store_some(to + i, sum, num - i);
  }
}

}  // namespace

RL_API int rl_ranks_bytes(int32_t size, int64_t buffer_bytes, int64_t* num_bytes) {
  if (size < 1 || size > MAX_RANKS || buffer_bytes % 64) return 1;
  *num_bytes = size * (int64_t(sizeof(Line)) + 2 * buffer_bytes);
  return 0;
}

RL_API int rl_ranks_leave(RlRanks* g) {
  Line* mine = line_of(g, g->rank);
  __atomic_store_n(&mine->has_left, 1, __ATOMIC_SEQ_CST);
  wake(mine);
  return 0;
}

RL_API int rl_ranks_sum(const RlRanksCall* call) {
  char* x = static_cast<char*>(call->x);
  RlRanks* g = call->ranks;
  for (int64_t at = 0; at < call->num_bytes; at += g->buffer_bytes) {
    int64_t num = call->num_bytes - at < g->buffer_bytes ? call->num_bytes - at : g->buffer_bytes;
    if (int failed = meet(g, x + at, num, 1 + uint32_t(call->dtype))) return failed;
    if (call->dtype == RL_F32) add<float>(g, x + at, num);
    if (call->dtype == RL_BF16) add<B16>(g, x + at, num);
    if (call->dtype == RL_F16) add<F16>(g, x + at, num);
  }
  return 0;
}

RL_API int rl_ranks_columns(const RlColumnsCall* columns) {
  const RlRanksCall* call = &columns->rows;
  const char* x = static_cast<const char*>(call->x);
  const int64_t row_bytes = columns->row_bytes, out_row_bytes = columns->out_row_bytes;
  RlRanks* g = call->ranks;
  for (int64_t at = 0; at < call->num_bytes; at += g->buffer_bytes) {
    int64_t num = call->num_bytes - at < g->buffer_bytes ? call->num_bytes - at : g->buffer_bytes;
    if (int failed = meet(g, x + at, num, 0)) return failed;
    for (int rank = 0; rank < g->size; ++rank) {
      const char* from = buffer_of(g, rank);
      for (int64_t i = at; i < at + num;) {  // the part of a row that is in this piece
        int64_t row = i / row_bytes, begin = i % row_bytes, place = rank * row_bytes + begin;
        int64_t some = row_bytes - begin < at + num - i ? row_bytes - begin : at + num - i;
        int64_t room = some < out_row_bytes - place ? some : out_row_bytes - place;
        char* to = static_cast<char*>(call->out) + row * columns->out_stride + place;
        if (room > 0) std::memcpy(to, from + (i - at), size_t(room));
        i += some;
      }
    }
  }
  return 0;
}

// Whole vectors are one row.
RL_API int rl_ranks_gather(const RlRanksCall* call) {
  const int64_t whole = call->num_bytes * call->ranks->size;
  const RlColumnsCall columns = {*call, call->num_bytes, whole, whole};
  return rl_ranks_columns(&columns);
}
