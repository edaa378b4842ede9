// The extension module fasttfm._C: build information, instruction sets, threads, and the ops' bindings.
#include <stdexcept>
#include <string>
#include <utility>

#include "binding.h"
#include "common/cpu/blas.h"
#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/cuda/device.h"
#include "python.h"

namespace fasttfm {

namespace py = pybind11;

namespace {

std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

// Python's exception for StatusCode::does_not_fit. It is set as Python's error rather than thrown as a C++ type of its
// own, so that pybind11's functions and those of calls.cpp raise the same exception.
PyObject* does_not_fit = nullptr;

Isa parse_isa(const std::string& name) {
  if (name == "baseline") return Isa::baseline;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  throw py::value_error("set_isa: name: expected 'baseline', 'avx2' or 'avx512', got '" + name + "'");
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: return "baseline";
  }
  return "unknown";
}

}  // namespace

void raise_unless_ok(const Status& status) {
  switch (status.code) {
    case StatusCode::ok: return;
    case StatusCode::cuda_error: throw std::runtime_error(status.detail);
    case StatusCode::does_not_fit: PyErr_SetString(does_not_fit, status.detail); throw py::error_already_set();
    default: throw py::value_error(status.detail);
  }
}

void bind_constant(Module& module, const char* name, int64_t value) { module.python.attr(name) = value; }

BinderRegistration::BinderRegistration(Binder binder) { binders().push_back(binder); }

PYBIND11_MODULE(_C, python) {
  python.doc() = "fasttfm's native core. Private: the checked entry points are in fasttfm.ops.";
  python.attr("version") = FASTTFM_VERSION;
  python.attr("compiler") = FASTTFM_COMPILER;
  python.attr("cuda_version") = cuda::compiled_version();
  python.attr("cuda_archs") = FASTTFM_CUDA_ARCHS_TEXT;

  does_not_fit = PyErr_NewException("fasttfm._C.DoesNotFit", PyExc_RuntimeError, nullptr);
  python.attr("DoesNotFit") = py::handle(does_not_fit);
  python.def("driver_version", &cuda::driver_version);
  python.def("compute_capability", &cuda::compute_capability, py::arg("device"));
  python.def("block_memory", &cuda::block_memory, py::arg("device"));
  python.def("active_isa", [] { return isa_name(active_isa()); });
  python.def("supported_isas", [] {
    py::list names;
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (isa_supported(isa)) names.append(isa_name(isa));
    return names;
  });
  python.def(
      "set_isa",
      [](const std::string& name) {
        if (!set_isa(parse_isa(name)))
          throw py::value_error("set_isa: name: expected one of supported_isas(), got '" + name + "'");
      },
      py::arg("name"));
  python.def(
      "share_openmp",
      [](const std::string& library_path) {
        const char* reason = "";
        const std::string runtime = share_openmp(library_path.c_str(), &reason);
        return std::make_pair(runtime, std::string(reason));
      },
      py::arg("library_path"));
  python.def(
      "find_blas", [](const std::string& library_path) { return std::string(find_blas(library_path.c_str())); },
      py::arg("library_path"));
  python.def("parallel_runtime", &parallel_runtime);
  python.def("use_plain_threads", &use_plain_threads);

  bind_torch(python);
  bind_triton(python);
  bind_sequences(python);
  Module module{python};
  for (Binder bind : binders()) bind(module);
}

}  // namespace fasttfm
