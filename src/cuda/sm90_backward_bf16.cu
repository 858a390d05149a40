/* The main kernel of the Hopper backward in bf16: see sm90_backward_kernel.cuh. */
#include "sm90_backward_kernel.cuh"

namespace fmsa {

template fmsa_status launch_backward<__nv_bfloat16, 64>(const backward_parameters &, bool, cudaStream_t);
template fmsa_status launch_backward<__nv_bfloat16, 128>(const backward_parameters &, bool, cudaStream_t);

} // namespace fmsa
