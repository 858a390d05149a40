/* The PTX instructions that the portable kernels use, one small function each. Everything here exists from compute
 * capability 8.0 on. Shared memory is addressed by the 32-bit numbers of shared_address(). */
#ifndef FMSA_CUDA_PTX_CUH
#define FMSA_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace fmsa {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- Copies from global to shared memory that run beside the arithmetic (cp.async). ---- */

/* Copies 16 bytes; writes zeros instead, without reading source, unless valid. */
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void *source, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

/* As cp_async_16(), in fewer instructions: a predicate, not a number of bytes, says that the source is absent, and any
 * address will do then. */
__device__ __forceinline__ void cp_async_16_unless(bool absent, uint32_t destination, const void *source) {
    asm volatile("{\n\t"
                 ".reg .pred absent;\n\t"
                 "setp.ne.u32 absent, %2, 0;\n\t"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;\n\t"
                 "}" ::"r"(destination),
                 "l"(source), "r"(uint32_t(absent))
                 : "memory");
}

/* As cp_async_16(), for 4 bytes. */
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void *source, bool valid) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

/* Closes the group of the copies issued by this thread since the last commit. */
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's newest groups are under way. A barrier must follow before other
 * threads read what was copied. */
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- Matrix fragments from shared memory (ldmatrix). Lane i gives the address of one 16-byte row: lanes 0-7 of
 * matrix 0, 8-15 of matrix 1, and so on. Lane i receives elements (i / 4, 2 * (i % 4) + {0, 1}) of each matrix, or of
 * its transpose. ---- */

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* ---- d += a * b on the tensor cores, fp32 accumulators.
 * m16n8k16: a is 16 x 16, row by row: a[0] rows 0-7, columns 0-7; a[1] rows 8-15, columns 0-7; a[2], a[3] the same for
 * columns 8-15 (four ldmatrix matrices). b is 16 x 8, column by column: b[0] rows 0-7, b[1] rows 8-15 (ldmatrix of
 * [n][k] memory, or ldmatrix.trans of [k][n] memory). d[0], d[1] are row lane / 4, columns 2 * (lane % 4) + {0, 1};
 * d[2], d[3] row lane / 4 + 8. ---- */

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* m16n8k8 of tf32: lane i holds a[0] = (i / 4, i % 4), a[1] = (i / 4 + 8, i % 4), a[2] = (i / 4, i % 4 + 4), a[3] =
 * (i / 4 + 8, i % 4 + 4); b0 = (i % 4, i / 4), b1 = (i % 4 + 4, i / 4). Operands must have been rounded by to_tf32. */
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- Plain accesses to shared memory, reductions in global memory. ---- */

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t address, float2 value) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

__device__ __forceinline__ float load_shared_4(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ float2 load_shared_8(uint32_t address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
    return value;
}

/* Adds four neighbouring values to global memory, in no order that one can rely on. address is a multiple of 16 bytes.
 * Compute capability 9.0 has one instruction for the four. */
__device__ __forceinline__ void reduce_add_4(float *address, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
#else
    atomicAdd(address, a);
    atomicAdd(address + 1, b);
    atomicAdd(address + 2, c);
    atomicAdd(address + 3, d);
#endif
}

/* ---- Conversions. ---- */

/* The bits of x rounded to tf32 (10 bits of mantissa), to nearest. */
__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

/* Two values rounded to 16 bits, the first in the low half: a pair of neighbouring elements of a fragment. */
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, __nv_bfloat16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, __half) {
    __half2 halves;
    memcpy(&halves, &pair, sizeof halves);
    return __half22float2(halves);
}

/* 2^x with a relative error of 2^-22; 2^-inf = 0. */
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- Reductions over the four lanes that hold one row of an accumulator. NaN is ignored by quad_max unless all four
 * are NaN. ---- */

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

} // namespace fmsa

#endif
