/* The yardstick of the verification operators: one pass of additions over a buffer, as fast as the machine reads. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t Lanes __attribute__((vector_size(64)));

static uint64_t read_part(const char* data, size_t bytes) {
  Lanes sum[8] = {{0}};
  size_t at = 0;
  for (; at + sizeof sum <= bytes; at += sizeof sum)
    for (int k = 0; k < 8; ++k) {
      Lanes piece;
      __builtin_memcpy(&piece, data + at + k * sizeof piece, sizeof piece);
      sum[k] += piece;
    }
  uint64_t total = 0;
  for (int k = 0; k < 8; ++k)
    for (int i = 0; i < 8; ++i) total += sum[k][i];
  for (; at < bytes; ++at) total += (unsigned char)data[at];
  return total;
}

/* Each thread reads one part; OpenMP keeps the threads between calls. */
uint64_t read_once(const char* data, size_t bytes, int threads) {
  if (threads == 1) return read_part(data, bytes);
  const size_t part = (bytes / threads + 63) / 64 * 64;
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : total)
  for (int k = 0; k < threads; ++k) {
    const size_t begin = k * part < bytes ? k * part : bytes, end = begin + part < bytes ? begin + part : bytes;
    total += read_part(data + begin, end - begin);
  }
  return total;
}
