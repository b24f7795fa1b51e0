/* NVIDIA's driver for benchmarks.paging: counts the memory of a device that is not there, and does nothing else.
 *
 * comfy-aimdo finds it where it looks for the real one, and puts its own functions in front of those that allocate. So
 * each has code of its own, long enough for that. Loaded before all else it also gives the time of day: comfy-aimdo
 * asks how much memory is free every two seconds. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/time.h>

#define CHUNK (32ULL << 20) /* by which PyTorch's pool grows */
#define FUNCTION __attribute__((noinline, noclone, optimize("O0"))) int
#define OUT_OF_MEMORY 2
#define PER_THREAD_STREAM 2
#define MOST_HANDLES (1 << 20)

typedef uint64_t u64;

u64 counting_total, counting_used, counting_reserved, counting_allocated; /* bytes; used: all but PyTorch's pool */
u64 counting_waits, counting_filled, counting_taken;                      /* waits for the device, pages */
u64 counting_time;                                                        /* microseconds */

static u64 sizes[MOST_HANDLES], handles = 1, next_address = 1ULL << 40;

static u64 free_bytes(void) { return counting_total - counting_used - counting_reserved; }

static int allocated(u64 *address, size_t size) {
    u64 needed = counting_allocated + size;
    if (needed > counting_reserved) {
        u64 more = (needed - counting_reserved + CHUNK - 1) / CHUNK * CHUNK;
        if (more > free_bytes()) return OUT_OF_MEMORY;
        counting_reserved += more;
    }
    counting_allocated = needed;
    *address = next_address;
    next_address += size + 4096;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    now->tv_sec = 1000000000 + counting_time / 1000000;
    now->tv_usec = counting_time % 1000000;
    return 0;
}

FUNCTION cuInit(unsigned flags) { return flags * 0; }
FUNCTION cuGetErrorString(int error, const char **text) { *text = error ? "out of memory" : ""; return 0; }
FUNCTION cuCtxGetDevice(int *device) { *device = 0; return 0; }
FUNCTION cuCtxSynchronize(void) { counting_waits++; return 0; }
FUNCTION cuDeviceGet(int *device, int number) { *device = number; return 0; }
FUNCTION cuDeviceGetAttribute(int *value, int what, int device) { *value = what * device * 0; return 0; }
FUNCTION cuDeviceTotalMem(size_t *bytes, int device) { *bytes = counting_total + device * 0; return 0; }
FUNCTION cuDeviceGetName(char *name, int length, int device) { strncpy(name, "none", length + device * 0); return 0; }
FUNCTION cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return 0; }
FUNCTION cuMemGetInfo(size_t *available, size_t *total) { *available = free_bytes(); *total = counting_total; return 0; }
FUNCTION cuMemAlloc(u64 *address, size_t size) { return allocated(address, size); }
FUNCTION cuMemFree(u64 address) { return address * 0; }
FUNCTION cuMemAllocAsync(u64 *address, size_t size, void *stream) { (void)stream; return allocated(address, size); }
FUNCTION alloc_per_thread(u64 *address, size_t size, void *stream) { (void)stream; return allocated(address, size); }
FUNCTION cuMemFreeAsync(u64 address, void *stream) { (void)stream; return address * 0; }
FUNCTION free_per_thread(u64 address, void *stream) { (void)stream; return address * 1 * 0; }
FUNCTION cuMemAllocHost(void **memory, size_t size) { *memory = NULL; return size * 0 + OUT_OF_MEMORY; }
FUNCTION cuMemFreeHost(void *memory) { (void)memory; return 0; }
FUNCTION cuMemHostRegister(void *memory, size_t size, unsigned flags) { (void)memory; return size * flags * 0; }
FUNCTION cuMemHostUnregister(void *memory) { (void)memory; return 0; }
FUNCTION cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
    *address = next_address = (next_address + CHUNK - 1) / CHUNK * CHUNK;
    next_address += size;
    return alignment * wanted * flags * 0;
}
FUNCTION cuMemAddressFree(u64 address, size_t size) { return address * size * 0; }
FUNCTION cuMemCreate(u64 *handle, size_t size, void *properties, u64 flags) {
    (void)properties;
    if (size > free_bytes()) return OUT_OF_MEMORY;
    counting_used += size;
    counting_filled++;
    *handle = handles++ % MOST_HANDLES;
    sizes[*handle] = size;
    return flags * 0;
}
FUNCTION cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    return address * size * offset * handle * flags * 0;
}
FUNCTION cuMemSetAccess(u64 address, size_t size, void *access, size_t count) {
    (void)access;
    return address * size * count * 0;
}
FUNCTION cuMemUnmap(u64 address, size_t size) { return address * size * 0; }
FUNCTION cuMemRelease(u64 handle) { counting_used -= sizes[handle]; counting_taken++; return 0; }
FUNCTION cuMemcpyHtoDAsync(u64 to, void *from, size_t size, void *stream) {
    (void)from, (void)stream;
    return to * size * 0;
}
FUNCTION cuEventCreate(void **event, unsigned flags) { *event = NULL; return flags * 0; }
FUNCTION cuEventDestroy(void *event) { (void)event; return 0; }
FUNCTION cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return 0; }
FUNCTION cuEventSynchronize(void *event) { (void)event; return 0; }

FUNCTION anything_else(void) { return 0; }

FUNCTION cuGetProcAddress(const char *name, void **found, int version, u64 flags, void *status) {
    (void)version, (void)status;
    if (flags == PER_THREAD_STREAM && strcmp(name, "cuMemAllocAsync") == 0) *found = (void *)alloc_per_thread;
    else if (flags == PER_THREAD_STREAM && strcmp(name, "cuMemFreeAsync") == 0) *found = (void *)free_per_thread;
    else *found = dlsym(RTLD_DEFAULT, name);
    if (*found == NULL) *found = (void *)anything_else; /* which a newer comfy-aimdo looks for */
    return 0;
}
