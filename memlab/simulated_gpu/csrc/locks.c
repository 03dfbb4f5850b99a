// The locks, all in one place, so that a fork finds none of them held: it takes them all first, in the order that
// nested locks are taken in (that of enum lock), and both sides then release them.
#include "simulated.h"
#include <pthread.h>

static pthread_mutex_t mutexes[LOCKS] = {
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
};
_Static_assert(LOCKS == 7, "an initializer for each lock");

void lock(enum lock which) {
    pthread_mutex_lock(&mutexes[which]);
}

void unlock(enum lock which) {
    pthread_mutex_unlock(&mutexes[which]);
}

static void lock_all(void) {
    for (int i = 0; i < LOCKS; i++)
        pthread_mutex_lock(&mutexes[i]);
}

static void unlock_all(void) {
    for (int i = LOCKS - 1; i >= 0; i--)
        pthread_mutex_unlock(&mutexes[i]);
}

static void begin_child(void) {
    leave_parent();
    unlock_all();
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(lock_all, unlock_all, begin_child);
}
