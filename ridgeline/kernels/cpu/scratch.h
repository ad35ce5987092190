// Where do kernels keep what lies between their tasks? Memory that grows and is used again.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

struct Scratch {
  char* memory = nullptr;
  int64_t bytes = 0;
  // Null if there is no memory.
  char* at_least(int64_t wanted) {
    if (wanted > bytes) {
      std::free(memory);
      bytes = (wanted + 0xffff) & ~int64_t(0xffff);
      memory = static_cast<char*>(std::aligned_alloc(64, size_t(bytes)));
      if (memory == nullptr) bytes = 0;
    }
    return memory;
  }
  ~Scratch() { std::free(memory); }
};

}  // namespace
