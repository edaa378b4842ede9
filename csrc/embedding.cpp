#include "embedding/op.h"

#include "binding.h"

namespace fasttfm {

#define FORWARD(MEMBER) FASTTFM_FIELD(EmbeddingForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(EmbeddingBackward, MEMBER)
#define TABLE(MEMBER) FASTTFM_FIELD(EmbeddingTableBackward, MEMBER)
#define ROWS(FIELD)                                                                                                    \
  FIELD(word_table), FIELD(position_table), FIELD(segment_table), FIELD(ids), FIELD(position_ids), FIELD(segment_ids), \
      FIELD(cu_seqlens), FIELD(weight), FIELD(seed), FIELD(sequences), FIELD(tokens_per_sequence), FIELD(rows),        \
      FIELD(columns), FIELD(threshold), FIELD(scale), FIELD(layer_norm), FIELD(table_dtype), FIELD(dtype),             \
      FIELD(threads)

FASTTFM_BINDING(embedding) {
  bind_workspace(module, "embedding_workspace", &cpu::embedding_workspace);
  bind_launcher(module, "embedding_forward_cpu", &cpu::embedding_forward, ROWS(FORWARD), FORWARD(bias), FORWARD(y),
                FORWARD(mean), FORWARD(rstd), FORWARD(eps));
  bind_launcher(module, "embedding_backward_cpu", &cpu::embedding_backward, ROWS(BACKWARD), BACKWARD(dy),
                BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx), BACKWARD(positions), BACKWARD(dweight), BACKWARD(dbias),
                BACKWARD(workspace));
  bind_launcher(module, "embedding_table_backward_cpu", &cpu::embedding_table_backward, TABLE(dx), TABLE(indices),
                TABLE(dtable), TABLE(first), TABLE(next), TABLE(rows), TABLE(columns), TABLE(table_rows),
                TABLE(excluded), TABLE(dtype), TABLE(threads));
}

}  // namespace fasttfm
