// What can be recorded? Any kernel of the C interface: it takes one pointer to a struct of its
// arguments, so that a call is two pointers (see recorder.py for the other side).
#pragma once

#include <cstdint>

#include "pool.h"

struct RecordedCall {
  int (*kernel)(const void*);
  const void* arguments;
};

// Makes the calls in order; what the first that fails returns, else 0.
RL_API int rl_replay(const RecordedCall* calls, int64_t num_calls);
