// CUDA_VISIBLE_DEVICES: which of the machine's devices a program sees, and in what order, by index or by UUID.  The
// rules are those of CUDA as PyTorch mirrors them (torch.cuda._parse_visible_devices): the first entry decides the
// kind, the list ends at the first entry that is not one, and naming a device twice leaves none.
#include "simulated.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int seen[MAX_DEVICES], seen_count;
static pthread_once_t list_read = PTHREAD_ONCE_INIT;

// The 16 bytes of the first device's UUID read "memlab simulated"; those of the next end in e, f, g ...
void device_uuid(int physical, unsigned char bytes[16]) {
    memcpy(bytes, "memlab simulated", 16);
    bytes[15] += (unsigned char)physical;
}

void device_uuid_text(int physical, char text[UUID_TEXT]) {
    unsigned char bytes[16];
    device_uuid(physical, bytes);
    char *end = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        end += sprintf(end, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

// The device that a whole UUID or the beginning of one names; -1 if none does, or more than one.
static int device_by_uuid(const char *start, size_t length) {
    int found = -1;
    if (strncmp(start, "GPU-", 4))
        return -1;
    for (int i = 0; i < device_count(); i++) {
        char text[UUID_TEXT];
        device_uuid_text(i, text);
        if (length > strlen(text) || strncmp(start, text, length))
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

static int device_by_index(const char *start, size_t length) {
    char digits[16] = "";
    char *end;
    memcpy(digits, start, length < sizeof digits ? length : sizeof digits - 1);
    long index = strtol(digits, &end, 10);
    return end != digits && index >= 0 && index < device_count() ? (int)index : -1;
}

static bool already_seen(int physical) {
    for (int i = 0; i < seen_count; i++) {
        if (seen[i] == physical)
            return true;
    }
    return false;
}

static void read_list(void) {
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    if (!entry) {
        for (seen_count = 0; seen_count < device_count(); seen_count++)
            seen[seen_count] = seen_count;
        return;
    }
    entry += strspn(entry, " ");
    bool by_uuid = !strncmp(entry, "GPU-", 4);
    for (;;) {
        entry += strspn(entry, " ");
        size_t length = strcspn(entry, ",");
        size_t word = strcspn(entry, ", ");
        int physical = by_uuid ? device_by_uuid(entry, word) : device_by_index(entry, word);
        if (physical < 0)
            return;
        if (already_seen(physical)) {
            seen_count = 0;
            return;
        }
        seen[seen_count++] = physical;
        if (!entry[length])
            return;
        entry += length + 1;
    }
}

int visible_count(void) {
    pthread_once(&list_read, read_list);
    return seen_count;
}

int physical_of(int ordinal) {
    return ordinal >= 0 && ordinal < visible_count() ? seen[ordinal] : -1;
}

int ordinal_of(int physical) {
    for (int i = 0; i < visible_count(); i++) {
        if (seen[i] == physical)
            return i;
    }
    return 0;
}
