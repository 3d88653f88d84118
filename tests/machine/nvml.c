/* A stand-in for NVIDIA's libnvidia-ml.so.1: eight GPUs, with the names, structs and codes of nvml.h.
 *
 * The environment says, at each call, what a machine is like:
 *   NVML_INIT=18             nvmlInit returns this code
 *   NVML_PIDS=0:71,3:72      processes by their GPU; slice s of GPU g is 100 + 10 g + s
 *   NVML_DENY=PowerUsage,..  these queries return "no permission"
 *   NVML_LOST=2              this GPU has no handle
 *   NVML_MIG=0               this GPU is partitioned into two slices
 * Compiled with -DOLD it lacks what older drivers lack.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef int nvmlReturn_t;
typedef struct device { int number; } *nvmlDevice_t; /* 0 to 7: a GPU; 100 + 10 g + s: slice s of GPU g */

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25 };
enum { GPUS = 8, SLICES = 2 };
#define GIB (1ull << 30)

static struct device devices[200];
static int started = 0, samples_alive = 0;

static int from_environment(const char *name) { /* -1: not set */
    const char *value = getenv(name);
    return value && *value ? atoi(value) : -1;
}

static nvmlReturn_t allowed(const char *function) {
    const char *denied = getenv("NVML_DENY"), *query = function + strlen("nvmlDeviceGet");
    if (!started) return UNINITIALIZED;
    for (const char *at = denied; at && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == strlen(query) && !strncmp(at, query, strlen(query))) return NO_PERMISSION;
    return SUCCESS;
}

/* Begin a query; one of the whole GPU is not supported by a slice. */
#define ASK if (allowed(__func__)) return allowed(__func__)
#define ASK_WHOLE ASK; if (device->number >= 100) return NOT_SUPPORTED

nvmlReturn_t nvmlInitWithFlags(uint flags) {
    int code = from_environment("NVML_INIT");
    if (flags) return INVALID_ARGUMENT;
    if (code > 0) return code;
    for (int number = 0; number < 200; number++) devices[number].number = number;
    started++;
    return SUCCESS;
}
nvmlReturn_t nvmlShutdown(void) { if (!started) return UNINITIALIZED; started--; return SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) { return code ? "an error" : "none"; }
int fakeOpen(void) { return started + samples_alive; } /* of the stand-in alone: what was not given back */

static nvmlReturn_t text(char *to, uint length, const char *format, int a, int b) {
    return snprintf(to, length, format, a, b) < (int)length ? SUCCESS : INSUFFICIENT_SIZE;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *to, uint length) {
#ifdef OLD
    return text(to, length, "470.57.02", 0, 0);
#else
    return text(to, length, "580.65.06", 0, 0);
#endif
}
nvmlReturn_t nvmlSystemGetProcessName(uint pid, char *to, uint length) {
    return text(to, length, "/usr/bin/program-%d", (int)pid, 0);
}

nvmlReturn_t nvmlDeviceGetCount_v2(uint *count) { ASK; *count = GPUS; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(uint index, nvmlDevice_t *device) {
    ASK;
    if (index >= GPUS) return INVALID_ARGUMENT;
    if ((int)index == from_environment("NVML_LOST")) return GPU_IS_LOST;
    *device = &devices[index];
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *to, uint length) {
    ASK;
    return text(to, length, device->number < 100 ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 0, 0);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *to, uint length) {
    int number = device->number;
    ASK;
    if (number < 100) return text(to, length, "GPU-%08x-0000-4000-8000-000000000000", number, 0);
    return text(to, length, "MIG-%08x-0000-5000-8000-00000000000%d", (number - 100) / 10, number % 10);
}

/* Partitions */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, uint *now, uint *pending) {
    ASK_WHOLE;
    *now = *pending = device->number == from_environment("NVML_MIG");
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, uint *count) { ASK_WHOLE; *count = 7; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, uint index, nvmlDevice_t *slice) {
    ASK_WHOLE;
    if (index >= SLICES) return NOT_FOUND;
    *slice = &devices[100 + 10 * device->number + index];
    return SUCCESS;
}
static nvmlReturn_t instance(nvmlDevice_t device, uint *id, uint value) {
    if (device->number < 100) return NOT_SUPPORTED;
    *id = value;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, uint *id) { ASK; return instance(device, id, 1 + device->number % 10); }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, uint *id) { ASK; return instance(device, id, 0); }

