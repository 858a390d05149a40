/* The PTX instructions of compute capability 9.0a that the Hopper kernels use, one small function each: barriers in
 * shared memory, copies by the TMA, warpgroup products (wgmma) and the registers of warpgroups. Shared memory is
 * addressed by the 32-bit numbers of shared_address().
 *
 * A wait never traps: __trap() in a wait loop makes ptxas ignore the register budget of setmaxnreg. */
#ifndef FMSA_CUDA_SM90_CUH
#define FMSA_CUDA_SM90_CUH

#include <cuda.h>
#include <stdint.h>

#include "ptx.cuh"

namespace fmsa {

/* ---- Barriers in shared memory (mbarrier). A barrier's phase ends when all arrivals and all announced bytes are in;
 * a wait for parity p returns once the phase of that parity has ended. A fresh barrier is in phase 0: waiting for
 * parity 1 returns at once. ---- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Makes the barriers that this thread initialised visible to the TMA. A __syncthreads() must follow. */
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives and announces bytes that copies will bring. */
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* This thread's earlier cp.async copies arrive at the barrier when they are complete; counts as one arrival. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Barriers among `threads` threads of the block (bar.sync), numbered 1 ... 15; 0 is __syncthreads(). */
__device__ __forceinline__ void named_barrier_sync(uint32_t number, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t number, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* ---- Grids of a stream that follow each other closely (programmatic dependent launch). ---- */

/* In a grid of launch_close(), which may start before the one before it in the stream has ended: waits until that has
 * ended and what it wrote is visible. */
__device__ __forceinline__ void wait_for_grid_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Lets the next grid of the stream, if it is one of launch_close(), begin where multiprocessors become free. */
__device__ __forceinline__ void allow_next_grid() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- Copies by the TMA. One thread issues them. ---- */

/* Orders this thread's ordinary accesses to shared memory before later ones by the TMA and wgmma. */
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* A box of a tensor into shared memory; its bytes count at the barrier, those outside the tensor too (they are 0). */
__device__ __forceinline__ void tma_load_2d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5}], [%2];" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6, %7}], [%2];" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t source, int32_t c0, int32_t c1,
                                             int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/* Contiguous bytes, a multiple of 16, as are both addresses. */
__device__ __forceinline__ void bulk_load(uint32_t destination, const void *source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void *destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(bytes)
                 : "memory");
}

/* Adds shared memory to global memory, in no order that one can rely on. */
__device__ __forceinline__ void bulk_reduce_add(float *destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_reduce_add(__half *destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

/* Adds eight values, in pairs as pack_pair() makes them, in no order that one can rely on. address is a multiple of 16
 * bytes. */
__device__ __forceinline__ void reduce_add_8(__half *address, const uint32_t (&pair)[4]) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(pair[0]),
                 "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                 : "memory");
}

/* Closes the group of the stores and reductions that this thread has issued since the last one. */
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most `pending` groups of this thread are under way: read means that their shared memory may be
 * written again, complete that their writes are there. */
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

template <int pending>
__device__ __forceinline__ void bulk_wait_complete() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

/* Hints to L2 for the copies below that take one: what is read or written once may leave first, what others will read
 * again soon should stay. */
constexpr uint64_t l2_leave_first = 0x12f0000000000000ull, l2_stay = 0x14f0000000000000ull;

__device__ __forceinline__ void tma_load_3d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, uint64_t hint) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(hint)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap *map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, uint64_t hint) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
                 : "memory");
}

__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t source, int32_t c0, int32_t c1,
                                             int32_t c2, int32_t c3, uint64_t hint) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
                 "%6;" ::"l"(map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
                 : "memory");
}

__device__ __forceinline__ void bulk_load(uint32_t destination, const void *source, uint32_t bytes, uint32_t barrier,
                                          uint64_t hint) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier), "l"(hint)
                 : "memory");
}

/* ---- Warpgroups. ---- */

/* The register budget of each thread of a warpgroup, a multiple of 8. All four warps call it. */
template <int registers>
__device__ __forceinline__ void warpgroup_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void warpgroup_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

