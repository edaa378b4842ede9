#include "pack/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(PackCopy, MEMBER)
#define FIELDS                                                                                        \
  FIELD(source), FIELD(target), FIELD(cu_seqlens), FIELD(sequences), FIELD(max_seqlen), FIELD(total), \
      FIELD(token_bytes), FIELD(threads)

FASTTFM_BINDING(pack) {
  bind_launcher(module, "pack_cpu", &cpu::pack, FIELDS);
  bind_launcher(module, "unpack_cpu", &cpu::unpack, FIELDS);
}

}  // namespace fasttfm
