/* NVML as nvidia-ml-py calls it, driven by a file of `KEY VALUE` lines ($NVML_STATE) that each call reads again.
   Built as libnvidia-ml.so.1; with -DOLD_DRIVER it lacks what old drivers lack. Keys of device D: `D.uuid`, `D.lost`,
   `D.hang` (a function's name: it never returns), and one for each value; a value that is not there is not supported.
   Events: `event.N D:XID`, each sent once, in this order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_DEVICE = 6, TIMEOUT = 10, LOST = 15, RESET_REQUIRED = 16 };
typedef struct device { int index; } device;
static device devices[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static int sent = 0;

static int text_of(const char *key, char *value, int size) {
    char line[256];
    size_t length = strlen(key);
    int found = 0;
    FILE *file = fopen(getenv("NVML_STATE"), "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == ' ') {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    fclose(file);
    return found;
}

static int of_device(device *one, const char *name, char *value, int size) {
    char key[128];
    snprintf(key, sizeof key, "%d.%s", one->index, name);
    return text_of(key, value, size);
}

/* What a call must return before it answers: a lost device, one that needs a reset, a call that never returns. */
static int state_of(device *one, const char *function) {
    char value[128];
    if (of_device(one, "hang", value, sizeof value) && !strcmp(value, function))
        for (;;) pause();
    if (of_device(one, "lost", value, sizeof value)) return LOST;
    if (of_device(one, "reset", value, sizeof value)) return RESET_REQUIRED;
    return SUCCESS;
}

static int number_of(device *one, const char *function, const char *name, unsigned long long *number) {
    char value[128];
    int state = state_of(one, function);
    if (state) return state;
    if (!of_device(one, name, value, sizeof value)) return NOT_SUPPORTED;
    *number = strtoull(value, NULL, 0);
    return SUCCESS;
}

static int small_of(device *one, const char *function, const char *name, unsigned *number) {
    unsigned long long value = 0;
    int state = number_of(one, function, name, &value);
    if (!state) *number = (unsigned)value;
    return state;
}

