// The result of a launcher. Launchers never throw and never print; csrc/ converts a status to an exception.
#pragma once

#include <cstdint>

namespace fasttfm {

// does_not_fit: the blocks of a cooperative launch do not all fit on the SMs that are available to the stream. Nothing
// was launched, and the caller may use another backend.
enum class StatusCode : int32_t { ok, unknown_dtype, bad_size, bad_value, bad_alignment, cuda_error, does_not_fit };

struct Status {
  StatusCode code = StatusCode::ok;
  const char* detail = "";  // a string with static lifetime: the cause, or CUDA's error string
};

inline Status bad_size(const char* detail) { return {StatusCode::bad_size, detail}; }
inline Status unknown_dtype() {
  return {StatusCode::unknown_dtype, "dtype code is not 0 (fp32), 1 (bf16) or 2 (fp16)"};
}

}  // namespace fasttfm
