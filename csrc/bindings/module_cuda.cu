// The Python module specdec_kernels._C_cuda: importing it adds CUDA implementations to torch.ops.specdec.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda(void) {
  static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
