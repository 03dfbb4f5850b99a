// A sorted list of address ranges that do not overlap.
#include "simulated.h"
#include <stdlib.h>
#include <string.h>

int ranges_after(const struct ranges *list, uint64_t address) {
    int low = 0, high = list->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (list->items[middle].at + list->items[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct range *ranges_find(const struct ranges *list, uint64_t address) {
    int index = ranges_after(list, address);
    return index < list->count && list->items[index].at <= address ? &list->items[index] : NULL;
}

bool ranges_insert(struct ranges *list, int index, struct range item) {
    if (list->count == list->room) {
        int room = 2 * list->room + 64;
        struct range *items = realloc(list->items, (size_t)room * sizeof *items);
        if (!items)
            return false;
        list->items = items;
        list->room = room;
    }
    memmove(list->items + index + 1, list->items + index, (size_t)(list->count - index) * sizeof item);
    list->items[index] = item;
    list->count++;
    return true;
}

void ranges_remove(struct ranges *list, int first, int count) {
    list->count -= count;
    memmove(list->items + first, list->items + first + count, (size_t)(list->count - first) * sizeof *list->items);
}
