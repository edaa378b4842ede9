#include "common/cpu/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <thread>
#include <vector>

namespace fasttfm {
namespace {

// GNU's entry point for a parallel region; LLVM's and Intel's runtimes export it too.
using GompParallel = void (*)(void (*body)(void*), void* context, unsigned threads, unsigned flags);
std::atomic<GompParallel> gomp_parallel{nullptr};

// A forked child does not have the threads of its parent, and its copy of the OpenMP runtime would wait for them
// forever.
std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
  forked.store(true);
  use_plain_threads();
});

struct Region {
  void (*body)(void*, int64_t);
  void* context;
  int64_t items;
  std::atomic<int64_t> next{0};
};

void work(void* opaque) {
  auto* region = static_cast<Region*>(opaque);
  for (;;) {
    const int64_t item = region->next.fetch_add(1, std::memory_order_relaxed);
    if (item >= region->items) return;
    region->body(region->context, item);
  }
}

}  // namespace

void parallel_items(int64_t items, int threads, void (*body)(void*, int64_t), void* context) {
  if (items < threads) threads = static_cast<int>(items);
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) body(context, item);
    return;
  }
  Region region{body, context, items};
  if (GompParallel openmp = gomp_parallel.load(std::memory_order_acquire)) {
    openmp(work, &region, static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) helpers.emplace_back(work, &region);
  } catch (...) {  // out of memory or threads: the work runs on the threads that have started, and on this one
  }
  work(&region);
  for (std::thread& helper : helpers) helper.join();
}

const char* share_openmp(const char* library_path, const char** reason) {
  *reason = "";
  if (forked.load()) {
    *reason = "this process is a fork, in which OpenMP's threads do not exist";
    return "";
  }
  void* library = dlopen(library_path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    *reason = "the library is not loaded in this process";
    return "";
  }
  // dlsym() with a handle searches the library and its dependencies, so this finds the library's runtime whatever its
  // file name is.
  void* symbol = dlsym(library, "GOMP_parallel");
  dlclose(library);
  if (symbol == nullptr) {
    *reason = "the library depends on no OpenMP runtime with GOMP_parallel";
    return "";
  }
  gomp_parallel.store(reinterpret_cast<GompParallel>(symbol), std::memory_order_release);
  static Dl_info info;
  return dladdr(symbol, &info) != 0 ? info.dli_fname : "unknown";
}

const char* parallel_runtime() { return gomp_parallel.load() != nullptr ? "openmp" : "threads"; }

void use_plain_threads() { gomp_parallel.store(nullptr); }

}  // namespace fasttfm
