// Threads for CPU kernels: kernels run on the OpenMP runtime that the process has already loaded, never on a second
// thread pool.
//
// Two pools whose idle threads spin compete for the cores (docs/threads.md has the measurement). So the core does not
// link against OpenMP. At start-up Python passes the path of torch's CPU library, and the entry point of the OpenMP
// runtime that it depends on is looked up by name. If there is none, work runs on plain threads, started per call.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fasttfm {

// Runs body(context, item) for every item in [0, items) on at most `threads` threads. Threads fetch items in order, one
// at a time. Any thread may run any item, so results must not depend on the thread, and partial sums are kept per item.
void parallel_items(int64_t items, int threads, void (*body)(void* context, int64_t item), void* context);

// `body` is any callable (item) -> void. It is not copied.
template <class Body>
inline void parallel_items(int64_t items, int threads, Body&& body) {
  using Plain = typename std::remove_reference<Body>::type;
  parallel_items(
      items, threads, [](void* context, int64_t item) { (*static_cast<Plain*>(context))(item); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Looks up the OpenMP runtime that the loaded library at `library_path` depends on. Returns its name, or "" and the
// reason in `reason`. Must not be called while kernels run.
const char* share_openmp(const char* library_path, const char** reason);
// What parallel_items() uses: "openmp" or "threads".
const char* parallel_runtime();
// Switches to plain threads, for benchmarks that compare the two and for forked children.
void use_plain_threads();

}  // namespace fasttfm
