// The extension module fasttfm._C: build information, thread and instruction-set control, and the ops' bindings.
#include "binding.h"
#include "common/device.h"
#include "common/isa.h"
#include "common/parallel.h"

namespace fasttfm {
namespace {

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

PYBIND11_MODULE(_C, module) {
  module.doc() = "fasttfm's native core. Private: the checked entry points are in fasttfm.ops.";
  module.attr("version") = FASTTFM_VERSION;
  module.attr("compiler") = FASTTFM_COMPILER;
  module.attr("cuda_version") = cuda::compiled_version();
  module.attr("cuda_archs") = FASTTFM_CUDA_ARCHS_TEXT;

  module.def("active_isa", [] { return isa_name(active_isa()); });
  module.def("supported_isas", [] {
    py::list names;
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (isa_supported(isa)) names.append(isa_name(isa));
    return names;
  });
  module.def(
      "set_isa",
      [](const std::string& name) {
        if (!set_isa(parse_isa(name)))
          throw py::value_error("set_isa: name: expected one of supported_isas(), got '" + name + "'");
      },
      py::arg("name"));
  module.def(
      "share_openmp",
      [](const std::string& library_path) {
        const char* reason = "";
        const std::string runtime = share_openmp(library_path.c_str(), &reason);
        return std::make_pair(runtime, std::string(reason));
      },
      py::arg("library_path"));
  module.def("parallel_runtime", &parallel_runtime);
  module.def("use_plain_threads", &use_plain_threads);

  for (Binder bind : binders()) bind(module);
}

}  // namespace fasttfm
