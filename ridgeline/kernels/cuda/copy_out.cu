// A few numbers from the device's memory into the host's, which it can write to.

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_out(const unsigned char* __restrict__ from, unsigned char* to, long long bytes) {
  const long long words = bytes / 8;
  for (long long i = threadIdx.x; i < words; i += THREADS)
    ((unsigned long long*)to)[i] = ((const unsigned long long*)from)[i];
  for (long long i = words * 8 + threadIdx.x; i < bytes; i += THREADS) to[i] = from[i];
}
