// What Python reads from the library itself, beside the kernels that the files beside this one register.
#ifndef OMNI_GRPC_CUDA_ARCHS
#define OMNI_GRPC_CUDA_ARCHS ""
#endif

// The GPU architectures that the kernels were compiled for, such as "90a,100a": Python compares them with the
// machine's.
extern "C" __attribute__((visibility("default"))) const char omni_grpc_cuda_archs[] = OMNI_GRPC_CUDA_ARCHS;
