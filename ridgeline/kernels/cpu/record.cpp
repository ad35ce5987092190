// How does a whole decode step run as one call from Python? The recorded calls, in order.
#include "record.h"

RL_API int rl_replay(const RecordedCall* calls, int64_t num_calls) {
  for (int64_t i = 0; i < num_calls; ++i) {
    if (int failed = calls[i].kernel(calls[i].arguments)) return failed;
  }
  return 0;
}
