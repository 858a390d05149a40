/* The main kernel of the Hopper backward in fp16: see sm90_backward_kernel.cuh. */
#include "sm90_backward_kernel.cuh"

namespace fmsa {

template fmsa_status launch_backward<__half, 64>(const backward_parameters &, bool, cudaStream_t);
template fmsa_status launch_backward<__half, 128>(const backward_parameters &, bool, cudaStream_t);

} // namespace fmsa
