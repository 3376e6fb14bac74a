// A simulated CUDA runtime, with torch's device guard and streams, linked into csrc/bindings/kv_cache_cuda.cu
// as nvcc compiled it. Launches are checked as a driver checks them and written down; then the threads of the kernel
// run on the host, one after the other, on the arguments that the launch packed. tests/launch/test_cuda_extension.py
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "kv_cache/thread_work.h"

namespace {

constexpr int kDevices = 2;
// Handles that no other device has.
void* stream_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(0x1000 + device)); }

struct State {
  int device = 0;
  cudaError_t error = cudaSuccess;
  cudaError_t next = cudaSuccess;  // of the next launch
  std::map<const void*, std::string> kernels;
  std::string launches;  // one a line: kernel grid block shared device stream
  struct {
    dim3 grid, block;
    size_t shared;
    void* stream;
  } call;
};
State& state() {
  static State one;
  return one;
}

struct Listed {
  specdec::CacheLayout each[64];
};
struct Sixteen {
  uint64_t low, high;
};

template <class T>
const T& argument(void** arguments, int place) {
  return *static_cast<const T*>(arguments[place]);
}

template <class Thread>
void each_thread(dim3 grid, dim3 block, const Thread& thread) {
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x)
      for (unsigned t = 0; t < block.x; ++t) thread(x, y, t);
}

void commit_thread(
    const specdec::CacheLayout& from, const specdec::CacheLayout& to, const specdec::CommitArguments& a, unsigned x, unsigned y, unsigned t,
    unsigned threads) {
  if (y == 0 && t == 0) specdec::advance_length(a, x);
  const auto unit = specdec::copy_unit(specdec::alignment_bits(from) | specdec::alignment_bits(to));
  if (unit == 16) return specdec::commit_units<Sixteen>(from, to, a, x, t, threads);
  if (unit >= 4) return specdec::commit_units<uint32_t>(from, to, a, x, t, threads);
  specdec::commit_units<uint8_t>(from, to, a, x, t, threads);
}

template <class Unit>
void stage(dim3 grid, dim3 block, void** arguments) {
  const auto& a = argument<specdec::StageArguments>(arguments, 0);
  each_thread(grid, block, [&](unsigned x, unsigned y, unsigned t) { specdec::stage_units<Unit>(a, x, static_cast<int>(y), t, block.x); });
}

// What the kernel of this (mangled) name does, or false for a name that is not known.
bool run(const std::string& name, dim3 grid, dim3 block, void** arguments) {
  const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (is("commit_listed_kernel")) {
    const auto& caches = argument<Listed>(arguments, 0);
    const auto& a = argument<specdec::CommitArguments>(arguments, 1);
    each_thread(grid, block, [&](unsigned x, unsigned y, unsigned t) { commit_thread(caches.each[y], caches.each[y], a, x, y, t, block.x); });
  } else if (is("commit_table_kernel")) {
    const auto *from = argument<const specdec::CacheLayout*>(arguments, 0), *to = argument<const specdec::CacheLayout*>(arguments, 1);
    const auto& a = argument<specdec::CommitArguments>(arguments, 2);
    each_thread(grid, block, [&](unsigned x, unsigned y, unsigned t) { commit_thread(from[y], to[y], a, x, y, t, block.x); });
  } else if (is("commit_pages_kernel")) {
    const auto& a = argument<specdec::CommitArguments>(arguments, 0);
    each_thread(grid, block, [&](unsigned x, unsigned, unsigned t) {
      if (t == 0) specdec::advance_length(a, x);
      specdec::commit_page_ids(a, x, t, block.x);
    });
  } else if (is("stage_kernelI5uint4E")) {
    stage<Sixteen>(grid, block, arguments);
  } else if (is("stage_kernelI5uint2E")) {
    stage<uint64_t>(grid, block, arguments);
  } else if (is("stage_kernelIjE")) {
    stage<uint32_t>(grid, block, arguments);
  } else if (is("stage_kernelItE")) {
    stage<uint16_t>(grid, block, arguments);
  } else if (is("stage_kernelIhE")) {
    stage<uint8_t>(grid, block, arguments);
  } else {
    return false;
  }
  return true;
}

