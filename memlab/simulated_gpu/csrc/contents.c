// The bytes in device memory.  The host copies them there and back; no kernel ever writes one.  A map of the pages that
// were written keeps the rest free of charge: what nobody wrote is zeros, and is neither read nor copied.
#include "simulated.h"
#include <string.h>
#include <sys/mman.h>

#define LARGEST_FILL MIB  // a longer fill with something else than zeros would only cost host memory
enum { SMALL_READ = 64 * 1024 };

// ---- the map: one byte a page, in a sparse mapping of its own for each region
static unsigned char *maps[REGIONS];

static unsigned char *create_map(int region) {
    lock(LOCK_MAPS);
    if (!maps[region]) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *map = mmap(NULL, region_size(region) / PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (map != MAP_FAILED) {
            madvise(map, region_size(region) / PAGE, MADV_NOHUGEPAGE);
            __atomic_store_n(&maps[region], map, __ATOMIC_RELEASE);
        }
    }
    unlock(LOCK_MAPS);
    return maps[region];
}

// The map's byte for a device address; NULL where the host refused the map: then every page counts as written.
static unsigned char *map_at(const void *address) {
    int region = region_of(address);
    unsigned char *map = __atomic_load_n(&maps[region], __ATOMIC_ACQUIRE);
    if (!map)
        map = create_map(region);
    return map ? map + region_offset(address) / PAGE : NULL;
}

static uint64_t page_count(const void *at, size_t bytes) {
    return ((uint64_t)at + bytes - 1) / PAGE - (uint64_t)at / PAGE + 1;
}

static void mark_written(void *at, size_t bytes) {
    unsigned char *map = bytes ? map_at(at) : NULL;
    if (map)
        memset(map, 1, page_count(at, bytes));
}

static bool is_written(const void *at) {
    const unsigned char *map = map_at(at);
    return !map || *map;
}

// How many of the bytes at a device address lie in pages that are all written, or all not.
static size_t equal_run(const char *at, size_t bytes, bool *written) {
    const unsigned char *map = map_at(at);
    *written = !map || *map;
    if (!map)
        return bytes;
    uint64_t pages = page_count(at, bytes), i = 1;
    while (i < pages && map[i] == map[0])
        i++;
    return i == pages ? bytes : (size_t)(i * PAGE - (uint64_t)at % PAGE);
}

// ---- zeros
static void zero_part_of_page(char *at, size_t bytes) {
    if (bytes && is_written(at))
        memset(at, 0, bytes);
}

static void clear_map(unsigned char *map, uint64_t pages) {
    unsigned char *end = map + pages;
    unsigned char *first = (unsigned char *)round_up((uint64_t)map, PAGE);
    unsigned char *last = (unsigned char *)((uint64_t)end / PAGE * PAGE);
    if (first >= last) {
        memset(map, 0, pages);
        return;
    }
    memset(map, 0, (size_t)(first - map));
    madvise(first, (size_t)(last - first), MADV_DONTNEED);  // writing zeros would fill the sparse map
    memset(last, 0, (size_t)(end - last));
}

static void drop_pages(char *from, char *to) {
    size_t bytes = (size_t)(to - from);
    unsigned char *map = map_at(from);
    if (map && !memchr(map, 1, bytes / PAGE))
        return;
    madvise(from, bytes, MADV_DONTNEED);
    if (map)
        clear_map(map, bytes / PAGE);
}

static void zero_bytes(char *at, size_t bytes) {
    char *first = (char *)round_up((uint64_t)at, PAGE), *last = (char *)((uint64_t)(at + bytes) / PAGE * PAGE);
    if (!on_device(at)) {
        memset(at, 0, bytes);
    } else if (first >= last) {  // no whole page
        size_t head = first < at + bytes ? (size_t)(first - at) : bytes;
        zero_part_of_page(at, head);
        zero_part_of_page(at + head, bytes - head);
    } else {
        zero_part_of_page(at, (size_t)(first - at));
        drop_pages(first, last);
        zero_part_of_page(last, (size_t)(at + bytes - last));
    }
}

// The pages themselves are the caller's to unmap.
void forget_bytes(void *at, size_t bytes) {
    unsigned char *map = __atomic_load_n(&maps[region_of(at)], __ATOMIC_ACQUIRE);
    if (map)
        clear_map(map + region_offset(at) / PAGE, bytes / PAGE);
}

void host_may_write(void *at, size_t bytes) {
    mark_written(at, bytes);
}

// ---- copies
void copy_bytes(void *to, const void *from, size_t bytes) {
    char *target = to;
    const char *source = from;
    while (bytes && target && source) {
        bool written = true;
        size_t run = on_device(source) ? equal_run(source, bytes, &written) : bytes;
        if (!written) {
            zero_bytes(target, run);
        } else {
            memmove(target, source, run);
            if (on_device(target))
                mark_written(target, run);
        }
        target += run;
        source += run;
        bytes -= run;
    }
}

// ---- what the host may know
// A result read back (.item(), the count behind nonzero(), GradScaler's found_inf, a batch of tokens) is something a kernel
// would have written.  The block holds stale bytes instead, and those change what programs do: a stale found_inf skips the
// step.  So a read of up to SMALL_READ gives zeros, unless the bytes came from the host and nothing was launched since.
static struct {
    const char *at;
    size_t bytes;
    uint64_t launches;
} known[64];
static unsigned known_next;
enum { KNOWN = sizeof known / sizeof *known };

static bool is_known(const char *at, size_t bytes) {
    bool found = false;
    lock(LOCK_KNOWN);
    for (int i = 0; i < KNOWN && !found; i++)
        found = known[i].launches == launches() && at >= known[i].at && at + bytes <= known[i].at + known[i].bytes;
    unlock(LOCK_KNOWN);
    return found;
}

static void forget_known(const char *at, size_t bytes) {
    lock(LOCK_KNOWN);
    for (int i = 0; i < KNOWN; i++) {
        if (at < known[i].at + known[i].bytes && known[i].at < at + bytes)
            known[i].bytes = 0;
    }
    unlock(LOCK_KNOWN);
}

static void note_known(const char *at, size_t bytes) {
    lock(LOCK_KNOWN);
    unsigned place = known_next++ % KNOWN;
    known[place].at = at;
    known[place].bytes = bytes;
    known[place].launches = launches();
    unlock(LOCK_KNOWN);
}

void copy_for_caller(void *to, const void *from, size_t bytes) {
    if (!bytes || !to || !from)
        return;
    bool meaningful = !on_device(from) || small_reads_are_real() || is_known(from, bytes);
    if (!meaningful && bytes <= SMALL_READ) {
        fill_bytes(to, 0, bytes);
        return;
    }
    copy_bytes(to, from, bytes);
    if (!on_device(to))
        return;
    if (meaningful)
        note_known(to, bytes);
    else
        forget_known(to, bytes);
}

void fill_bytes(void *at, int value, size_t bytes) {
    if (!bytes || !at)
        return;
    if (!value || (on_device(at) && bytes > LARGEST_FILL)) {
        zero_bytes(at, bytes);
    } else {
        memset(at, value, bytes);
        if (on_device(at))
            mark_written(at, bytes);
    }
    if (on_device(at))
        note_known(at, bytes);
}
