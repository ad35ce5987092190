// Which instructions may be used? The best level that processor and system have, or a lower one.
#pragma once

#include "pool.h"

enum Isa : int {
  ISA_NONE = 0,    // no AVX2: nothing here may be called
  ISA_AVX2 = 1,    // AVX2, FMA, F16C
  ISA_AVX512 = 2,  // AVX-512 F, BW, DQ, VL, VNNI
  ISA_BF16 = 3,    // + AVX-512 BF16
  ISA_AMX = 4,     // + AMX tiles, int8 and bf16
};

// What the machine has; the permission for tiles is asked for once.
RL_API int isa_best();
// What is used: isa_best(), or what isa_set chose.
RL_API int isa_level();
// Use this level from now on; returns it, or -1 if the machine has not got it.
RL_API int isa_set(int level);
