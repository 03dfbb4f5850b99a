// Where device memory lies: one TiB of addresses for each device, one for the managed memory of all, one for pinned host
// memory, sixteen for the virtual memory of expandable segments.  The addresses are real (anonymous pages without a reservation), so that a copy is a
// plain memcpy, and a page that nobody wrote costs no host memory.
#include "simulated.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

#define BASE 0x600000000000ull  // between the program with its heap below and the shared libraries above
#define MANAGED (BASE + MAX_DEVICES * TIB)
#define MANAGED_SIZE (TIB / MAX_DEVICES)  // of each device
#define HOST (MANAGED + TIB)
#define VIRTUAL (HOST + TIB)
#define END (VIRTUAL + 16 * TIB)
static struct ranges mapped[REGIONS];

static uint64_t region_start(int region) {
    if (region < REGION_MANAGED)
        return BASE + (uint64_t)region * TIB;
    if (region < REGION_HOST)
        return MANAGED + (uint64_t)(region - REGION_MANAGED) * MANAGED_SIZE;
    return region == REGION_HOST ? HOST : region == REGION_VIRTUAL ? VIRTUAL : END;
}

static uint64_t region_end(int region) {
    return region_start(region + 1);
}

int region_of(const void *address) {
    uint64_t at = (uint64_t)address;
    if (at < BASE || at >= END)
        return -1;
    if (at < MANAGED)
        return (int)((at - BASE) / TIB);
    if (at < HOST)
        return REGION_MANAGED + (int)((at - MANAGED) / MANAGED_SIZE);
    return at < VIRTUAL ? REGION_HOST : REGION_VIRTUAL;
}

int device_of_region(int region) {
    return region < REGION_HOST ? region % MAX_DEVICES : -1;
}

bool is_device_only(const void *address) {
    int region = region_of(address);
    return (region >= 0 && region < REGION_MANAGED) || region == REGION_VIRTUAL;
}

// First fit, as drivers do: an address that was given back is the next one given out.
static int find_gap(int region, uint64_t size, uint64_t unit, uint64_t *at) {
    const struct ranges *list = &mapped[region];
    int index = 0;
    *at = region_start(region);
    while (index < list->count && list->items[index].at - *at < size) {
        *at = round_up(list->items[index].at + list->items[index].size, unit);
        index++;
    }
    return *at + size <= region_end(region) ? index : -1;
}

static bool map_pages(int region, uint64_t at, uint64_t size) {
    int protection = region == REGION_VIRTUAL ? PROT_NONE : PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *pages = mmap((void *)at, size, protection, flags, -1, 0);
    if (pages != (void *)at) {
        if (pages != MAP_FAILED)
            munmap(pages, size);  // a kernel before 4.17 takes the address for a hint
        say("the host refuses %llu bytes of address space (%s); look at `ulimit -v` and vm.overcommit_memory.",
            (unsigned long long)size, strerror(errno));
        return false;
    }
    if (is_device_only(pages))
        madvise(pages, size, MADV_NOHUGEPAGE);  // or a copy of 4 bytes would cost 2 MiB of the host
    return true;
}

static void *map_in_gap(int region, uint64_t bytes, uint64_t unit) {  // with the lock held
    uint64_t at, size = round_up(bytes, unit);
    int index = find_gap(region, size, unit, &at);
    if (index < 0 || !map_pages(region, at, size))
        return NULL;
    if (!ranges_insert(&mapped[region], index, (struct range){.at = at, .size = size, .asked = bytes})) {
        munmap((void *)at, size);
        return NULL;
    }
    return (void *)at;
}

void *map_memory(int region, uint64_t bytes, uint64_t unit) {
    if (!bytes || bytes > region_end(region) - region_start(region))
        return NULL;
    lock(LOCK_SPACE);
    void *memory = map_in_gap(region, bytes, unit);
    unlock(LOCK_SPACE);
    return memory;
}

uint64_t unmap_memory(void *address) {
    int region = region_of(address);
    uint64_t size = 0;
    if (region < 0)
        return 0;
    lock(LOCK_SPACE);
    struct range *found = ranges_find(&mapped[region], (uint64_t)address);
    if (found && found->at == (uint64_t)address) {
        size = found->size;
        forget_bytes(address, size);
        munmap(address, size);
        ranges_remove(&mapped[region], (int)(found - mapped[region].items), 1);
    }
    unlock(LOCK_SPACE);
    return size;
}

bool find_memory(const void *address, struct range *found) {
    int region = region_of(address);
    if (region < 0)
        return false;
    lock(LOCK_SPACE);
    struct range *range = ranges_find(&mapped[region], (uint64_t)address);
    if (range)
        *found = *range;
    unlock(LOCK_SPACE);
    return range != NULL;
}