// Limits of a GPU; a stream belongs to the current device.
cudaError_t checked(dim3 grid, dim3 block, size_t shared, void* stream) {
  const bool grid_fits = grid.x >= 1 && grid.x <= 2147483647u && grid.y >= 1 && grid.y <= 65535u && grid.z >= 1 && grid.z <= 65535u;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!grid_fits || threads < 1 || threads > 1024 || shared > 49152) return cudaErrorInvalidConfiguration;
  return stream == stream_of(state().device) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
  State& now = state();
  const auto found = now.kernels.find(kernel);
  cudaError_t error = found == now.kernels.end() ? cudaErrorInvalidDeviceFunction : now.next;
  now.next = cudaSuccess;
  if (error == cudaSuccess) error = checked(grid, block, shared, stream);
  if (error == cudaSuccess && !run(found->second, grid, block, arguments)) error = cudaErrorInvalidDeviceFunction;
  if (error != cudaSuccess) return now.error = error;
  const auto three = [](dim3 d) { return std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z); };
  now.launches += found->second + " " + three(grid) + " " + three(block) + " " + std::to_string(shared) + " " + std::to_string(now.device) +
                  " " + std::to_string(reinterpret_cast<intptr_t>(stream)) + "\n";
  return cudaSuccess;
}

}  // namespace

#define RUNTIME extern "C" __attribute__((visibility("default")))

// For the test.
RUNTIME int simulated_gpu_device() { return state().device; }
RUNTIME void simulated_gpu_set_device(int device) { state().device = device; }
RUNTIME intptr_t simulated_gpu_stream(int device) { return reinterpret_cast<intptr_t>(stream_of(device)); }
RUNTIME void simulated_gpu_fail(int error) { state().next = static_cast<cudaError_t>(error); }
RUNTIME const char* simulated_gpu_launches() { return state().launches.c_str(); }
RUNTIME void simulated_gpu_clear() { state().launches.clear(); }

// What nvcc's host code calls.
RUNTIME void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
RUNTIME void __cudaRegisterFatBinaryEnd(void**) {}
RUNTIME void __cudaUnregisterFatBinary(void**) {}
RUNTIME char __cudaInitModule(void**) { return 1; }
RUNTIME void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
RUNTIME void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  state().kernels[host] = name;
}
RUNTIME unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  state().call = {grid, block, shared, stream};
  return 0;
}
RUNTIME cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const auto& call = state().call;
  *grid = call.grid, *block = call.block, *shared = call.shared;
  std::memcpy(stream, &call.stream, sizeof(void*));
  return cudaSuccess;
}
RUNTIME cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
RUNTIME cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, stream);
}
RUNTIME cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch(host, grid, block, arguments, shared, stream);
}
RUNTIME cudaError_t cudaGetLastError() {
  const cudaError_t error = state().error;
  state().error = cudaSuccess;
  return error;
}
RUNTIME const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration    ? "invalid configuration argument"
         : error == cudaErrorInvalidResourceHandle ? "invalid resource handle"
         : error == cudaErrorInvalidDeviceFunction ? "invalid device function"
                                                   : "another error";
}

// What torch's stable ABI asks a CUDA build of torch for.
RUNTIME int32_t aoti_torch_create_device_guard(int32_t device, void** guard) {
  if (device < 0 || device >= kDevices) return 1;
  *guard = new int(state().device);
  state().device = device;
  return 0;
}
RUNTIME int32_t aoti_torch_delete_device_guard(void* guard) {
  const int* former = static_cast<int*>(guard);
  state().device = *former;
  delete former;
  return 0;
}
RUNTIME int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = stream_of(device);
  return 0;
}
