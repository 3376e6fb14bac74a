// A simulated libcuda.so.1 with the functions that Triton's driver (triton/backends/nvidia/driver.c) calls. Modules are read as a driver
// reads them: registers, required block and sizes of parameters come from the cubin. Launches are checked against these and the
// device, and the last one is written down with the bytes of its parameters. No kernel runs. tests/launch/test_triton_driver.py
#include <cuda.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMostParameters = 512, kMostStreams = 16, kDefaultShared = 49152, kRegisters = 65536 };
// Attributes of .nv.info, and the form of those that have their size in front of them.
enum { kSized = 4, kParameter = 0x17, kMostThreads = 0x05, kRequiredThreads = 0x10, kRegisterCount = 0x2f };

struct CUctx_st {
  int device;
};

// A module and its only kernel.
struct CUmod_st {
  int device, loaded;
  const unsigned char* image;
  char name[512];
  int parameters, registers, most_shared;
  unsigned sizes[kMostParameters];
  unsigned block[3], most_threads;  // block: what the code was compiled for, or zeros
};

static struct {
  int capability, devices, most_shared, processors;
  int (*current_device)(void);
  long launches;
  struct {
    void* handle;
    int device;
  } streams[kMostStreams];
  char last[65536];
} state = {.capability = 90, .devices = 1, .most_shared = 232448, .processors = 132};
static struct CUctx_st contexts[64];

static int current(void) { return state.current_device ? state.current_device() : 0; }
static CUcontext context_of(int device) {
  contexts[device].device = device;
  return &contexts[device];
}

// -- for the test ------------------------------------------------------------------------------------------------------

void simulated_gpu_gpu(int capability, int devices, int most_shared, int processors, int (*current_device)(void)) {
  state.capability = capability, state.devices = devices, state.most_shared = most_shared, state.processors = processors;
  state.current_device = current_device;
}
int simulated_gpu_stream(void* handle, int device) {
  for (int each = 0; each < kMostStreams; ++each)
    if (!state.streams[each].handle) {
      state.streams[each].handle = handle, state.streams[each].device = device;
      return 1;
    }
  return 0;
}
long simulated_gpu_launches(void) { return state.launches; }
const char* simulated_gpu_last(void) { return state.last; }

// -- modules -----------------------------------------------------------------------------------------------------------

static const Elf64_Shdr* section(const unsigned char* image, const char* name) {
  const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
  const Elf64_Shdr* all = (const Elf64_Shdr*)(image + head->e_shoff);
  const char* names = (const char*)image + all[head->e_shstrndx].sh_offset;
  for (int each = 0; each < head->e_shnum; ++each)
    if (strcmp(names + all[each].sh_name, name) == 0) return &all[each];
  return NULL;
}

static unsigned symbol(const unsigned char* image, const char* name) {
  const Elf64_Shdr *table = section(image, ".symtab"), *text = section(image, ".strtab");
  if (!table || !text) return 0;
  const Elf64_Sym* all = (const Elf64_Sym*)(image + table->sh_offset);
  for (unsigned each = 0; each < table->sh_size / sizeof *all; ++each)
    if (strcmp((const char*)image + text->sh_offset + all[each].st_name, name) == 0) return each;
  return 0;
}

static unsigned word(const unsigned char* from, int place) {
  unsigned value;
  memcpy(&value, from + 4 * place, 4);
  return value;
}

// Takes one attribute of .nv.info into the module; own: of this kernel. Returns whether it fits.
static int take(CUmodule made, int own, unsigned kernel, unsigned attribute, const unsigned char* value) {
  if (attribute == kRegisterCount && word(value, 0) == kernel) made->registers = (int)word(value, 1);
  if (!own) return 1;
  if (attribute == kMostThreads) made->most_threads = word(value, 0) * word(value, 1) * word(value, 2);
  if (attribute == kRequiredThreads)
    for (int axis = 0; axis < 3; ++axis) made->block[axis] = word(value, axis);
  if (attribute == kParameter) {
    const unsigned ordinal = word(value, 1) & 0xffff;
    if (ordinal >= kMostParameters) return 0;
    made->sizes[ordinal] = word(value, 2) >> 18;
    ++made->parameters;
  }
  return 1;
}

