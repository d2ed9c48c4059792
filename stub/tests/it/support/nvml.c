/* See nvml.rs. The file is read at every call, so that a test can change it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };
enum { LOST = -1, HANGS = -2, MOST = 32 };

struct row {
    char uuid[96], parent[96];
    long used;
};

struct memory {
    unsigned version;
    uint64_t total, reserved, free, used;
};

static int load(struct row *rows) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char used[32];
    int count = 0;
    while (file && count < MOST && fscanf(file, "%95s %95s %31s", rows[count].uuid, rows[count].parent, used) == 3) {
        rows[count].used = !strcmp(used, "lost") ? LOST : !strcmp(used, "hang") ? HANGS : atol(used);
        count++;
    }
    if (file) fclose(file);
    return count;
}

/* A handle is the number of a line, from 1. */
static int of_parent(const char *parent, unsigned index, void **device) {
    struct row rows[MOST];
    int count = load(rows);
    for (int i = 0; i < count; i++)
        if (!strcmp(rows[i].parent, parent) && index-- == 0) {
            *device = (void *)(uintptr_t)(i + 1);
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

static struct row row(void *device) {
    struct row rows[MOST];
    load(rows);
    return rows[(uintptr_t)device - 1];
}

static unsigned children(const char *parent) {
    unsigned count = 0;
    void *device;
    while (of_parent(parent, count, &device) == SUCCESS) count++;
    return count;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "580.00");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = children("-");
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return of_parent("-", index, device); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    struct row rows[MOST];
    int count = load(rows);
    for (int i = 0; i < count; i++)
        if (!strcmp(rows[i].uuid, uuid)) {
            *device = (void *)(uintptr_t)(i + 1);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "%s", row(device).uuid);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory *memory) {
    while (row(device).used == HANGS) usleep(5000);
    if (row(device).used == LOST) return GPU_IS_LOST;
    memory->total = (uint64_t)80 << 30;
    memory->reserved = (uint64_t)600 << 20;
    memory->used = ((uint64_t)row(device).used << 20) + 4096;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    if (strcmp(row(device).parent, "-")) return NOT_SUPPORTED;
    *current = *pending = children(row(device).uuid) > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    return of_parent(row(device).uuid, index, part) == SUCCESS ? SUCCESS : NOT_FOUND;
}