int nvmlInitWithFlags(unsigned flags) {
    char value[16];
    sent = 0;
    return text_of("init", value, sizeof value) ? atoi(value) : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error of the tests' library"; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    return text_of("driver", version, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[16];
    *count = text_of("count", value, sizeof value) ? atoi(value) : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **one) {
    char value[16];
    if (of_device(&devices[index], "lost_at_start", value, sizeof value)) return LOST;
    *one = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(device *one, char *uuid, unsigned size) {
    return of_device(one, "uuid", uuid, size) ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetName(device *one, char *name, unsigned size) {
    snprintf(name, size, "Test GPU");
    return SUCCESS;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
int nvmlDeviceGetPciInfo_v3(device *one, pci_info *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:C%d:00.0", one->index);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device *one, int sensor, unsigned *value) {
    return small_of(one, "nvmlDeviceGetTemperature", "temperature", value);
}
int nvmlDeviceGetPowerUsage(device *one, unsigned *value) {
    return small_of(one, "nvmlDeviceGetPowerUsage", "power_mw", value);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device *one, unsigned long long *value) {
    return number_of(one, "nvmlDeviceGetCurrentClocksThrottleReasons", "clock_reasons", value);
}
int nvmlDeviceGetPcieReplayCounter(device *one, unsigned *value) {
    return small_of(one, "nvmlDeviceGetPcieReplayCounter", "pcie_replays", value);
}

int nvmlDeviceGetViolationStatus(device *one, int policy, unsigned long long *times) {
    char name[32];
    snprintf(name, sizeof name, "violation.%d", policy);
    times[0] = 1000000;
    return number_of(one, "nvmlDeviceGetViolationStatus", name, &times[1]);
}

/* Error type 0 is corrected, 1 uncorrected; counter 0 is volatile, 1 aggregate. */
int nvmlDeviceGetTotalEccErrors(device *one, int error, int counter, unsigned long long *value) {
    char name[32];
    snprintf(name, sizeof name, "ecc.%d.%d", error, counter);
    return number_of(one, "nvmlDeviceGetTotalEccErrors", name, value);
}

#ifndef OLD_DRIVER
typedef struct { unsigned version; int sensor; int temperature; } temperature_v1;
int nvmlDeviceGetTemperatureV(device *one, temperature_v1 *info) {
    if (info->version != 0x100000C || sizeof *info != 0xC) return INVALID;
    return small_of(one, "nvmlDeviceGetTemperature", "temperature", (unsigned *)&info->temperature);
}

int nvmlDeviceGetCurrentClocksEventReasons(device *one, unsigned long long *value) {
    return number_of(one, "nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons", value);
}

typedef struct {
    unsigned version;
    unsigned long long aggregate_parity, aggregate_sec_ded, aggregate_corrected;
    unsigned long long volatile_parity, volatile_sec_ded, volatile_corrected;
    unsigned long long l2, sm, pcie, mcu, other;
    unsigned threshold_exceeded;
} sram_v1;
int nvmlDeviceGetSramEccErrorStatus(device *one, sram_v1 *status) {
    if (status->version != 0x1000068 || sizeof *status != 0x68) return INVALID;
    int state = number_of(one, "nvmlDeviceGetSramEccErrorStatus", "sram.parity", &status->aggregate_parity);
    if (state) return state;
    number_of(one, "", "sram.sec_ded", &status->aggregate_sec_ded);
    number_of(one, "", "sram.corrected", &status->aggregate_corrected);
    return small_of(one, "", "sram.exceeded", &status->threshold_exceeded);
}

int nvmlDeviceGetRemappedRows(device *one, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    int state = small_of(one, "nvmlDeviceGetRemappedRows", "remapped.corrected", corrected);
    if (state) return state;
    small_of(one, "", "remapped.uncorrected", uncorrected);
    small_of(one, "", "remapped.pending", pending);
    return small_of(one, "", "remapped.failed", failed);
}
#endif

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned u; unsigned long l; unsigned long long ll; } value;
} field_value;
static int is_known(unsigned field) {
#ifdef OLD_DRIVER
    return field < 200;
#else
    return 1;
#endif
}
int nvmlDeviceGetFieldValues(device *one, int count, field_value *values) {
    int state = state_of(one, "nvmlDeviceGetFieldValues");
    for (int i = 0; !state && i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "field.%u", values[i].field);
        values[i].type = values[i].field == 230 ? 1 : 3; /* unsigned int; unsigned long long */
        unsigned long long number = 0;
        values[i].result = is_known(values[i].field) ? number_of(one, "", name, &number) : INVALID;
        if (values[i].type == 1) values[i].value.u = (unsigned)number;
        else values[i].value.ll = number;
    }
    return state;
}

typedef struct { device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data;
int nvmlEventSetCreate(void **set) {
    *set = &sent;
    return SUCCESS;
}
int nvmlEventSetFree(void *set) { return SUCCESS; }
int nvmlDeviceRegisterEvents(device *one, unsigned long long types, void *set) {
    char value[16];
    if (!one) return INVALID;
    return types == 8 && !of_device(one, "no_events", value, sizeof value) ? SUCCESS : NOT_SUPPORTED;
}
#ifndef OLD_DRIVER
int nvmlEventSetWait_v2(void *set, event_data *event, unsigned timeout_ms) {
    char key[32], value[64], *end;
    for (unsigned waited = 0;; waited += 5) {
        snprintf(key, sizeof key, "event.%d", sent);
        if (text_of(key, value, sizeof value)) break;
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(5000);
    }
    sent++;
    memset(event, 0, sizeof *event);
    event->device = &devices[strtol(value, &end, 10)];
    event->type = 8;
    event->data = strtoull(end + 1, NULL, 10);
    return SUCCESS;
}
#endif
