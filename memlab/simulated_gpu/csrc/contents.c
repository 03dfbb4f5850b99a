// The bytes in device memory.  No kernel writes one, so the only values are those that the host copied in.  They come
// back until the next kernel is launched, which might have changed any of them, and of all copies the last 128 MiB.
// Everything else reads as zeros and has no pages: a page of device memory that costs the host memory holds known bytes.
// A program that knows what a kernel would have computed can say so before it is read (memlab_simulated_feed).
#include "simulated.h"
#include <string.h>
#include <sys/mman.h>

#define LARGEST_FILL MIB  // a longer fill with something else than zeros would only cost host memory
#define MOST_BYTES (128 * MIB)
enum { MOST_PIECES = 8192 };  // a piece that begins and ends inside pages costs up to two pages more than its bytes

static struct ranges known;  // where the bytes are those of the host
static uint64_t known_bytes;

static uint64_t end_of(struct range range) {
    return range.at + range.size;
}

static void count_bytes(uint64_t bytes) {
    __atomic_store_n(&known_bytes, bytes, __ATOMIC_RELAXED);  // launches look at it without the lock
}

static void release_pages(uint64_t first, uint64_t end) {
    if (first < end)
        madvise((void *)first, end - first, MADV_DONTNEED);
}

// ---- the list, with the lock held
static void note(uint64_t at, uint64_t bytes) {
    int index = ranges_after(&known, at);
    if (!bytes)
        return;
    if (index > 0 && end_of(known.items[index - 1]) == at)
        known.items[index - 1].size += bytes;
    else if (!ranges_insert(&known, index, (struct range){.at = at, .size = bytes}))
        return;
    count_bytes(known_bytes + bytes);
}

static bool is_any_known(uint64_t at, uint64_t end) {
    int index = ranges_after(&known, at);
    return index < known.count && known.items[index].at < end;
}

static void forget(uint64_t at, uint64_t end) {
    int first = ranges_after(&known, at), behind = first;
    uint64_t bytes = known_bytes;
    while (behind < known.count && known.items[behind].at < end)
        bytes -= known.items[behind++].size;
    if (first == behind)
        return;
    struct range head = known.items[first], tail = known.items[behind - 1];
    ranges_remove(&known, first, behind - first);
    count_bytes(bytes);
    note(head.at, head.at < at ? at - head.at : 0);
    note(end, end < end_of(tail) ? end_of(tail) - end : 0);

    uint64_t first_page = at / PAGE * PAGE, end_page = round_up(end, PAGE);
    if (is_any_known(first_page, at))
        first_page += PAGE;
    if (is_any_known(end, end_page))
        end_page -= PAGE;
    release_pages(first_page, end_page);
}

static void forget_all(void) {
    for (int i = 0; i < known.count; i++)
        release_pages(known.items[i].at / PAGE * PAGE, round_up(end_of(known.items[i]), PAGE));
    known.count = 0;
    count_bytes(0);
}

static bool has_room(uint64_t bytes) {
    return known_bytes + bytes <= MOST_BYTES && known.count < MOST_PIECES;
}

// ---- what the next copy to the host shall contain
static char fed[8];  // a number, or the count of a kernel's results
static size_t fed_bytes;

// Returns cudaSuccess, or an error for more bytes than a number has.  Zero bytes take back what was not read.
int memlab_simulated_feed(const void *bytes, size_t count) {
    if (count > sizeof fed)
        return cudaErrorInvalidValue;
    lock(LOCK_CONTENTS);
    memset(fed, 0, sizeof fed);
    memcpy(fed, bytes, count);
    fed_bytes = count;
    unlock(LOCK_CONTENTS);
    return cudaSuccess;
}

// A kernel may count in 4 bytes what was given as 8.
static bool copy_fed(void *to, size_t bytes) {
    if (!fed_bytes || bytes > sizeof fed)
        return false;
    memcpy(to, fed, bytes);
    fed_bytes = 0;
    return true;
}

// ---- copies, with the lock held
static void copy_in(uint64_t to, const void *from, size_t bytes) {
    forget(to, to + bytes);
    if (bytes > MOST_BYTES)
        return;
    if (!has_room(bytes))
        forget_all();
    memcpy((void *)to, from, bytes);
    note(to, bytes);
}

// The first known piece in a range of addresses; an empty one at its end if there is none.
static struct range next_known(uint64_t at, uint64_t end) {
    int index = ranges_after(&known, at);
    if (index == known.count || known.items[index].at >= end)
        return (struct range){.at = end};
    struct range found = known.items[index];
    uint64_t start = found.at > at ? found.at : at, stop = end_of(found) < end ? end_of(found) : end;
    return (struct range){.at = start, .size = stop - start};
}

static void copy_out(char *to, uint64_t from, size_t bytes) {
    uint64_t at = from, end = from + bytes;
    while (at < end) {
        struct range piece = next_known(at, end);
        memset(to + (at - from), 0, piece.at - at);
        memcpy(to + (piece.at - from), (void *)piece.at, piece.size);
        at = end_of(piece);
    }
}

// The copy of known bytes is known as far as there is room for it: it must not cost more host memory than copies in.
static void copy_within(uint64_t to, uint64_t from, size_t bytes) {
    if (to == from)
        return;
    forget(to, to + bytes);
    for (uint64_t at = from, end = from + bytes; at < end;) {
        struct range piece = next_known(at, end);
        uint64_t target = to + (piece.at - from);
        at = end_of(piece);
        if (!piece.size || !has_room(piece.size))
            continue;
        memmove((void *)target, (void *)piece.at, piece.size);
        note(target, piece.size);
    }
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    if (!is_device_only(to) && !is_device_only(from)) {
        memmove(to, from, bytes);
        return;
    }
    lock(LOCK_CONTENTS);
    if (!is_device_only(from))
        copy_in((uint64_t)to, from, bytes);
    else if (!is_device_only(to) && !copy_fed(to, bytes))
        copy_out(to, (uint64_t)from, bytes);
    else if (is_device_only(to))
        copy_within((uint64_t)to, (uint64_t)from, bytes);
    unlock(LOCK_CONTENTS);
}

// ---- fills
static void fill_device(uint64_t at, int value, size_t bytes) {  // with the lock held
    forget(at, at + bytes);
    if (!value || bytes > LARGEST_FILL)
        return;
    if (!has_room(bytes))
        forget_all();
    memset((void *)at, value, bytes);
    note(at, bytes);
}

void fill_bytes(void *at, int value, size_t bytes) {
    if (!is_device_only(at)) {
        memset(at, value, bytes);
        return;
    }
    lock(LOCK_CONTENTS);
    fill_device((uint64_t)at, value, bytes);
    unlock(LOCK_CONTENTS);
}

// ---- the ends of values
void forget_bytes(void *at, size_t bytes) {
    lock(LOCK_CONTENTS);
    forget((uint64_t)at, (uint64_t)at + bytes);
    unlock(LOCK_CONTENTS);
}

void forget_all_bytes(void) {
    if (!__atomic_load_n(&known_bytes, __ATOMIC_RELAXED))
        return;
    lock(LOCK_CONTENTS);
    forget_all();
    unlock(LOCK_CONTENTS);
}
