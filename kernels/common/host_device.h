// The macro of functions that both C++ and CUDA call.
#pragma once

#ifdef __CUDACC__
#define FASTTFM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTTFM_HOST_DEVICE inline
#endif