static int read_attributes(CUmodule made, const char* name, int own, unsigned kernel) {
  const Elf64_Shdr* found = section(made->image, name);
  if (!found) return 0;
  const unsigned char *at = made->image + found->sh_offset, *end = at + found->sh_size;
  while (at + 4 <= end) {
    const unsigned form = at[0], attribute = at[1], size = at[2] | at[3] << 8;
    at += 4;
    if (form != kSized) continue;
    if (!take(made, own, kernel, attribute, at)) return 0;
    at += size;
  }
  return 1;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const Elf64_Ehdr* head = image;
  if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine != 190) return CUDA_ERROR_INVALID_IMAGE;
  const unsigned compiled_for = (head->e_ident[EI_ABIVERSION] >= 8 ? head->e_flags >> 8 : head->e_flags) & 0xff;
  if (compiled_for != (unsigned)state.capability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = calloc(1, sizeof **module);
  if (!*module) return CUDA_ERROR_OUT_OF_MEMORY;
  (*module)->device = current(), (*module)->loaded = 1, (*module)->image = image, (*module)->most_shared = kDefaultShared;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  char place[600];
  snprintf(place, sizeof place, ".text.%s", name);
  if (!section(module->image, place)) return CUDA_ERROR_NOT_FOUND;
  snprintf(module->name, sizeof module->name, "%s", name);
  snprintf(place, sizeof place, ".nv.info.%s", name);
  const unsigned kernel = symbol(module->image, name);
  if (!read_attributes(module, ".nv.info", 0, kernel) || !read_attributes(module, place, 1, kernel)) return CUDA_ERROR_INVALID_IMAGE;
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
// Its memory stays, so that a launch of an unloaded kernel is seen.
CUresult cuModuleUnload(CUmodule module) {
  if (!module->loaded) return CUDA_ERROR_INVALID_HANDLE;
  module->loaded = 0;
  return CUDA_SUCCESS;
}

// Threads of a block for which the registers suffice: a warp takes them in units of 256.
static int most_threads(CUmodule kernel) {
  const int of_a_warp = (kernel->registers * 32 + 255) / 256 * 256;
  const int fit = of_a_warp ? kRegisters / of_a_warp * 32 : 1024;
  const int most = kernel->most_threads ? (int)kernel->most_threads : 1024;
  return fit < most ? fit : most;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  CUmodule kernel = (CUmodule)function;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kernel->registers; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = most_threads(kernel); return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = 0; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}
// Modes of shared memory, which drivers before CUDA 13.2 do not have, are not among what it knows.
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  if (value < 0 || value > state.most_shared) return CUDA_ERROR_INVALID_VALUE;
  ((CUmodule)function)->most_shared = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  (void)function, (void)config;
  return CUDA_SUCCESS;
}

// -- launches ----------------------------------------------------------------------------------------------------------

static CUresult checked(const CUlaunchConfig* config, CUmodule kernel) {
  if (!kernel->loaded || kernel->device != current()) return CUDA_ERROR_INVALID_HANDLE;
  for (int each = 0; each < kMostStreams && config->hStream; ++each) {
    if (state.streams[each].handle == (void*)config->hStream && state.streams[each].device == current()) break;
    if (each + 1 == kMostStreams) return CUDA_ERROR_INVALID_HANDLE;
  }
  const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  const int required = kernel->block[0] != 0, same = memcmp(block, kernel->block, sizeof block) == 0;
  const unsigned long threads = (unsigned long)block[0] * block[1] * block[2];
  if (threads < 1 || threads > 1024 || (required && !same)) return CUDA_ERROR_INVALID_VALUE;
  if (threads > (unsigned long)most_threads(kernel)) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (config->gridDimX < 1 || config->gridDimX > 2147483647u) return CUDA_ERROR_INVALID_VALUE;
  if (config->gridDimY < 1 || config->gridDimY > 65535u) return CUDA_ERROR_INVALID_VALUE;
  if (config->gridDimZ < 1 || config->gridDimZ > 65535u) return CUDA_ERROR_INVALID_VALUE;
  return config->sharedMemBytes > (unsigned)kernel->most_shared ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Writes "kernel device stream grid block shared attributes parameters", parameters as hexadecimal bytes in their order in memory.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  CUmodule kernel = (CUmodule)function;
  const CUresult error = extra ? CUDA_ERROR_INVALID_VALUE : checked(config, kernel);
  if (error != CUDA_SUCCESS) return error;
  ++state.launches;
  char *at = state.last, *end = at + sizeof state.last;
  at += snprintf(
      at, end - at, "%s %d %llu %u,%u,%u %u,%u,%u %u %u ", kernel->name, current(), (unsigned long long)(size_t)config->hStream,
      config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
      config->sharedMemBytes, config->numAttrs);
  for (int each = 0; each < kernel->parameters; ++each) {
    const unsigned char* bytes = parameters[each];
    if (each) *at++ = ',';
    for (unsigned place = 0; place < kernel->sizes[each] && end - at > 8; ++place) at += snprintf(at, end - at, "%02x", bytes[place]);
  }
  *at = 0;
  return CUDA_SUCCESS;
}

// -- devices, contexts and the rest ------------------------------------------------------------------------------------

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = state.devices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= state.devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (device < 0 || device >= state.devices) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = state.capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = state.capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = state.most_shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = state.most_shared + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = kRegisters; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = state.processors; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 1; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (device < 0 || device >= state.devices) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}
// The current context is that of torch's current device, whose own runtime would have set it.
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current());
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return context->device == current() ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  (void)limit;
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  (void)limit, (void)value;
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  (void)stream;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
// Memory of a device has one address everywhere. The simulated driver has checked its device.
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  memcpy(value, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
    case CUDA_ERROR_INVALID_HANDLE: *text = "invalid resource handle"; break;
    case CUDA_ERROR_INVALID_IMAGE: *text = "device kernel image is invalid"; break;
    case CUDA_ERROR_INVALID_DEVICE: *text = "invalid device ordinal"; break;
    case CUDA_ERROR_NO_BINARY_FOR_GPU: *text = "no kernel image is available for execution on the device"; break;
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: *text = "too many resources requested for launch"; break;
    case CUDA_ERROR_NOT_FOUND: *text = "named symbol not found"; break;
    default: *text = "another error"; break;
  }
  return CUDA_SUCCESS;
}
