// The Python module specdec_kernels._C: importing it registers every operator of torch.ops.specdec.
#include <Python.h>
#include <torch/csrc/stable/ops.h>

#include "parallel.h"

namespace specdec {

void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, function, context));
}

int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace specdec

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