/* Orders this warpgroup's writes of accumulator and operand registers before the next wgmma. */
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* Closes the group of the products issued since the last one. */
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` groups are under way. */
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Keeps the compiler from moving accesses of these registers across this point: before a wgmma_fence(), and after a
 * wgmma_wait(). */
template <int n>
__device__ __forceinline__ void pin(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" : "+f"(x[i])::"memory");
}

template <int n>
__device__ __forceinline__ void pin(uint32_t (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" : "+r"(x[i])::"memory");
}

/* Products of pairs of bf16, rounded. */
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* Keeps the compiler from taking an address apart into what all threads share and the rest, which it would add anew
 * each time. */
__device__ __forceinline__ const char *pinned(const void *address) {
    asm volatile("" : "+l"(address));
    return static_cast<const char *>(address);
}

/* The value of lane 0, which the compiler then knows to be the same in the whole warp. */
__device__ __forceinline__ int32_t uniform(int32_t x) {
    return __shfl_sync(0xffffffffu, x, 0);
}

/* A load that happens even where nobody uses the value: it brings the line into the first-level cache. */
__device__ __forceinline__ float load_cached(const float *from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

/* 16 bytes of shared memory by ordinary accesses. */
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

/* log2(x) with an absolute error of about 2^-22; x of a subnormal or 0 is -inf. */
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Stores four 8x8 matrices of 16-bit elements (the layout of ldmatrix), or their transposes. */
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/* ---- Products. ---- */

/* Describes an operand in shared memory under the 128-byte swizzle (rows of 128 bytes, 8 of them an atom of 1,024
 * bytes, which its address is a multiple of). Offsets in bytes:
 *   K-major (A [m][k], B [n][k]): stride = from 8 rows to the next 8, leading unused. The next k16 lies 32 bytes on.
 *   MN-major (A [k][m], B [k][n]; the trans_ flags): stride = from 8 k to the next 8, leading = from 64 columns of m or
 *   n to the next 64. The next k16 lies 2 strides on.
 * Add (bytes >> 4) to move. */
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading, uint32_t stride) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}

#define FMSA_REGISTERS_4 "{%0, %1, %2, %3}"
#define FMSA_KEEP_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FMSA_NEW_4(d) "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
#define FMSA_REGISTERS_32                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "                 \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define FMSA_KEEP_32(d)                                                                                                \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),        \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FMSA_NEW_32(d)                                                                                                 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),        \
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),         \
        "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]),        \
        "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
#define FMSA_REGISTERS_64                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "                 \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "                  \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "                  \
    "%59, %60, %61, %62, %63}"
#define FMSA_KEEP_64(d)                                                                                                \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),        \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FMSA_NEW_64(d)                                                                                                 \
    "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),        \
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),         \
        "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]),        \
        "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), "=f"(d[32]),        \
        "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), "=f"(d[40]),        \
        "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]), "=f"(d[48]),        \
        "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]), "=f"(d[56]),        \
        "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])

/* d (+)= a * b with 64 rows and n columns, fp32 accumulators. Warp w of the warpgroup holds rows 16 * w ... + 15: with
 * g = lane / 4, c = 2 * (lane % 4), d[4 * j + {0, 1}] are row g, columns 8 * j + c + {0, 1}; d[4 * j + {2, 3}] row g
 * + 8. A from registers is laid out like four ldmatrix matrices: a[0] row g, columns c, c + 1; a[1] row g + 8; a[2],
 * a[3] the same 8 columns on. So an accumulator, rounded in pairs, is an A operand: k16 number i takes pairs 4 * i ...
 * + 3.
 *
 *   wgmma       d += a * b           wgmma_if    d = accumulate ? d + a * b : a * b
 *   wgmma_new   d = a * b, where the old value of d is dead (holding it would cost registers) */

#define FMSA_AFTER_4_0 "%4"
#define FMSA_AFTER_4_1 "%5"
#define FMSA_AFTER_4_2 "%6"
#define FMSA_AFTER_4_3 "%7"
#define FMSA_AFTER_4_4 "%8"
#define FMSA_AFTER_4_5 "%9"
#define FMSA_AFTER_4_6 "%10"
#define FMSA_AFTER_32_0 "%32"
#define FMSA_AFTER_32_1 "%33"
#define FMSA_AFTER_32_2 "%34"
#define FMSA_AFTER_32_3 "%35"
#define FMSA_AFTER_32_4 "%36"
#define FMSA_AFTER_32_5 "%37"
#define FMSA_AFTER_32_6 "%38"
#define FMSA_AFTER_64_0 "%64"
#define FMSA_AFTER_64_1 "%65"
#define FMSA_AFTER_64_2 "%66"
#define FMSA_AFTER_64_3 "%67"
#define FMSA_AFTER_64_4 "%68"
#define FMSA_AFTER_64_5 "%69"
#define FMSA_AFTER_64_6 "%70"
#define FMSA_AFTER(count, i) FMSA_AFTER_##count##_##i

#define FMSA_DEFINE_WGMMA(T, type, n, count)                                                                           \
    template <bool trans_a = false, bool trans_b = false>                                                              \
    __device__ __forceinline__ void wgmma(float (&d)[count], uint64_t a, uint64_t b, T) {                              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " FMSA_REGISTERS_##count        \
                     ", " FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", 1, 1, 1, " FMSA_AFTER(                     \
                         count, 2) ", " FMSA_AFTER(count, 3) ";"                                                       \
                     : FMSA_KEEP_##count(d)                                                                            \
                     : "l"(a), "l"(b), "n"(trans_a), "n"(trans_b));                                                    \
    }                                                                                                                  \
    template <bool trans_a = false, bool trans_b = false>                                                              \
    __device__ __forceinline__ void wgmma_new(float (&d)[count], uint64_t a, uint64_t b, T) {                          \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " FMSA_REGISTERS_##count        \
                     ", " FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", 0, 1, 1, " FMSA_AFTER(                     \
                         count, 2) ", " FMSA_AFTER(count, 3) ";"                                                       \
                     : FMSA_NEW_##count(d)                                                                             \
                     : "l"(a), "l"(b), "n"(trans_a), "n"(trans_b));                                                    \
    }                                                                                                                  \
    template <bool trans_a = false, bool trans_b = false>                                                              \
    __device__ __forceinline__ void wgmma_if(float (&d)[count], uint64_t a, uint64_t b, int accumulate, T) {           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " FMSA_AFTER(count, 2) ", 0;\n"                                 \
                                                                              "wgmma.mma_async.sync.aligned.m64n" #n   \
                                                                              "k16.f32." type "." type                 \
                                                                              " " FMSA_REGISTERS_##count               \
                     ", " FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", p, 1, 1, " FMSA_AFTER(                     \
                         count, 3) ", " FMSA_AFTER(count, 4) ";\n}"                                                    \
                     : FMSA_KEEP_##count(d)                                                                            \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(trans_a), "n"(trans_b));                                   \
    }                                                                                                                  \
    template <bool trans_b = false>                                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,       \
                                          uint64_t b, T) {                                                             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " FMSA_REGISTERS_##count        \
                     ", {" FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", " FMSA_AFTER(count, 2) ", " FMSA_AFTER(   \
                         count, 3) "}, " FMSA_AFTER(count, 4) ", 1, 1, 1, " FMSA_AFTER(count, 5) ";"                   \
                     : FMSA_KEEP_##count(d)                                                                            \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(trans_b));                                      \
    }                                                                                                                  \
    template <bool trans_b = false>                                                                                    \
    __device__ __forceinline__ void wgmma_new(float (&d)[count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,   \
                                              uint64_t b, T) {                                                         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " FMSA_REGISTERS_##count        \
                     ", {" FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", " FMSA_AFTER(count, 2) ", " FMSA_AFTER(   \
                         count, 3) "}, " FMSA_AFTER(count, 4) ", 0, 1, 1, " FMSA_AFTER(count, 5) ";"                   \
                     : FMSA_NEW_##count(d)                                                                             \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(trans_b));                                      \
    }                                                                                                                  \
    template <bool trans_b = false>                                                                                    \
    __device__ __forceinline__ void wgmma_if(float (&d)[count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,    \
                                             uint64_t b, int accumulate, T) {                                          \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " FMSA_AFTER(count, 5) ", 0;\n"                                 \
                                                                              "wgmma.mma_async.sync.aligned.m64n" #n   \
                                                                              "k16.f32." type "." type                 \
                                                                              " " FMSA_REGISTERS_##count               \
                     ", {" FMSA_AFTER(count, 0) ", " FMSA_AFTER(count, 1) ", " FMSA_AFTER(count, 2) ", " FMSA_AFTER(   \
                         count, 3) "}, " FMSA_AFTER(count, 4) ", p, 1, 1, " FMSA_AFTER(count, 6) ";\n}"                \
                     : FMSA_KEEP_##count(d)                                                                            \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(trans_b));                     \
    }

FMSA_DEFINE_WGMMA(__nv_bfloat16, "bf16", 8, 4)
FMSA_DEFINE_WGMMA(__nv_bfloat16, "bf16", 64, 32)
FMSA_DEFINE_WGMMA(__nv_bfloat16, "bf16", 128, 64)
FMSA_DEFINE_WGMMA(__half, "f16", 8, 4)
FMSA_DEFINE_WGMMA(__half, "f16", 64, 32)
FMSA_DEFINE_WGMMA(__half, "f16", 128, 64)
#undef FMSA_DEFINE_WGMMA

/* d (+)= a * b in FP8 E4M3, 128 columns, k32, A from registers: with g = lane / 4, c = 4 * (lane % 4), a[0] is row g,
 * columns c ... c + 3, the first in the lowest byte; a[1] row g + 8; a[2], a[3] the same 16 columns on. */
#define FMSA_WGMMA_E4M3(d, a, b, keep, accumulate)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " FMSA_REGISTERS_64                            \
                 ", {%64, %65, %66, %67}, %68, " accumulate ", 1, 1;"                                                  \
                 : keep(d)                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    FMSA_WGMMA_E4M3(d, a, b, FMSA_KEEP_64, "1");
}

__device__ __forceinline__ void wgmma_e4m3_new(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    FMSA_WGMMA_E4M3(d, a, b, FMSA_NEW_64, "0");
}
#undef FMSA_WGMMA_E4M3

} // namespace fmsa

#endif
