/* NVML for a dry run of these tests on a machine without a GPU: one accelerator of 80 GiB. Processes that hold memory
 * there each have a file in the folder FAKE_NVML_DIR, named by their pid, with the number of bytes. As on a real one,
 * the memory of a killed process stays in use for a moment (LAG_MS). FAKE_NVML_PROCESSES=none lists no process, and
 * FAKE_NVML_PROCESSES=hidden lists pids of another pid namespace, as in containers. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LAG_MS = 300, MOST = 64 };

static const char UUID[] = "GPU-5175ac1e-0000-4000-8000-000000000001";

struct memory { unsigned version; unsigned long long total, reserved, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Files are named PID, or PID.dead-MS once a reader has found the process gone. */
static unsigned load(struct process *found, unsigned long long *sum) {
    const char *folder = getenv("FAKE_NVML_DIR");
    DIR *all = folder ? opendir(folder) : NULL;
    unsigned count = 0;
    struct dirent *entry;
    *sum = 4 << 20;
    while (all && count < MOST && (entry = readdir(all))) {
        char path[640], dead[640], *rest;
        long pid = strtol(entry->d_name, &rest, 10);
        if (pid <= 0 || !strcmp(rest, ".new")) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (!strncmp(rest, ".dead-", 6)) {
            if (atoll(rest + 6) + LAG_MS < now_ms()) {
                remove(path);
                continue;
            }
        } else if (kill((pid_t)pid, 0) && errno == ESRCH) {
            snprintf(dead, sizeof dead, "%s.dead-%lld", path, now_ms());
            if (rename(path, dead)) continue;
            snprintf(path, sizeof path, "%s", dead);
        }
        FILE *file = fopen(path, "r");
        unsigned long long used;
        if (!file) continue;
        if (fscanf(file, "%llu", &used) == 1) {
            found[count++] = (struct process){(unsigned)pid, used, ~0u, ~0u};
            *sum += used;
        }
        fclose(file);
    }
    if (all) closedir(all);
    return count;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake NVML"; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "fake");
    return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    snprintf(version, length, "fake");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)1;
    return index == 0 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)1;
    return strcmp(uuid, UUID) ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    (void)device;
    snprintf(uuid, length, "%s", UUID);
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    (void)device;
    snprintf(name, length, "fake");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory *memory) {
    struct process found[MOST];
    (void)device;
    load(found, &memory->used);
    memory->total = 80ull << 30;
    memory->reserved = 600ull << 20;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    (void)device;
    *current = *pending = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *out) {
    struct process found[MOST];
    unsigned long long sum;
    unsigned number = load(found, &sum), room = *count;
    const char *shown = getenv("FAKE_NVML_PROCESSES");
    (void)device;
    if (shown && !strcmp(shown, "none")) number = 0;
    for (unsigned i = 0; shown && !strcmp(shown, "hidden") && i < number; i++) found[i].pid += 1 << 24;
    *count = number;
    if (number > room) return INSUFFICIENT_SIZE;
    memcpy(out, found, number * sizeof *found);
    return SUCCESS;
}