/* Memory, by both versions: the first counts what the driver keeps as used */
typedef struct { ull total, free, used; } memory_v1;
typedef struct { uint version; ull total, reserved, free, used; } memory_v2;
static ull total_of(nvmlDevice_t device) { return (device->number < 100 ? 80 : 40) * GIB; }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, memory_v1 *memory) {
    ASK;
    memory->total = total_of(device), memory->used = 31 * GIB, memory->free = memory->total - memory->used;
    return SUCCESS;
}
#ifndef OLD
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_v2 *memory) {
    ASK;
    if (memory->version != (sizeof(memory_v2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = total_of(device), memory->reserved = GIB, memory->used = 30 * GIB;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}
#endif

/* Processes */
typedef struct { uint pid; ull used; uint gpu_instance, compute_instance; } process;
static nvmlReturn_t running(nvmlDevice_t device, uint *count, process *infos) {
    const char *at = getenv("NVML_PIDS");
    uint found = 0, room = *count;
    while (at && *at) {
        int number, pid, length;
        if (sscanf(at, "%d:%d%n", &number, &pid, &length) != 2) return INVALID_ARGUMENT;
        if (number == device->number) {
            if (found < room && infos) infos[found] = (process){(uint)pid, 20 * GIB, 0xffffffffu, 0xffffffffu};
            found++;
        }
        at += length, at += *at == ',';
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, uint *count, process *infos) {
    ASK;
    return running(device, count, infos);
}
#ifndef OLD
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, uint *count, process *infos) {
    ASK;
    return running(device, count, infos);
}
#endif

/* Figures of a busy GPU */
#define FIGURE(name, type, value) \
    nvmlReturn_t nvmlDeviceGet##name(nvmlDevice_t device, type *to) { ASK_WHOLE; *to = value; return SUCCESS; }
static ull energy[GPUS];
FIGURE(PowerUsage, uint, 650000)
FIGURE(EnforcedPowerLimit, uint, 700000)
FIGURE(PowerManagementDefaultLimit, uint, 700000)
FIGURE(TotalEnergyConsumption, ull, energy[device->number] += 500)
FIGURE(ComputeMode, int, device->number == 7 ? 3 : 0)
FIGURE(MinorNumber, uint, (uint)device->number)
FIGURE(PersistenceMode, int, 1)
FIGURE(CurrPcieLinkGeneration, uint, 5)
FIGURE(MaxPcieLinkGeneration, uint, 5)
FIGURE(CurrPcieLinkWidth, uint, 16)
FIGURE(MaxPcieLinkWidth, uint, 16)
#ifdef OLD
FIGURE(CurrentClocksThrottleReasons, ull, 0)
#else
FIGURE(CurrentClocksEventReasons, ull, 0)
#endif
#define PAIR(name, type, a, b) \
    nvmlReturn_t nvmlDeviceGet##name(nvmlDevice_t device, type *first, type *second) { \
        ASK_WHOLE; *first = a, *second = b; return SUCCESS; }
PAIR(PowerManagementLimitConstraints, uint, 200000, 700000)
PAIR(CudaComputeCapability, int, 9, 0)
PAIR(EccMode, int, 1, 1)
#define CHOICE(name, type, result, value) \
    nvmlReturn_t nvmlDeviceGet##name(nvmlDevice_t device, type which, result *to) { ASK_WHOLE; (void)which; *to = value; return SUCCESS; }
CHOICE(ClockInfo, int, uint, 1755)
CHOICE(MaxClockInfo, int, uint, 1980)
CHOICE(Temperature, int, uint, 61)
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, ull *count) {
    ASK_WHOLE;
    (void)kind, (void)counter, *count = 0;
    return SUCCESS;
}
typedef struct { uint gpu, memory; } utilization;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, utilization *rates) {
    ASK_WHOLE;
    rates->gpu = 97, rates->memory = 60;
    return SUCCESS;
}
typedef struct { ull at; union { double real; uint natural; ull large; } value; } sample;
static ull moment = 1000;
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, int kind, ull since, int *type, uint *count, sample *samples) {
    ASK_WHOLE;
    if (kind != 1) return INVALID_ARGUMENT; /* of the utilisation */
    *type = 1, *count = 2; /* unsigned int */
    if (samples)
        for (int index = 0; index < 2; index++)
            samples[index].at = ++moment, samples[index].value.large = 0, samples[index].value.natural = index ? 98 : 90;
    (void)since;
    return SUCCESS;
}

#ifndef OLD
/* GPM */
typedef struct { uint version, supported; } gpm_support;
typedef struct { uint id; nvmlReturn_t code; double value; const char *names[3]; } gpm_metric;
typedef struct { uint version, count; void *before, *after; gpm_metric metrics[]; } gpm_get;
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, gpm_support *support) {
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    support->supported = device->number < 100;
    return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(void **to) { samples_alive++; return (*to = malloc(8)) ? SUCCESS : 20; }
nvmlReturn_t nvmlGpmSampleFree(void *of) { samples_alive--; free(of); return SUCCESS; }
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, void *to) { memcpy(to, &device->number, sizeof device->number); return SUCCESS; }
nvmlReturn_t nvmlGpmMetricsGet(gpm_get *get) {
    if (get->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!get->before || !get->after) return INVALID_ARGUMENT;
    for (uint index = 0; index < get->count; index++) {
        get->metrics[index].code = SUCCESS;
        get->metrics[index].value = get->metrics[index].id == 2 ? 88.0 : get->metrics[index].id == 5 ? 55.0 : -1.0;
    }
    return SUCCESS;
}
#endif
